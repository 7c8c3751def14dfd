"""Small work of a library stays in the calling thread, and the caller's threads are as they were afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

import layerzero as lz
from layerzero.backends import shape_cache
from layerzero.backends.shape_cache import GRAIN, small_alone

needs_runtime = pytest.mark.skipif(shape_cache.runtime() is None, reason="torch's OpenMP runtime is not the only one")


@pytest.fixture
def two_threads():
    allowed = shape_cache.runtime().omp_get_max_threads()
    shape_cache.runtime().omp_set_num_threads(2)
    yield
    shape_cache.runtime().omp_set_num_threads(allowed)


@needs_runtime
def test_only_small_work_runs_alone_and_the_setting_comes_back(two_threads):
    allowed = shape_cache.runtime().omp_get_max_threads
    run = small_alone(lambda tensor, *_: allowed())
    assert run(torch.empty(GRAIN - 1), 0.5) == 1
    assert allowed() == 2
    assert run(torch.empty(GRAIN)) == 2

    def fails(tensor):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        small_alone(fails)(torch.empty(3))
    assert allowed() == 2


@needs_runtime
def test_other_threads_keep_theirs(two_threads):
    allowed = shape_cache.runtime().omp_get_max_threads
    inside, seen = threading.Event(), []

    def elsewhere():
        shape_cache.runtime().omp_set_num_threads(3)
        assert inside.wait(10)
        seen.append(allowed())

    other = threading.Thread(target=elsewhere)
    other.start()

    def operator(tensor):
        inside.set()
        other.join()

    small_alone(operator)(torch.empty(3))
    assert seen == [3]


@pytest.mark.skipif(shape_cache.runtime() is not None, reason="torch's OpenMP runtime is the only one in this process")
def test_where_another_runtime_was_loaded_a_process_of_its_own_is_tried():
    """A library that an earlier test imported may bring one; then the tests of this file would all be skipped."""
    without = {each: value for each, value in os.environ.items() if not each.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not another_runtime", __file__]
    done = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if needs_runtime.kwargs["reason"] in done.stdout:
        pytest.skip("torch alone has no OpenMP runtime here, or several")


def test_without_a_runtime_the_operator_is_as_it_was(monkeypatch):
    monkeypatch.setattr(shape_cache, "runtime", lambda: None)
    operator = lambda tensor: tensor  # told apart by identity
    assert small_alone(operator) is operator


@needs_runtime
@pytest.mark.parametrize("kernel", ["zentorch.add_rms_norm", "vllm.cpu.add_rms_norm", "zentorch.rms_norm"])
@pytest.mark.parametrize("rows", [1, 40, 512])
def test_norms_are_right_on_both_sides_of_the_limit(kernel, rows):
    summing = kernel.endswith("add_rms_norm")
    function = "add_residual_rms_norm_" if summing else "rms_norm"
    tensors = [torch.randn(rows, 768) for _ in range(1 + summing)]
    report = lz.explain(function, *tensors, torch.randn(768))
    if not any(each.kernel.id == kernel and each.legal for each in report.candidates):
        pytest.skip(f"{kernel} cannot run here")
    weight = torch.randn(768)
    summed = sum(tensors[1:], tensors[0].clone())
    wanted = torch.nn.functional.rms_norm(summed, (768,), weight, 1e-6)
    lz.lock(report.operation, kernel)
    try:
        got = getattr(lz, function)(*tensors, weight)
    finally:
        lz.unlock(report.operation)
    torch.testing.assert_close(got[0] if isinstance(got, tuple) else got, wanted, atol=1e-4, rtol=1e-4)


def test_a_kernel_of_onnx_runtime_takes_the_threads_that_torch_has_now(monkeypatch):
    """Its session keeps those that it began with: begun in a thread of one, it took one for ever."""
    runtime = pytest.importorskip("onnxruntime")
    x, weight, made = torch.randn(3, 40), torch.randn(40), []
    report = lz.explain("rms_norm", x, weight, eps=0.03)  # no other test has a session of this eps
    if not any(each.kernel.id == "onnxruntime.rms_norm" and each.legal for each in report.candidates):
        pytest.skip("onnxruntime.rms_norm cannot run here")
    usual, before = runtime.InferenceSession, torch.get_num_threads()

    def session(model, options, **named):
        made.append(options.intra_op_num_threads)
        return usual(model, options, **named)

    monkeypatch.setattr(runtime, "InferenceSession", session)
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            with lz.scope(locks={"rms_norm": "onnxruntime.rms_norm"}):
                got = lz.rms_norm(x, weight, eps=0.03)
            torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (40,), weight, 0.03))
    finally:
        torch.set_num_threads(before)
    assert made == [1, 2]
