"""Kernels in a process of their own: results, errors with their text, ends that cost one call, and what is refused."""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import layerzero as lz
from layerzero.core.errors import IsolatedKernelError, KernelExecutionError, LayerZeroFallbackWarning
from layerzero.core.evidence import Evidence
from layerzero.core.plan import Term
from layerzero.core.reasons import ReasonCode
from layerzero.engine import isolation
from layerzero.engine.dispatch import ENGINE
from layerzero.serving.isolation import kernels

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes of their own need Linux")

HERE = Path(__file__).parent
WEIGHT = torch.linspace(0.5, 1.5, 64)
APART = {"backend_isolation": "subprocess", "isolate": ["apart"]}


@pytest.fixture(name="apart")
def _apart(monkeypatch):
    """The module of kernels, registered anew, in a process of their own."""
    monkeypatch.syspath_prepend(str(HERE))
    sys.modules.pop("isolated_kernels", None)
    module = importlib.import_module("isolated_kernels")
    lz.configure(**APART)
    yield module
    for library in kernels.LIBRARIES.values():
        library.worker.worked()
        library.worker._rests_until = 0.0


@pytest.fixture(scope="module", autouse=True)
def _ends():
    yield
    kernels.end_all()
    kernels.LIBRARIES.clear()


def rows(first: float = 0.5) -> torch.Tensor:
    made = torch.linspace(-1.0, 1.0, 4 * 64).view(4, 64)
    made[0, 0] = first
    return made


def pid() -> int:
    return kernels.LIBRARIES["apart",].worker.pid


def test_results_and_what_is_told(apart):
    x = rows()
    result = lz.rms_norm(x, WEIGHT, 1e-5)
    assert torch.equal(result, rms_norm(x, (64,), WEIGHT, 1e-5))
    assert pid() != os.getpid()
    report = lz.explain("rms_norm", x, WEIGHT)
    assert report.kernel_id == "apart.rms"
    assert any(f"runs in a process of its own, {pid()}: + " in note for note in report.notes)
    assert "isolation" in {term.name for term in report.chosen.terms}
    assert str(pid()) in lz.which("rms_norm", x, WEIGHT)["process"]
    assert any(f"process {pid()} of its own" in line for line in lz.doctor().processes)
    # a result is written into like any other, with gradients on
    result += 1
    again = lz.rms_norm(result, WEIGHT, 1e-5)  # it lies in the shared memory, and is not copied
    assert torch.allclose(again, rms_norm(result, (64,), WEIGHT, 1e-5))
    assert not result._is_view()


def test_strides_layouts_and_overlapping_tensors_arrive_as_they_are(apart):
    packed = torch.linspace(-1, 1, 2 * 8 * 3 * 4 * 16).view(2, 8, 3, 4, 16)
    q, k, v = packed.unbind(2)  # one memory, BSHD
    result = lz.attention(q, k, v, layout="BSHD", causal=True)
    assert lz.which("attention", q, k, v, layout="BSHD", causal=True)["kernel_id"] == "apart.attention"
    expected = scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
    torch.testing.assert_close(result, expected.transpose(1, 2))


def test_what_is_written_into_is_written_back_and_unharmed_by_an_error(apart):
    x, residual = rows(), torch.ones(4, 64)
    version = residual._version
    result = lz.add_residual_rms_norm_(x, residual, WEIGHT, 1e-5)
    assert torch.equal(residual, x + 1)
    assert residual._version > version
    torch.testing.assert_close(result, rms_norm(residual, (64,), WEIGHT, 1e-5))
    x, residual = rows(apart.RAISES), torch.ones(4, 64)
    with pytest.warns(LayerZeroFallbackWarning, match="ValueError: a number that this library"):
        result = lz.add_residual_rms_norm_(x, residual, WEIGHT, 1e-5)  # another kernel runs, on what nobody wrote into
    assert torch.equal(residual, x + 1)


def test_many_results_live_and_their_room_is_free_again(apart):
    results = [lz.rms_norm(rows(number / 64), WEIGHT, 1e-5) for number in range(64)]
    for number, result in enumerate(results):
        assert torch.equal(result, rms_norm(rows(number / 64), (64,), WEIGHT, 1e-5))
    arena = kernels.LIBRARIES["apart",].arena
    top = arena._top
    del results, result
    gc.collect()
    for number in range(64):
        lz.rms_norm(rows(number / 64), WEIGHT, 1e-5)
    assert arena._top == top, "room of earlier results is used again"


