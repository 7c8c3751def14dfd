"""A tuning run ends when its time is over, and leaves the rest to the next one."""

from __future__ import annotations

import pytest
from budget_runs import norm_facts, norms, run, timed
from torch.nn.functional import rms_norm

import layerzero as lz
from clock import Clock
from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.ops import OPERATIONS
from layerzero.tuning.measurement import contest as contests
from layerzero.tuning.measurement import tune_run
from layerzero.tuning.measurement.contest import Status
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.measurement.timing import Deadline, Effort, Pace
from layerzero.tuning.measurement.tune import asked_jobs
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.verification.child import Reply


def test_no_call_is_begun_after_the_end_and_the_next_run_goes_on(monkeypatch):
    monkeypatch.setattr(Pace, "took", lambda *_: None)  # a busy machine's real seconds are none of this clock's
    clock = Clock()
    told = []

    def progress(step):
        told.append(step)
        if step.contest is not None:
            clock.now += 4.0

    found = run(norms(64, 128, 256, 512), Deadline(10.0, clock), progress=progress)
    assert (len(found.contests), found.left, found.seconds) == (3, 1, 12.0)
    assert [step.left_s for step in told if step.contest is not None] == [10.0, 6.0, 2.0]
    again = run(norms(64, 128, 256, 512))
    assert (again.known, len(again.contests), again.left) == (3, 1, 0)


def test_a_budget_of_nothing_measures_nothing_and_less_is_refused():
    found = lz.tune("rms_norm", [(8, 64)], "float32", budget_s=0, isolate=False)
    assert (len(found.contests), found.left) == (0, 1)
    with pytest.raises(ValueError, match="budget_s: wanted seconds, 0 or more, got -1"):
        lz.tune("rms_norm", [(8, 64)], "float32", budget_s=-1)


def test_a_call_that_takes_longer_than_is_left_is_left_to_the_next_run():
    (small,), (large,) = norms(64), asked_jobs("rms_norm", [(4096, 8192)], ["float32"], "cpu")
    found = run([large, small], Deadline(0.1, Clock()))
    assert [each.facts.size("hidden") for each in found.contests] == [64]
    assert found.left == 1


@pytest.mark.parametrize(("others", "measured"), [(0, 1), (3, 3)])
def test_a_call_that_takes_more_than_a_third_of_the_time_is_left_where_others_wait(monkeypatch, others, measured):
    monkeypatch.setattr(Pace, "seconds", lambda self, facts: 40.0 if facts.size("hidden") == 64 else 0.1)
    found = run(norms(64, 128, 256, 512)[: 1 + others], Deadline(100.0, Clock()))
    assert len(found.contests) == measured
    assert found.left == (1 if others else 0)


def test_what_a_call_may_take_falls_with_what_is_left(monkeypatch):
    spent = []
    real = tune_run.contest

    def contest(call, *, effort, **more):
        found = real(call, effort=effort, **more)
        spent.append((effort.budget_s * 3 * len(found.entries), effort.steady_s))
        return found

    monkeypatch.setattr(tune_run, "contest", contest)
    for left in (1.0, 1e6):
        run(norms(64 if left == 1.0 else 128), Deadline(left, Clock()), effort=Effort(3, 0.5))
    assert spent[0][0] <= 0.5 + 1e-9
    assert spent[0][1] == 0.25
    assert spent[1][0] >= 1.5, "where there is time, as long as was asked for"


def test_what_small_calls_take_says_nothing_of_the_work_of_large_ones():
    small, large = norm_facts(1), norm_facts(4096)
    pace = Pace()
    assumed = pace.seconds(large)
    pace.took(small, 3.0)  # the first of an operation loads its libraries
    pace.took(small, 0.5)
    assert pace.seconds(small) == pytest.approx(0.5, abs=0.01)
    assert pace.seconds(large) == pytest.approx(0.5 + assumed)


def test_a_pace_is_learnt_from_the_largest_call():
    pace = Pace()
    assumed = pace.seconds(norm_facts(4096))
    pace.took(norm_facts(4096), 10 * assumed)
    pace.took(norm_facts(2048), 2 * assumed)
    assert pace.seconds(norm_facts(8192)) == pytest.approx(20 * assumed, rel=0.01)
    pace.took(norm_facts(8192), 2 * assumed)
    assert pace.seconds(norm_facts(8192)) == pytest.approx(2 * assumed, rel=0.01)


