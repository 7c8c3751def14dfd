"""What is measured for replays of a graph: calls whose steps a graph can go on reading, and kernels that take them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import types

import pytest
import torch
from torch.nn.functional import rms_norm

import layerzero as lz
from layerzero.core import limits as limit
from layerzero.core.evidence import Measurement
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.ops.norm.declare import norm_case
from layerzero.tuning.measurement import contest as contests
from layerzero.tuning.measurement.clocks import clock_of
from layerzero.tuning.measurement.contest import Status, contest, taking_part
from layerzero.tuning.measurement.jobs import Job, default_grid
from layerzero.tuning.measurement.tune import run_jobs
from layerzero.tuning.measurement.workload import jobs_of
from layerzero.tuning.storage import files
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger
from others import OTHERS
from paged_calls import PAGE, paged

LIBRARIES = {"torch": "2.11.0", "flashinfer-python": "0.7.2.post1", "vllm": "0.20.0"}


def recorded(step: bool) -> Job:
    """A call over pages, with an eager step or without one, as a workload has it."""
    queries, *caches, table, lens, _ = paged(queries=(1, 1), lens=(5, 7), dtype=torch.float32)
    with lz.record() as recording:
        made = lz.StepMetadata(table, lens) if step else None
        lz.paged_attention(queries.unsqueeze(1), *caches, table, lens, step=made)
    (job,) = jobs_of(recording.manifest(), "cpu")
    return job


def of_the_grid() -> Job:
    return next(each for each in default_grid("cpu", ("float32",)) if each.operation.endswith("decode.paged"))


@pytest.mark.parametrize("made", [lambda: recorded(True), of_the_grid], ids=["recorded", "case"])
def test_steps_of_calls_that_are_replayed_stay_where_they_are(made):
    job = made()
    assert (job.facts("cpu")["step"], job.make("cpu").arguments["step"].kind) == ("eager", "eager")
    replayed = dataclasses.replace(job, for_graph=True)
    assert replayed.facts("cpu")["step"] == "capturable"
    assert replayed.make("cpu").arguments["step"].capturable


def test_a_call_without_a_step_is_replayed_without_one():
    replayed = dataclasses.replace(recorded(False), for_graph=True)
    assert replayed.facts("cpu")["step"] == "none"


@pytest.mark.parametrize(("kind", "takes_part"), [("none", False), ("eager", False), ("capturable", True)])
def test_who_plans_on_the_host_is_not_replayed_without_a_step_that_stays(kind, takes_part):
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    query, cache = meta(4, 1, 32, 128), meta(64, PAGE, 8, 128)
    table, lens = meta(4, 16, dtype=torch.int32), meta(4, dtype=torch.int32)
    step = None if kind == "none" else lz.StepMetadata(table, lens, capturable=kind == "capturable")
    with lz.scope(allow_jit_compile=True):
        report = lz.explain(
            "paged_attention", query, cache, cache, table, lens, step=step, device="H200", libraries=LIBRARIES
        )
        named = {each.kernel.id for each in taking_part(report, graph=True)}
        eager = {each.kernel.id for each in taking_part(report)}
    assert "flashinfer.paged_decode" in eager
    assert ("flashinfer.paged_decode" in named) is takes_part


@pytest.fixture
def captures(monkeypatch):
    """Captures as far as a contest sees of them: what is called inside, and replays that call it again."""
    inside = []

    @contextlib.contextmanager
    def graph(made, **_):
        inside.append(made)
        yield
        inside.pop()

    class Graph:
        def replay(self):
            pass

    stream = types.SimpleNamespace(wait_stream=lambda _: None)
    for name, stub in {
        "Stream": lambda: stream, "stream": lambda _: contextlib.nullcontext(), "current_stream": lambda *_: stream,
        "synchronize": lambda: None, "CUDAGraph": Graph, "graph": graph, "current_device": lambda: 0,
        "graph_pool_handle": lambda: (0, 1),
    }.items():  # fmt: skip
        monkeypatch.setattr(contests.torch.cuda, name, stub)
    return inside


def replayed(kernel):
    REGISTRY.register_kernel(kernel)
    job = next(each for each in default_grid("cpu", ("float32",)) if each.operation == "norm.rms")
    effort = contests.Effort(samples=3, budget_s=0.05)
    found = contest(job.make("cpu"), effort=effort, graph=True, leave_out=OTHERS, clock=contests.clock_of("cpu"))
    return next(each for each in found.entries if each.kernel.id == kernel.id)


def test_what_is_captured_is_the_plan_that_a_capture_gets(captures):
    """An eager one may refuse to run there, which is no failure of the kernel."""
    ran = []

    def load(facts):
        capturing = bool(facts["capturing"])

        def run(input, weight, *, eps):
            ran.append((capturing, bool(captures), gc.isenabled()))
            return rms_norm(input, weight.shape, weight, eps)

        return run

    kernel = dataclasses.replace(REGISTRY.kernel("torch.rms_norm"), id="mine.captured", load=load, stock=False)
    assert replayed(kernel).status is Status.TIMED
    assert {each for each in ran if each[1]} == {(True, True, False)}, "nothing is collected in a capture"
    assert not any(capturing and not inside for capturing, inside, _ in ran)


def test_a_capture_that_refuses_a_kernel_is_no_failure_of_it(captures):
    def eager_alone(facts):
        return Reason(ReasonCode.CUDA_GRAPH_UNSAFE, "its plan", "made before", "none") if facts["capturing"] else None

    plain = REGISTRY.kernel("torch.rms_norm")
    refuses = limit.Custom("capture: its plan", eager_alone)
    entry = replayed(dataclasses.replace(plain, id="mine.eager", limits=(*plain.limits, refuses), stock=False))
    assert (entry.status, entry.measurement) == (Status.UNCAPTURED, None)
    assert "made before" in entry.detail
    assert not ENGINE.ledger.failures()


def test_what_a_capture_refused_is_not_measured_in_each_run_until_a_version_changes(captures, tmp_path, monkeypatch):
    """Nor in another process; another size is another call, and who asks for all again gets all."""
    monkeypatch.setattr("layerzero.tuning.measurement.tune.clock_of", lambda device, graph: clock_of("cpu"))
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    ran = []

    def load(facts):
        def run(input, weight, *, eps):
            ran.append(input.shape[0])
            return rms_norm(input, weight.shape, weight, eps)

        return run

    def eager_alone(facts):
        return Reason(ReasonCode.CUDA_GRAPH_UNSAFE, "its plan", "made before", "none") if facts["capturing"] else None

    plain = REGISTRY.kernel("torch.rms_norm")
    refuses = (*plain.limits, limit.Custom("capture: its plan", eager_alone))
    kernel = dataclasses.replace(plain, id="mine.eager", limits=refuses, load=load, stock=False)
    REGISTRY.register_kernel(kernel)

    def tuned(rows, **more):
        ENGINE.ledger = StoreLedger(FileLedger(tmp_path / "ledger"))
        ran.clear()
        job = Job(*norm_case("norm.rms", rows, 64), "float32")
        effort = contests.Effort(samples=3, budget_s=0.05)
        found = run_jobs([job], torch.device("cpu"), effort=effort, graph=True, isolate=False, leave_out=OTHERS, **more)
        facts = job.facts("cpu")
        steady = Measurement(50.0, 50.0, 0.01, 20, noise=0.01, graph=True)  # whatever else this machine does meanwhile
        ENGINE.ledger.record_time(plain, facts.on(facts.device, capturing=True), steady)
        return found

    (first,) = tuned(9).contests
    assert {each.kernel.id: each.status for each in first.entries}["mine.eager"] is Status.UNCAPTURED
    assert ran
    known = tuned(9)
    assert (known.known, known.contests, ran) == (1, (), [])
    assert len(tuned(10).contests) == 1
    assert ran, "another work of the same class"
    assert len(tuned(9, again=True).contests) == 1
    assert ran
    with monkeypatch.context() as patched:
        patched.setattr(lz, "__version__", "another LayerZero")
        assert len(tuned(9).contests) == 1, "whose adapter may capture it"
    monkeypatch.setattr(files, "_library", lambda kernel, device: "another version")
    assert len(tuned(9).contests) == 1
    assert ran