LOCK = {"locks": {"norm.rms": "apart.rms"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("CRASHES", "ended with SIGSEGV, in apart.rms"),
        ("LEAVES", "ended with exit code 7, in apart.rms: a library that gave up"),
    ],
)
def test_an_end_costs_one_call(apart, what, words):
    x = rows(getattr(apart, what))
    lz.rms_norm(rows(), WEIGHT, 1e-5)
    first = pid()
    with pytest.warns(LayerZeroFallbackWarning, match=words):
        result = lz.rms_norm(x, WEIGHT, 1e-5)
    assert torch.allclose(result, rms_norm(x, (64,), WEIGHT, 1e-5))
    assert lz.explain("rms_norm", x, WEIGHT).reasons("apart.rms")[0].code is ReasonCode.UNHEALTHY
    assert lz.doctor().health["apart.rms in norm.rms"].failures == 1
    ENGINE.health.reset()
    lz.rms_norm(rows(), WEIGHT, 1e-5)
    assert pid() != first


def test_an_error_has_its_text_and_where_it_was_raised(apart):
    with lz.scope(**LOCK), pytest.raises(KernelExecutionError) as caught:
        lz.rms_norm(rows(apart.RAISES), WEIGHT, 1e-5)
    cause = caught.value.__cause__
    assert isinstance(cause, IsolatedKernelError)
    assert "ValueError: a number that this library does not like (in process" in str(cause)
    assert "in act" in cause.__notes__[0]
    with lz.scope(**LOCK):
        lz.rms_norm(rows(), WEIGHT, 1e-5)  # the process lives on


@pytest.mark.slow
def test_one_that_hangs_is_killed(apart):
    lz.rms_norm(rows(), WEIGHT, 1e-5)
    with (
        lz.scope(**{"isolation.timeout_s": 0.2}),
        pytest.warns(LayerZeroFallbackWarning, match=r"gave no answer for 0\.2 s and was killed"),
    ):
        lz.rms_norm(rows(apart.HANGS), WEIGHT, 1e-5)
    assert kernels.LIBRARIES["apart",].worker.pid is None


@pytest.mark.slow
def test_what_ends_again_and_again_rests(apart):
    with lz.scope(**LOCK):
        for _ in range(2):
            with pytest.raises(KernelExecutionError):
                lz.rms_norm(rows(apart.CRASHES), WEIGHT, 1e-5)
        with pytest.raises(lz.NoKernelFoundError, match="ended 2 times without a result between; it is started again"):
            ENGINE.health.reset()
            lz.rms_norm(rows(), WEIGHT, 1e-5)


def test_what_cannot_cross_is_refused_with_the_next_step(apart):
    def facts(tensor):
        (reason,) = lz.explain("rms_norm", tensor, WEIGHT).reasons("apart.rms")
        assert reason.code is ReasonCode.ISOLATION_UNSUPPORTED
        return reason.fact, reason.hint

    wants = rows().requires_grad_()
    report = lz.explain("rms_norm", wants, WEIGHT)
    assert "Call it under torch.no_grad()" in report.reasons("apart.rms")[0].hint
    with lz.scope(**{"isolation.memory_mb": 1}):
        fact, hint = facts(torch.zeros(8192, 64))
        assert fact == "the call's tensors and results"
        assert hint == "Raise isolation.memory_mb"
    assert torch.equal(lz.rms_norm(wants, WEIGHT, 1e-5), rms_norm(wants, (64,), WEIGHT, 1e-5))
    meta = torch.empty(4, 64, device="meta"), torch.empty(64, device="meta")
    (reason, *_) = lz.explain("rms_norm", *meta, device="mi300x").reasons("apart.rms")
    assert (reason.code, reason.wanted, reason.got) == (ReasonCode.ISOLATION_UNSUPPORTED, "cpu or cuda", "rocm")
    codes = {each.code for each in lz.explain("rms_norm", *meta, device="h100").reasons("apart.rms")}
    assert ReasonCode.ISOLATION_UNSUPPORTED not in codes


def test_kernels_of_the_main_module_and_the_reference_stay(apart, monkeypatch):
    def of_main(facts):
        raise AssertionError

    of_main.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    lz.register_backend([lz.Kernel(id="apart.main", operations=("norm.rms",), load=of_main, **apart.COMMON)])
    (reason,) = lz.explain("rms_norm", rows(), WEIGHT).reasons("apart.main")
    assert reason.fact == "the module of apart.main"
    with lz.scope(isolate=["*"]):
        report = lz.explain("rms_norm", rows(), WEIGHT)
        assert report.reasons("reference.norm.rms") == ()
    with lz.scope(backend_isolation="in_process"):
        assert not isolation.isolated(apart.KERNELS[0], lz.engine.config.current_policy())


