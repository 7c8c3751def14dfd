"""What a tuning run with an end measures first, and what becomes of kernels that have to compile meanwhile."""

from __future__ import annotations

import collections
import contextlib
import dataclasses

import pytest
import torch
from budget_runs import norm_facts, norms, run
from torch.nn.functional import rms_norm

import layerzero as lz
from clock import Clock
from compiled_norms import compiled_norm
from layerzero.core.evidence import Measurement
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.jit import BuildOutcome
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measurement import contest as contests
from layerzero.tuning.measurement import loop, tune_run
from layerzero.tuning.measurement.clocks import CpuClock
from layerzero.tuning.measurement.comparison import record_times
from layerzero.tuning.measurement.contest import Status
from layerzero.tuning.measurement.timing import Deadline, Effort
from layerzero.tuning.measurement.tune import asked_jobs
from layerzero.tuning.measurement.workload import jobs_of
from layerzero.tuning.storage import rows as rows_of_times
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger
from others import OTHERS


@pytest.fixture
def compiled():
    """A kernel that compiles, which a child may build."""
    built, loaded = [], []
    compiled_norm(loaded.append, built=built)
    return built, loaded


def test_what_compiles_is_built_by_children_and_measured_when_it_is_there(compiled, monkeypatch):
    built, loaded = compiled
    order = []

    def build_apart(pairs, told, stop, *, modules):
        order.append("build")
        for kernel, facts in pairs:
            built.append(facts.size("hidden"))
            told(kernel, facts, BuildOutcome())

    monkeypatch.setattr(loop, "build_apart", build_apart)
    found = run(
        norms(64), Deadline(100.0, Clock()), isolate=True, progress=lambda step: order.append(step.contest is not None)
    )
    assert order == [False, True, "build"], "what can run is measured first"
    (contest,) = found.contests
    assert {"mine.compiled", "torch.rms_norm"} <= {each.id for each in contest.times}
    assert loaded == [64], "it was loaded here when it was built"


