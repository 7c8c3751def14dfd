"""Every kernel that is declared, against the reference of each of its operations, and the fuzzer that draws the calls.

A kernel that cannot run here is skipped with the reasons that a user would get. What is checked of one is the suite's
business: layerzero.testing.conformance.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.core.device import Device
from layerzero.engine.probe import this_machine
from layerzero.engine.registry import REGISTRY
from layerzero.ops import FUNCTIONS, OPERATIONS, PLAIN_FUNCTIONS
from layerzero.testing import conformance, fuzz, random_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Kernels that compile take seconds for each class of sizes; tests/kernels/test_inductor.py covers them on a few.
PLAIN = {kernel.id for name in PLAIN_FUNCTIONS for kernel in REGISTRY.kernels(name)}
KERNELS = [kernel for kernel in REGISTRY.kernels() if not kernel.jit and kernel.id not in PLAIN]
AT_A_TIME = 20
UNTIL_UNIX_S = float(os.environ.get("CONFORMANCE_UNTIL_UNIX_S", "inf"))
"""All kernels take 90 minutes of a core of an Intel Xeon, and CI ends after 90; ``make conformance`` runs them all."""

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


def _parts():
    """The kernels of each library, a few at a time: those of torch took one process 26 minutes, while others waited."""
    for library in sorted({kernel.source for kernel in KERNELS}):
        named = [kernel.id for kernel in KERNELS if kernel.source == library]
        for part, first in enumerate(range(0, len(named), AT_A_TIME), start=1):
            yield pytest.param(named[first : first + AT_A_TIME], id=f"{library}-{part}")


@pytest.mark.slow
@pytest.mark.parametrize("kernels", list(_parts()))
def test_every_kernel_conforms(kernels, monkeypatch):
    if time.time() > UNTIL_UNIX_S:
        pytest.skip(f"the time that CONFORMANCE_UNTIL_UNIX_S gives is over: {', '.join(kernels)}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # kernels split their work differently on several threads
    report = conformance.run(kernels, device=DEVICE, seed=1, calls=10)
    assert report.ok, str(report)
    if not report.passed:
        pytest.skip("; ".join(f"{each.kernel_id}: {why(each)}" for each in report.kernels))


def why(report):
    return report.refused or ", ".join(dict.fromkeys(each.message for each in report.results))


def test_fuzzing_finds_a_wrong_kernel_and_says_how_to_see_it_again():
    @lz.register_kernel("norm.rms", "user.rounds_weights", priority=100)
    def rounds_weights(input, weight, *, eps=1e-6):
        return torch.nn.functional.rms_norm(input, weight.shape, weight.bfloat16().to(weight.dtype), eps)

    report = fuzz.run(180, seed=0)
    assert not report.ok
    failure = report.failures[0]
    assert failure.kernel_id == "user.rounds_weights"
    assert "times the tolerance" in failure.problem
    assert failure.reproducer in str(report)
    again = fuzz.replay(failure.seed, failure.number)
    assert [each.problem for each in again.failures if each.way == failure.way] == [failure.problem]
    only = fuzz.run(30, seed=0, kernels=["user.rounds_weights"])
    assert set(only.kernels) == {"user.rounds_weights"}
    assert only.kernels.total() >= only.calls, "calls are drawn of what the kernel implements"
    first = only.failures[0]
    assert fuzz.replay(0, first.number, kernels=["user.rounds_weights"]).failures[0].problem == first.problem


def test_fuzzing_finds_a_kernel_that_raises_or_writes_into_its_arguments():
    @lz.register_kernel("norm.rms", "user.raises", priority=100, supported_dtypes=["float32"])
    def raises(input, weight, *, eps=1e-6):
        raise RuntimeError("planted")

    @lz.register_kernel("norm.rms", "user.writes", priority=99, supported_dtypes=["bfloat16"])
    def writes(input, weight, *, eps=1e-6):
        result = torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
        input.zero_()
        return result

    report = fuzz.run(240, seed=0, kernels=["user.*"])
    found = {(failure.kernel_id, failure.problem.split(":")[0]) for failure in report.failures}
    assert ("user.raises", "user.raises failed in norm.rms (RuntimeError") in found
    assert ("user.writes", "input") in found


@pytest.mark.slow
def test_fuzzing_covers_every_function_and_every_kernel_that_can_run_here():
    calls = 30 * sum(each.weight for each in FUNCTIONS.values())  # every kernel runs on a fifth of them
    report = fuzz.run(calls, seed=0, device=DEVICE)
    assert report.ok, str(report)
    assert report.calls == calls
    assert report.reused > 20
    device = Device.detect(DEVICE)
    here = {
        kernel.id
        for kernel in REGISTRY.kernels()
        if this_machine().state(kernel.backend, device).reason is None and device.platform in kernel.backend.platforms
    }
    ran = set(report.kernels)
    for operation in OPERATIONS:  # a function of several has some of them rarely: those are asked for by name
        if f"reference.{operation}" not in ran:
            alone = fuzz.run(5, seed=0, operations=[operation], kernels=["reference.*"], device=DEVICE)
            assert alone.ok, str(alone)
            assert alone.calls == 5, operation
            ran |= set(alone.kernels)
    assert ran <= here
    assert {each for each in here if each.startswith(("reference.", "torch.sdpa.math", "torch.rms"))} <= ran


def test_a_call_is_the_same_wherever_it_is_drawn():
    for number in range(20):
        first, again = random_call(3, number), random_call(3, number)
        other = random_call(3, number, data=1)
        assert first.text == again.text == other.text
        for name, value in first.arguments.items():
            if isinstance(value, torch.Tensor):
                pair = [each.resolve_neg().contiguous().view(-1) for each in (value, again.arguments[name])]
                bits = [each.view(torch.uint8) for each in pair if each.numel()]
                assert not bits or torch.equal(*bits), name


@at_once("function", FUNCTIONS)
def test_a_call_with_other_data_lies_in_memory_as_it_did(function):
    for number in range(25):
        first, other = (random_call(3, number, function=function, data=data) for data in (0, 1))
        assert first.text == other.text


def test_fuzzing_allows_a_kernel_its_own_tolerance():
    wide = {"tolerance": {"float32": lz.Tolerance(1e-2, 1e-2)}, "tolerance_reason": "it adds up in bfloat16"}
    for name, declared in (("narrow", {}), ("wide", wide)):

        @lz.register_kernel("norm.rms", f"user.{name}", supported_dtypes=["float32"], **declared)
        def coarse(input, weight, *, eps=1e-6):
            return torch.nn.functional.rms_norm(input, weight.shape, weight, eps) * 1.004

    assert not fuzz.run(600, seed=0, kernels=["user.narrow"]).ok
    assert fuzz.run(600, seed=0, kernels=["user.wide"]).ok