@pytest.mark.slow
def test_a_forked_child_has_results_and_a_process_of_its_own(apart):
    result = lz.rms_norm(rows(), WEIGHT, 1e-5)
    expected, parents = result.clone(), pid()
    child = os.fork()
    if not child:
        try:
            own = lz.rms_norm(rows(0.25), WEIGHT, 1e-5)
            right = torch.equal(own, rms_norm(rows(0.25), (64,), WEIGHT, 1e-5)) and pid() != parents
            right &= torch.equal(result, expected)
            result.zero_()
            kernels.end_all()
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(result, expected), "the child wrote into memory of its own"
    assert pid() == parents
    assert torch.equal(lz.rms_norm(rows(), WEIGHT, 1e-5), expected)


class Interrupted:
    """A socket at whose answers a signal handler raises, once the request is on its way."""

    def __init__(self, real, error):
        self.real, self.error, self.close, self.setsockopt = real, error, real.close, real.setsockopt

    def send(self, message):
        self.real.send(message)

    def recv(self, _):
        raise self.error


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_no_later_call_gets_the_answer_of_one_that_was_interrupted(apart, error):
    lz.rms_norm(rows(), WEIGHT, 1e-5)
    worker = kernels.LIBRARIES["apart",].worker
    worker._socket = Interrupted(worker._socket, error)
    with lz.scope(**LOCK), pytest.raises((error, KernelExecutionError)):
        lz.rms_norm(rows(), WEIGHT, 1e-5)
    assert worker.pid is None
    assert torch.equal(lz.rms_norm(rows(0.125), WEIGHT, 1e-5), rms_norm(rows(0.125), (64,), WEIGHT, 1e-5))


