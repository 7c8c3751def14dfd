"""A comparison of many calls: what tells most comes first, it ends when its time is over, and says what it left."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from clock import Clock
from compiled_norms import compiled_norm
from layerzero.engine.jit import BuildOutcome
from layerzero.tuning.measurement import comparison, loop
from layerzero.tuning.measurement import contest as contests
from layerzero.tuning.measurement.admission import Ceiling
from layerzero.tuning.measurement.clocks import CpuClock
from layerzero.tuning.measurement.comparison import BEFORE_BUILDS, MOST, TIME_OVER, compare, long_calls
from layerzero.tuning.measurement.jobs import Job, jobs_of_cases, long_last, operations_named, telling
from layerzero.tuning.measurement.timing import Deadline, Effort, Pace
from layerzero.tuning.measurement.tune import asked_jobs
from others import OTHERS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_ceiling(monkeypatch):
    lz.configure(deny=OTHERS)
    monkeypatch.setattr("layerzero.tuning.measurement.bench.ceiling", lambda *_: Ceiling(10.0, 0.1))


def norms(*hiddens):
    return asked_jobs("rms_norm", [(8, hidden) for hidden in hiddens], ["float32"], "cpu")


def run(jobs, deadline, **more):
    given = {"effort": Effort(3, 0.0), "clock": CpuClock(), "leave_out": OTHERS}
    return compare(jobs, CPU, deadline=deadline, **{**given, **more})


def hiddens(found):
    return [each.call["hidden"] for each in found]


# the order


def test_operations_and_dtypes_take_turns_and_sizes_of_models_come_first():
    _, names = operations_named("attention")
    jobs = list(jobs_of_cases(names, ["float32", "bfloat16"]))
    ordered = telling(jobs)
    assert sorted(job.name for job in ordered) == sorted(job.name for job in jobs)
    first = ordered[: len(names)]
    assert {job.operation for job in first} == set(names)
    assert {job.dtype for job in first} == {"float32", "bfloat16"}
    assert not [job.name for job in first if job.case.name == "small"], "it serves tests"
    half = [(job.operation, job.case.name) for job in ordered]
    assert len(set(half[: len(half) // 4])) == len(half) // 4, "no case twice before others came once"


def test_of_cases_with_the_same_weights_the_ends_come_first():
    ordered = telling(list(jobs_of_cases(["norm.rms"], ["float32"])))
    assert [job.case.name for job in ordered] == ["decode", "long_prefill", "batch_decode", "prefill", "minilm"]


def test_what_would_take_much_of_the_time_comes_last():
    jobs = list(jobs_of_cases(["attention.standard.prefill"], ["float32"]))
    ordered = list(long_last(telling(jobs), long_calls(CPU, Deadline(60.0, Clock()))))
    assert [job.case.name for job in ordered[-2:]] == ["diffusion", "medium"]
    assert not any(map(long_calls(CPU, Deadline(None)), jobs)), "there is time for all"


def test_a_call_is_looked_at_when_its_turn_comes_and_none_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(comparison, "FIRST", 1)
    monkeypatch.setattr(Pace, "took", lambda *_: None)  # a busy machine's real seconds are none of this clock's
    clock, asked = Clock(), []
    deadline = Deadline(10.0, clock)
    is_long = long_calls(CPU, deadline)

    def looked(each):
        clock.now += 4.0 if each.contest is not None else 0.0

    class Seen(Job):
        def facts(self, device):
            asked.append(self.case.sizes["hidden"])
            return super().facts(device)

    jobs = [Seen(each.operation, each.case, each.dtype) for each in norms(32, 64, 128, 256, 512)]
    found = run(jobs, deadline, progress=looked, is_long=lambda job: job is jobs[0] or is_long(job))
    assert hiddens(found.found) == [64, 128, 256]
    assert len(found.left) == 2
    assert set(asked) == {64, 128, 256}


# the end


def test_no_call_is_begun_after_the_end_and_what_is_left_is_told():
    clock, told = Clock(), []

    def looked(each):
        told.append((each.number, each.left_s, each.contest is not None))
        clock.now += 4.0 if each.contest is not None else 0.0

    found = run(norms(64, 128, 256, 512), Deadline(10.0, clock), progress=looked)
    assert hiddens(found.found) == [64, 128, 256]
    assert (found.left, found.cut, found.seconds) == (("norm.rms 8x512 float32",), True, 12.0)
    assert [each for each in told if each[2]] == [(1, 10.0, True), (2, 6.0, True), (3, 2.0, True)]
    assert found.to_dict()["cut"] is True


def test_a_whole_comparison_is_not_cut():
    found = run(norms(64, 128), Deadline(100.0, Clock()))
    assert (hiddens(found.found), found.left, found.cut) == ([64, 128], (), False)


def test_a_call_that_takes_longer_than_is_left_is_left():
    (small,), (large,) = norms(64), asked_jobs("rms_norm", [(4096, 8192)], ["float32"], "cpu")
    found = run([large, small], Deadline(0.1, Clock()))
    assert hiddens(found.found) == [64]
    assert found.left == (large.name,)


def test_a_call_is_given_up_between_its_kernels(monkeypatch):
    clock, real = Clock(), contests.truth_of

    def truth_of(call, facts):
        clock.now += 20.0
        return real(call, facts)

    monkeypatch.setattr(contests, "truth_of", truth_of)
    found = run(norms(64, 128), Deadline(30.0, clock))
    assert (hiddens(found.found), found.left) == ([64], ("norm.rms 8x128 float32",))


def test_what_a_call_may_take_falls_with_what_is_left_and_to_do(monkeypatch):
    efforts, real = [], comparison.bench

    def bench(job, device, *, effort, **more):
        efforts.append(effort)
        return real(job, device, effort=Effort(3, 0.0), **more)

    monkeypatch.setattr(comparison, "bench", bench)
    run(norms(64, 128), Deadline(32.0, Clock()), effort=Effort(3, 100.0))
    first, second = efforts
    assert (first.steady_s, second.steady_s) == (8.0, 16.0)
    assert first.budget_s == pytest.approx(second.budget_s / 2)
    assert first.most_s == MOST * 32.0
    efforts.clear()
    run(norms(64), Deadline(None), effort=Effort(3, 100.0))
    assert efforts == [Effort(3, 100.0)], "without an end as was asked for"


# what compiles


@pytest.fixture
def compiled():
    """A kernel that compiles, which a child may build, with the sizes for which it is built."""
    built = []

    def loads(size):
        assert size in built, "it compiled in this process"

    compiled_norm(loads, built=built)
    return built


def test_what_compiles_is_built_after_half_of_the_time_and_its_calls_are_measured_again(compiled, monkeypatch):
    clock, order = Clock(), []

    def build_apart(pairs, told, stop, *, modules):
        order.append("build")
        for kernel, facts in pairs:
            compiled.append(facts.size("hidden"))
            told(kernel, facts, BuildOutcome())

    def looked(each):
        if each.contest is not None:
            order.append((each.number, each.again, "mine.compiled" in {line.name for line in each.contest.lines}))
            clock.now += 100.0 * BEFORE_BUILDS if not each.again else 0.0

    monkeypatch.setattr(loop, "build_apart", build_apart)
    found = run(norms(64, 128), Deadline(100.0, clock), progress=looked)
    assert order == [(1, False, False), "build", (1, True, True), (2, False, True)]
    assert (found.cut, found.not_built) == (False, {})


def test_what_is_left_to_build_when_all_is_measured_is_built_then(compiled, monkeypatch):
    """Children were asked once, for the next calls: with time left, what came behind these is asked for, too."""
    clock, order = Clock(), []

    def build_apart(pairs, told, stop, *, modules):
        for kernel, facts in pairs:
            compiled.append(facts.size("hidden"))
            told(kernel, facts, BuildOutcome())

    def looked(each):
        if each.contest is not None:
            order.append((each.number, each.again, "mine.compiled" in {line.name for line in each.contest.lines}))
            clock.now = 100.0 * BEFORE_BUILDS

    monkeypatch.setattr(comparison, "FIRST", 1)
    monkeypatch.setattr(loop, "build_apart", build_apart)
    found = run(norms(64, 128, 256), Deadline(100.0, clock), progress=looked)
    assert order[-2:] == [(3, False, False), (3, True, True)]
    assert (found.cut, found.not_built) == (False, {})


def test_what_was_not_built_in_time_is_told(compiled, monkeypatch):
    monkeypatch.setattr(loop, "build_apart", lambda *_, **__: None)
    found = run(norms(64), Deadline(100.0, Clock()))
    assert (found.cut, found.not_built) == (True, {"mine.compiled": TIME_OVER})
    assert found.found, "the others were measured"


def test_what_does_not_build_says_why(compiled, monkeypatch):
    def build_apart(pairs, told, stop, *, modules):
        for pair in pairs:
            told(*pair, BuildOutcome("lines\nninja: failed"))

    monkeypatch.setattr(loop, "build_apart", build_apart)
    assert run(norms(64), Deadline(100.0, Clock())).not_built == {"mine.compiled": "ninja: failed"}


def test_without_an_end_whatever_compiles_does_so_here(compiled):
    compiled.append(64)
    found = run(norms(64), Deadline(None))
    assert "mine.compiled" in {line.name for line in found.found[0].lines}


def test_one_calls_trouble_costs_no_other_its_place(monkeypatch):
    """What the first call's function raises is told with it; the comparison ended there."""
    real = comparison.bench

    def failing(job, *given, **named):
        if job.case.sizes["hidden"] == 64:
            raise RuntimeError("planted")
        return real(job, *given, **named)

    monkeypatch.setattr(comparison, "bench", failing)
    found = run(norms(64, 128), Deadline(None))
    assert hiddens(found.found) == [128]
    assert any("planted" in why for why in found.skipped.values())


def test_what_memory_does_not_hold_is_told_as_a_tuning_run_tells_it(monkeypatch):
    def hungry(*given, **named):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(comparison, "bench", hungry)
    found = run(norms(64), Deadline(None))
    assert found.skipped == {"norm.rms 8x64 float32": "too little memory: raised OutOfMemoryError: no memory left"}
    assert found.needs_bytes["norm.rms 8x64 float32"] > 0