def test_who_comes_later_is_timed_beside_all_that_may_be_the_best_one(compiled, monkeypatch, tmp_path):
    """While the host takes twice as long: the fastest alone beside it would lose to its rival of a calmer moment."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path / "ledger"))
    lz.register_kernel("norm.rms", "mine.quick")(
        lambda input, weight, *, eps: rms_norm(input, weight.shape, weight, eps)
    )
    device_and_host = {"torch.rms_norm": (28.0, 32.0), "mine.quick": (18.0, 30.0), "mine.compiled": (15.6, 31.0)}
    together = []

    def build_apart(pairs, told, stop, *, modules):
        for kernel, facts in pairs:
            compiled[0].append(facts.size("hidden"))
            told(kernel, facts, BuildOutcome())

    def contest(call, *, only=(), leave_out=(), **_):
        report = lz.explain(call.function, **call.arguments)
        names = [name for name in only or device_and_host if name not in leave_out]
        together.append(sorted(names))
        entries = []
        for name in names:
            device_us, host_us = device_and_host[name]
            host_us *= len(together)
            parts = {"device_us": device_us, "host_us": host_us, "noise": 0.01}
            time = Measurement(max(device_us, host_us), host_us, 0.0, 20, **parts)
            entries.append(contests.ContestEntry(REGISTRY.kernel(name), Status.TIMED, time))
        entries.sort(key=lambda each: each.measurement.median_us)
        return contests.Contest("a call", report, tuple(entries))

    monkeypatch.setattr(loop, "build_apart", build_apart)
    monkeypatch.setattr(tune_run, "contest", contest)
    monkeypatch.setattr(tune_run, "rehearse", lambda *_, **__: ())
    found = run(norms(64), Deadline(100.0, Clock()), isolate=True)
    assert together == [["mine.quick", "torch.rms_norm"], ["mine.compiled", "mine.quick", "torch.rms_norm"]]
    assert found.choices[0].kernel_id == "mine.compiled"


def test_a_call_that_waits_for_a_build_comes_before_calls_that_nobody_looked_at(compiled, monkeypatch):
    """A later batch of calls takes what is left of the time."""
    order = []

    class Child:
        """Builds for the first call while the second one is measured."""

        open = parallel = False

        def __init__(self, run):
            self.asked = 0

        def ask(self, jobs, first):
            assert not first, "beside the measuring alone"

        def built_one(self):
            self.asked += 1
            if self.asked == 2:
                compiled[0].append(64)
            return self.asked == 2

        def caught_up(self, *, wait_for):
            return False

        def end(self):
            pass

    measured = tune_run.contest

    def contest(call, **more):
        found = measured(call, **more)
        order.append((found.facts.size("hidden"), "mine.compiled" in {each.id for each in found.times}))
        return found

    monkeypatch.setattr(loop, "Children", Child)
    monkeypatch.setattr(tune_run, "contest", contest)
    run(norms(64, 128, 256), Deadline(100.0, Clock()), isolate=True)
    assert order == [(64, False), (128, False), (64, True), (256, False)]


def test_what_calls_would_choose_is_built_first_then_what_may_be_near(compiled, monkeypatch, tmp_path):
    """Of all calls that are asked for first, before the calls of a batch have what nobody knows built."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path / "ledger"))
    known = REGISTRY.kernel("mine.compiled")
    lz.unregister_kernel(known.id)
    kernels = {name: dataclasses.replace(known, id=f"mine.{name}") for name in ("unknown", "winner", "near")}
    lz.register_backend(list(kernels.values()))
    stock = REGISTRY.kernel("torch.rms_norm")
    for rows in (2, 4, 16, 32):
        for hidden in (64, 128, 256):
            times = {stock: 90.0, kernels["near"]: 60.0, kernels["winner"]: 50.0}
            facts = lz.facts("rms_norm", torch.empty(rows, hidden), torch.empty(hidden))
            found = {each: Measurement(us * rows, 1.0, 0.0, 20, noise=0.01) for each, us in times.items()}
            record_times(facts, found)
    asked = []

    def build_apart(pairs, told, stop, *, modules):
        named = ((kernel.id.partition(".")[2], facts.size("hidden")) for kernel, facts in pairs)
        asked.append(list(dict.fromkeys(named)))  # each is built once

    class OnGpu(loop.Children):
        def __init__(self, run):
            super().__init__(run)
            self.parallel = True

    monkeypatch.setattr(loop, "build_apart", build_apart)
    monkeypatch.setattr("layerzero.tuning.measurement.tune.AT_ONCE", 1)
    monkeypatch.setattr(loop, "Children", OnGpu)
    monkeypatch.setattr(tune_run.TuningRun, "_measure", lambda *_: "known")
    run(norms(64, 128, 256), Deadline(100.0, Clock()), isolate=True)
    assert asked == [
        [("winner", 64), ("winner", 128), ("winner", 256), ("near", 64), ("unknown", 64)],
        [("winner", 128), ("winner", 256), ("near", 128), ("near", 256), ("unknown", 128), ("unknown", 256)],
    ]


@pytest.mark.parametrize(("outcome", "again", "tried"), [
    (BuildOutcome("no such file"), 64, [1, 0]),
    (BuildOutcome("no such file"), 128, [1, 1]),  # another build of the kernel
    (BuildOutcome("memory ran out", lasting=False), 64, [1, 1]),
    (BuildOutcome("no ninja", lacks="ninja"), 128, [1, 0]),  # which every build of it needs
])  # fmt: skip
def test_what_failed_to_build_for_one_batch_is_not_tried_for_the_next(compiled, monkeypatch, outcome, again, tried):
    """Which was asked for before that was known: that build, if it failed for good, and nothing else."""
    asked = []

    def build_apart(pairs, told, stop, *, modules):
        asked.append(len(pairs))
        for kernel, facts in pairs:
            told(kernel, facts, outcome)

    monkeypatch.setattr(loop, "build_apart", build_apart)

    class Builds(loop.Party):
        def to_build(self, jobs):
            return [(REGISTRY.kernel("mine.compiled"), norm_facts(8, jobs[0]))]

    party = Builds(jobs=(), device=torch.device("cpu"), deadline=Deadline(100.0, Clock()))
    children = loop.Children(party)
    children.ask([64])
    children.ask([again])
    children.caught_up(wait_for=True)
    assert asked == tried
    monkeypatch.setattr(
        loop, "build_apart", lambda pairs, told, *_, **__: [told(*pair, BuildOutcome()) for pair in pairs]
    )
    assert list(party.not_built) == ["mine.compiled"]
    children.ask([again])
    children.caught_up(wait_for=True)
    assert list(party.not_built) == ([] if not outcome.lasting else ["mine.compiled"]), "one that succeeds later"


