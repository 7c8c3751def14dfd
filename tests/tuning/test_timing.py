"""Samples and what is kept of them, on clocks whose hands the test moves."""

from __future__ import annotations

import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.tuning import timing
from layerzero.tuning.timing import CpuClock, Effort, clock_of, measurement, noise, quantile, race

TIMES = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50)


class Scripted:
    """A clock on which every call takes what the run returns."""

    def __init__(self):
        self.order = []

    def sample(self, run, about_us):
        self.order.append(run)
        return run()

    def once(self, run):
        return run()


def constant(time_us):
    return lambda: time_us


@given(TIMES)
def test_a_measurement_keeps_what_the_samples_say(samples):
    kept = measurement(samples, first_call_us=7.0, graph=True)
    assert kept.median_us == statistics.median(samples)
    assert min(samples) <= kept.median_us <= max(samples)
    assert kept.p95_us in samples
    assert kept.p95_us >= kept.median_us or len(samples) % 2 == 0
    assert kept.variance_us2 >= 0
    assert (kept.samples, kept.first_call_us, kept.graph) == (len(samples), 7.0, True)


@given(TIMES, st.floats(0.01, 1.0))
def test_a_quantile_is_the_smallest_sample_that_covers_its_share(samples, share):
    found = quantile(samples, share)
    assert sum(each <= found for each in samples) >= share * len(samples) - 1e-9
    smaller = [each for each in samples if each < found]
    assert not smaller or len(smaller) < share * len(samples) + 1e-9


def test_noise_is_the_distance_of_the_interleaved_halves():
    assert noise([1.0, 2.0, 1.0, 2.0]) == pytest.approx(1.0 / 1.5)
    assert noise([3.0] * 8) == 0.0
    assert noise([5.0]) == 0.03


def test_candidates_take_turns_in_changing_orders():
    clock = Scripted()
    runs = {name: constant(10.0) for name in "abcd"}
    raced = race(runs, clock, Effort(samples=8))
    assert [len(runner.samples) for runner in raced.values()] == [8] * 4
    turns = [tuple(clock.order[start : start + 4]) for start in range(0, 32, 4)]
    assert all(set(turn) == set(runs.values()) for turn in turns)
    assert len(set(turns)) > 1


def test_a_hopeless_candidate_stops_after_a_few_samples():
    raced = race({"quick": constant(1.0), "near": constant(2.4), "slow": constant(2.6)}, Scripted(), Effort(samples=20))
    assert [(name, len(each.samples), each.stopped) for name, each in raced.items()] == [
        ("quick", 20, False),
        ("near", 20, False),
        ("slow", timing.MIN_SAMPLES, True),
    ]
    raced = race({"quick": constant(1.0), "slow": constant(9.0)}, Scripted(), Effort(samples=5, hopeless=0))
    assert len(raced["slow"].samples) == 5


def test_one_disturbed_sample_gives_nobody_up():
    times = iter([1.0] * timing.WARM_CALLS + [50.0, 50.0] + [1.0] * 30)
    raced = race({"steady": constant(1.0), "disturbed": lambda: next(times)}, Scripted(), Effort(samples=10))
    assert not raced["disturbed"].stopped


def test_a_spent_budget_leaves_the_least_number_of_samples():
    raced = race({"a": constant(1.0), "b": constant(1.0)}, Scripted(), Effort(samples=20, budget_s=0.0))
    assert {len(each.samples) for each in raced.values()} == {timing.MIN_SAMPLES}


def test_filling_takes_more_samples_than_asked():
    raced = race({"a": constant(1.0)}, Scripted(), Effort(samples=5, budget_s=10.0, fill=True))
    assert len(raced["a"].samples) == 50


def test_nothing_to_race_is_no_error():
    assert race({}, Scripted(), Effort()) == {}


def test_the_cpu_clock_tells_the_slower_of_two():
    runs = {"short": lambda: time.sleep(0.0005), "long": lambda: time.sleep(0.004)}
    raced = race(runs, CpuClock(), Effort(samples=5, hopeless=0))
    short, long = (statistics.median(raced[name].samples) for name in runs)
    assert short > 500
    assert long > 4000
    assert long > short


def test_a_graph_wants_a_device_that_has_graphs():
    with pytest.raises(ValueError, match="graph: wanted a CUDA device, got cpu"):
        clock_of("cpu", graph=True)