def environment_of(folder: Path, library: str, version: str) -> Path:
    """An environment with an interpreter, what this one has, and a library that this one lacks."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    path = [each for each in sys.path if each and Path(each).is_dir()]
    (site / "others.pth").write_text("\n".join([*path, str(HERE)]))
    about = site / f"{library}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n")
    return folder / "bin" / "python"


@pytest.fixture(name="foreign")
def _foreign(apart, tmp_path):
    """The interpreter of an environment that has the library of ``foreign.rms``."""
    assert apart
    return str(environment_of(tmp_path / "venv", "a_foreign_library", "2.1"))


@pytest.mark.slow
def test_a_library_of_another_environment_runs_there(foreign):
    assert lz.explain("rms_norm", rows(), WEIGHT).reasons("foreign.rms")[0].code is ReasonCode.NOT_INSTALLED
    lz.configure(**{"isolation.pythons": {"foreign": foreign}})
    with lz.scope(locks={"norm.rms": "foreign.rms"}):
        result = lz.rms_norm(rows(), WEIGHT, 1e-5)
    assert torch.equal(result, rms_norm(rows(), (64,), WEIGHT, 1e-5))
    process = Path(f"/proc/{kernels.LIBRARIES['foreign', foreign].worker.pid}")
    assert foreign in (process / "cmdline").read_text()


@pytest.mark.slow
def test_a_library_is_updated_by_another_environment_while_the_program_runs(foreign, tmp_path):
    newer, processes = str(environment_of(tmp_path / "newer", "a_foreign_library", "2.2")), []
    with lz.scope(locks={"norm.rms": "foreign.rms"}):
        for python in (foreign, newer):
            lz.configure(**{"isolation.pythons": {"foreign": python}})
            assert torch.equal(lz.rms_norm(rows(), WEIGHT, 1e-5), rms_norm(rows(), (64,), WEIGHT, 1e-5))
            process = Path(f"/proc/{kernels.LIBRARIES['foreign', python].worker.pid}")
            assert python in (process / "cmdline").read_text()
            processes.append(process)
        for each in threading.enumerate():
            if each.name == kernels.ENDING:
                each.join()
        assert [each.exists() for each in processes] == [False, True], "the old one ended"
    newest = str(environment_of(tmp_path / "newest", "a_foreign_library", "3.0"))
    lz.configure(**{"isolation.pythons": {"foreign": newest}})
    refused = lz.explain("rms_norm", rows(), WEIGHT).reasons("foreign.rms")
    assert [each.code for each in refused] == [ReasonCode.VERSION_UNSUPPORTED], "it is looked up there, too"


@pytest.mark.slow
def test_a_container_gets_open_files_and_nothing_else(foreign, tmp_path, monkeypatch):
    """A stand-in for the runtime: what stands behind the image's name runs here, with the files it was handed."""
    runtime = tmp_path / "bin" / "podman"
    runtime.parent.mkdir()
    runtime.write_text(
        f'#!/bin/sh\nif [ "$1" = kill ]; then echo "$2" > {tmp_path}/killed; exit; fi\n'
        f'echo "$@" > {tmp_path}/told\nwhile [ "$1" != an/image:1.0 ]; do shift; done\nshift; shift\n'
        f'exec {foreign} "$@"\n'
    )
    runtime.chmod(0o755)
    lz.configure(backend_isolation="container")
    (reason,) = lz.explain("rms_norm", rows(), WEIGHT).reasons("apart.rms")
    assert reason.fact == "backend_containers: apart"
    given = {"foreign": {"image": "an/image:1.0", "memory": "8g"}}
    lz.configure(isolate=[], backend_containers=given)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        reasons = lz.explain("rms_norm", rows(), WEIGHT).reasons("foreign.rms")
        assert "the container runtime" in {each.fact for each in reasons}
    isolation._machine_of.cache_clear()
    monkeypatch.setenv("PATH", str(runtime.parent), prepend=os.pathsep)
    ENGINE.bump()
    with lz.scope(locks={"norm.rms": "foreign.rms"}):
        assert torch.equal(lz.rms_norm(rows(), WEIGHT, 1e-5), rms_norm(rows(), (64,), WEIGHT, 1e-5))
        with lz.scope(**{"isolation.timeout_s": 0.2}), pytest.raises(KernelExecutionError):
            lz.rms_norm(rows(sys.modules["isolated_kernels"].HANGS), WEIGHT, 1e-5)
    told = (tmp_path / "told").read_text()
    for each in ("--network=none", "--read-only", "--cap-drop=all", "--user=65534:65534", "--memory=8g"):
        assert each in told
    assert f"--name={(tmp_path / 'killed').read_text().strip()} " in told, "the container ends, not its client alone"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend_containers": {"a": {"image": "no-tag"}}}, "a: image: wanted a name with a tag or a digest"),
        ({"backend_containers": {"a": {"image": "b:1", "memory": "lots"}}}, "a: memory: wanted a number with k, m"),
        ({"backend_containers": {"a": {"image": "b:1", "network": "host"}}}, "a: wanted .* unknown field `network`"),
        ({"backend_containers": {"a": "b:1"}}, "a: wanted {image: name:tag, memory: 8g}, got 'b:1'"),
        (
            {"isolation.pythons": {"a": "/no/such/python"}},
            "a: wanted the path of an interpreter that is there, got '/no",
        ),
    ],
)
def test_environments_are_validated(settings, words):
    with pytest.raises(lz.PolicyError, match=words):
        lz.configure(**settings)


def test_the_cost_of_a_process_is_a_term_beside_the_kernels_own():
    found = isolation.costing_more({"a": Evidence(10.0), "b": Evidence(20.0)}, {"a": 30.0})
    assert [each.cost_us for each in found.values()] == [40.0, 20.0]
    assert [each.time_us for each in found.values()] == [10.0, 20.0], "times stay as they were measured"
    cost, priority, apart = isolation.terms_apart([Term("cost", -50.0), Term("priority", 3.0)], found["a"], 30.0, 50.0)
    assert apart == Term("isolation", -100.0), "four times its own time"
    assert cost.points + apart.points == -50.0
    assert priority.points == 3.0


HOST = """
import os, signal, sys, torch, isolated_kernels
import layerzero as lz
from layerzero.serving.isolation import kernels
lz.configure(backend_isolation="subprocess", isolate=["apart"])
lz.rms_norm(torch.ones(4, 64), torch.ones(64), 1e-5)
print(kernels.LIBRARIES["apart",].worker.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["at its end", "by SIGKILL"])
def test_no_process_is_left_behind(killed):
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    host = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", HOST],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    process = os.pidfd_open(int(host.stdout.readline()))
    if killed:
        host.kill()
    _, said = host.communicate()
    select.select([process], [], [])  # until it ended
    os.close(process)
    assert host.returncode == (-signal.SIGKILL if killed else 0)
    assert not said