@pytest.mark.parametrize("broken", [False, True])
def test_an_error_of_what_works_beside_the_measuring_is_heard_of_at_the_end(compiled, monkeypatch, broken):
    """Though nothing asks for what came of it before: the last call is measured, or ends in an error itself."""

    def build_apart(*_, **__):
        raise ValueError("the child refused its job")

    class OnGpu(loop.Children):
        def __init__(self, party):
            party.device = torch.device("cuda")
            super().__init__(party)
            party.device = torch.device("cpu")

        def caught_up(self, *, wait_for):
            return False

        @property
        def open(self):
            return False

    def measure(*_):
        if broken:
            raise KeyboardInterrupt
        return "known"

    monkeypatch.setattr(loop, "build_apart", build_apart)
    monkeypatch.setattr(loop, "Children", OnGpu)
    monkeypatch.setattr(tune_run.TuningRun, "_measure", measure)
    with pytest.raises(KeyboardInterrupt if broken else ValueError) as caught:
        run(norms(64), Deadline(100.0, Clock()), isolate=True)
    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any("the child refused its job" in each for each in told)


def test_what_does_not_build_is_told_and_the_rest_is_measured(compiled, monkeypatch):
    def build_apart(pairs, told, stop, *, modules):
        for pair in pairs:
            told(*pair, BuildOutcome("lines\nninja: failed"))

    monkeypatch.setattr(loop, "build_apart", build_apart)
    found = run(norms(64, 128), Deadline(100.0, Clock()), isolate=True)
    assert found.not_built == {"mine.compiled": "ninja: failed"}
    assert len(found.contests) == 2


def test_with_an_end_nothing_compiles_here_that_no_child_can_build(compiled):
    found = run(norms(64), Deadline(100.0, Clock()))
    assert list(found.not_built) == ["mine.compiled"]
    assert compiled[1] == []
    assert "mine.compiled" in {each.id for each in run(norms(64)).contests[0].times}, "without an end it may"


def test_what_was_called_is_measured_first(tmp_path):
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path / "ledger"))
    lz.rms_norm(torch.randn(3, 48), torch.randn(48))
    first = asked_jobs("rms_norm", None, ["float32"], "cpu")[0]
    assert (first.operation, first.recipe.tensors["input"].shape) == ("norm.rms", (3, 48))
    assert len(asked_jobs("rms_norm", None, ["float32"], "cpu")) > 1, "then cases and grid"
    later = StoreLedger(FileLedger(tmp_path / "ledger"))
    assert [call.operation for _, call in later.calls()] == ["norm.rms"]


def test_calls_are_bounded_and_a_damaged_file_is_begun_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_of_times, "MAX_CALLS", 2)
    made = rows_of_times.CallsMade(tmp_path)
    for hidden in (16, 32, 64):
        made.add(lz.facts("rms_norm", torch.empty(2, hidden), torch.empty(hidden)))
        made.write()
    assert [each.call.tensors["input"].shape[1] for each in made.made()] == [64, 32]
    (tmp_path / rows_of_times.CALLS_FILE).write_text("{")
    assert made.made() == []
    made.add(lz.facts("rms_norm", torch.empty(2, 8), torch.empty(8)))
    assert len(made.made()) == 1


def test_a_call_that_cannot_be_written_keeps_no_other_from_the_file(tmp_path, caplog):
    made = rows_of_times.CallsMade(tmp_path)
    for hidden in (16, 32):
        made.add(lz.facts("rms_norm", torch.empty(2, hidden), torch.empty(hidden)))
        made.add(object())
    made.write()
    assert sorted(each.call.tensors["input"].shape[1] for each in made.made()) == [16, 32]
    assert [each.message for each in caplog.records if each.exc_info] == [
        "a call is not kept for tuning: its recipe cannot be written"
    ] * 2