def test_calls_over_much_memory_are_left_where_little_time_is():
    """One over a gigabyte was begun with 19 s left, and took 56."""
    decode = next(each for each in OPERATIONS["attention.gqa.decode"].cases if each.name == "llama3_8b_b64")
    assert 30.0 < Pace().seconds(Job("attention.gqa.decode", decode, "float32").facts("cpu")) < 90.0


def test_a_call_is_given_up_where_its_truth_took_the_time_that_was_left(monkeypatch):
    """Its kernels would each be compared with it as long again."""
    clock = Clock()
    real = contests.truth_of

    def truth_of(call, facts):
        clock.now += 20.0
        return real(call, facts)

    monkeypatch.setattr(contests, "truth_of", truth_of)
    found = run(norms(64, 128), Deadline(30.0, clock))
    assert [each.facts.size("hidden") for each in found.contests] == [64]
    assert (found.left, dict(found.skipped)) == (1, {})
    again = run(norms(64, 128), Deadline(60.0, clock))
    assert (again.known, len(again.contests)) == (1, 1), "what was kept is the first's"


def test_nobody_waits_for_children_longer_than_there_is_time(monkeypatch, tmp_path):
    clock = Clock()
    deadline = Deadline(100.0, clock)
    stops = []

    def rehearse(pairs, *, modules, stop):
        stops.append(stop())
        clock.now = 60.0
        stops.append(stop())
        return []

    @lz.register_kernel("norm.rms", "mine.new", supported_dtypes=["float32"])
    def new(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps)

    monkeypatch.setattr(tune_run, "rehearse", rehearse)
    ENGINE.ledger = FileLedger(tmp_path)
    run(norms(64), deadline, isolate=True)
    assert stops == [False, True], "half of what is left"


def test_what_no_child_was_asked_about_in_time_is_not_called_banned(monkeypatch, tmp_path):
    @lz.register_kernel("norm.rms", "mine.new", supported_dtypes=["float32"])
    def new(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps)

    def rehearse(pairs, **_):
        return [(kernel, facts, Reply(None, "nobody waited", unsafe=True)) for kernel, facts in pairs]

    monkeypatch.setattr(tune_run, "rehearse", rehearse)
    ENGINE.ledger = FileLedger(tmp_path)
    (found,) = run(norms(64), Deadline(100.0, Clock()), isolate=True).contests
    (entry,) = [each for each in found.entries if each.kernel.id == "mine.new"]
    assert (entry.status, entry.detail, entry.measurement) == (Status.UNTRIED, "nobody waited", None)


@pytest.mark.parametrize("budget", ["x", -1, float("nan")])
def test_a_budget_is_a_number_of_seconds(budget):
    with pytest.raises(ValueError, match="budget_s: wanted seconds, 0 or more, got"):
        Deadline(budget)


def test_classes_that_vetting_did_not_reach_are_asked_about_again_while_there_is_time(vetting):
    found = run(norms(64, 128, 256), Deadline(100.0, Clock()), isolate=True)
    assert vetting.rounds == [3, 2, 1]
    assert [(each.verdict, each.reached) for each in found.vetted] == [(Verdict.PASSED, True)] * 3
    assert timed(found) == [True, True, True]


def test_what_vetting_never_reaches_is_left_to_the_next_run_which_goes_on(vetting):
    vetting.reaches = 0
    found = run(norms(64, 128), Deadline(100.0, Clock()), isolate=True)
    assert vetting.rounds == [2, 2], "a round that reached nothing is the last"
    assert [(each.verdict, each.reached) for each in found.vetted] == [(None, False)] * 2
    assert timed(found) == [False, False]
    vetting.reaches = 2
    found = run(norms(64, 128), Deadline(100.0, Clock()), isolate=True)
    assert vetting.rounds == [2, 2, 2]
    assert timed(found) == [True, True]


def test_a_later_batch_asks_about_a_class_that_an_earlier_one_did_not_reach(vetting, monkeypatch):
    monkeypatch.setattr("layerzero.tuning.measurement.tune.AT_ONCE", 1)
    vetting.reaches = 0
    jobs = asked_jobs("rms_norm", [(8, 100), (8, 101)], ["float32"], "cpu")
    run(jobs, Deadline(100.0, Clock()), isolate=True)
    assert vetting.rounds == [1, 1, 1]