@pytest.mark.parametrize(("error", "kept"), [(OSError, True), (KeyboardInterrupt, True), (ZeroDivisionError, False)])
def test_calls_wait_for_room_and_behind_interrupts_and_for_nothing_else(error, kept, tmp_path, monkeypatch):
    made = rows_of_times.CallsMade(tmp_path)
    made.add(lz.facts("rms_norm", torch.empty(2, 8), torch.empty(8)))

    def failing(*_, **__):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(rows_of_times.disk, "write_whole", failing)
        with contextlib.suppress(error):
            made.write()
    assert len(made.made()) == kept


def test_an_interrupt_as_calls_are_taken_loses_none(tmp_path):
    class Interrupted(collections.deque):
        def popleft(self):
            if len(self) == 1:
                raise KeyboardInterrupt
            return super().popleft()

    made = rows_of_times.CallsMade(tmp_path)
    calls = [lz.facts("rms_norm", torch.empty(2, hidden), torch.empty(hidden)) for hidden in (16, 32, 64)]
    made._waiting = Interrupted(calls)
    with pytest.raises(KeyboardInterrupt):
        made.write()
    assert list(made._waiting) == calls
    made.forget()


def test_a_growing_size_is_measured_at_both_ends_and_in_the_middle():
    with lz.record() as recording:
        weight = torch.randn(32)
        for rows in (*range(65, 100), 80, 80):
            lz.rms_norm(torch.randn(rows, 32), weight)
    jobs = jobs_of(recording.manifest(), "cpu")
    assert [each.recipe.tensors["input"].shape[0] for each in jobs] == [80, 65, 99]


def test_a_model_is_called_once_and_its_calls_are_measured():
    weight = torch.randn(64)

    class Model(torch.nn.Module):
        def forward(self, x):
            called.append(x.shape)
            return lz.rms_norm(x, weight)

    called = []
    found = lz.tune(Model(), torch.randn(8, 64), isolate=False, leave_out=OTHERS, samples=3)
    assert called == [(8, 64)]
    assert [each.facts.operation.name for each in found.contests] == ["norm.rms"]
    with pytest.raises(ValueError, match="wanted a model that calls LayerZero's functions on cpu, got function"):
        lz.tune(lambda: None)


def test_builds_that_are_under_way_are_waited_for_where_vetting_gets_nowhere(vetting, monkeypatch):
    """On a GPU they end one by one: the first that ended let go of the others."""
    under_way = [1, 2, 3]

    class OneByOne(loop.Children):
        @property
        def open(self):
            return bool(under_way) or super().open

        def caught_up(self, *, wait_for):
            if wait_for and under_way:
                under_way.pop()
            return super().caught_up(wait_for=wait_for)

    monkeypatch.setattr(loop, "Children", OneByOne)
    vetting.reaches = 0
    run(norms(64), Deadline(100.0, Clock()), isolate=True)
    assert under_way == []
    assert vetting.rounds == [1, 1]


def test_times_of_eager_calls_do_not_keep_replays_from_being_measured(tmp_path, monkeypatch):
    """They stand for replays that nobody timed; whoever asks for these is not told that they are known."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path / "ledger"))
    (job,) = norms(64)
    report = lz.explain(job.facts("cpu"))
    kernel = report.chosen.kernel
    record_times(report.facts, {kernel: Measurement(30.0, 31.0, 0.0, 40, noise=0.01, device_us=9.0, host_us=30.0)})
    given = {"jobs": [job], "device": torch.device("cpu"), "clock": CpuClock(), "effort": Effort(3, 0.0)}
    given |= {"deadline": Deadline(None), "modules": (), "leave_out": (), "again": False, "isolate": False}
    assert tune_run.TuningRun(**given).unknown([kernel], report) == []
    assert tune_run.TuningRun(**given, graph=True).unknown([kernel], report) == [kernel]
