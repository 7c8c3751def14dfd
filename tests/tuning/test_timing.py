"""Samples and what is kept of them, on clocks whose hands the test moves."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawing import examples
from layerzero.core.evidence import Evidence, Provenance
from layerzero.engine.order import surely_slower
from layerzero.tuning.measurement import clocks, timing
from layerzero.tuning.measurement.clocks import CpuClock, Sample, clock_of
from layerzero.tuning.measurement.timing import Effort, Runner, carried, differing, measurement, quantile, race

TIMES = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50)


class Scripted:
    """A clock on which every call takes what the run returns."""

    def __init__(self):
        self.order = []

    def sample(self, run, about_us):
        self.order.append(run)
        return Sample(run())

    def once(self, run):
        return run()

    def calmer(self):
        return None


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
    assert differing([1.0, 2.0, 1.0, 2.0]) == pytest.approx(1.0 / 1.5)
    assert differing([3.0] * 8) == 0.0
    assert differing([5.0]) == 0.03


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


class Disturbed(Scripted):
    """Every other sample takes longer, until it is asked for a calmer clock."""

    def __init__(self, slower):
        super().__init__()
        self.slower, self.count = slower, 0

    def sample(self, run, about_us):
        self.count += 1
        return Sample(run() * (self.slower if self.count // 2 % 2 else 1.0))

    def calmer(self):
        return Disturbed(1.0 if self.slower < 2 else 1.5)


@pytest.mark.parametrize("slower", [1.5, 2.4])
def test_noisy_contenders_are_timed_again_by_a_calmer_clock(slower):
    runs = {"a": constant(10.0), "b": constant(11.0), "far": constant(22.0)}
    raced = race(runs, Disturbed(slower), Effort(samples=8, hopeless=0))
    assert raced["a"].samples == [10.0] * 8
    assert raced["b"].samples == [11.0] * 8
    assert len(raced["far"].samples) == 8
    assert max(race(runs, Disturbed(slower), Effort(samples=8, hopeless=0, steady=0))["a"].samples) == 10.0 * slower


def test_nobody_is_timed_again_where_that_would_take_longer_than_there_is_time(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(now)))  # each sample takes a second
    runs = {"a": constant(10.0), "b": constant(11.0)}

    def slowest(steady_s):
        effort = Effort(samples=4, budget_s=100.0, hopeless=0, steady_s=steady_s)
        return max(race(runs, Disturbed(1.5), effort)["a"].samples)

    assert slowest(18.0) == 10.0, "three samples of both, each of three seconds"
    assert slowest(17.0) == 15.0


def test_nothing_to_race_is_no_error():
    assert race({}, Scripted(), Effort()) == {}


def test_the_cpu_clock_tells_the_slower_of_two(monkeypatch):
    now = [0]

    def takes(microseconds):
        return lambda: now.__setitem__(0, now[0] + 1000 * microseconds)

    monkeypatch.setattr(clocks.time, "perf_counter_ns", lambda: now[0])
    raced = race({"short": takes(500), "long": takes(4000)}, CpuClock(), Effort(samples=5, hopeless=0))
    assert {name: set(each.samples) for name, each in raced.items()} == {"short": {500.0}, "long": {4000.0}}


def test_a_graph_wants_a_device_that_has_graphs():
    with pytest.raises(ValueError, match="graph: wanted a CUDA device, got cpu"):
        clock_of("cpu", graph=True)


class Queue:
    """A device that runs behind its host: work is queued by the host and done in order, both in microseconds."""

    def __init__(self):
        self.host = self.free = self.slow_until = 0.0
        self.slow = 1.0

    def launch(self, host_us, device_us):
        self.host += host_us * (self.slow if self.host < self.slow_until else 1.0)
        self.free = max(self.free, self.host) + device_us

    def wait(self):
        self.host = max(self.host, self.free)


class Event:
    def __init__(self, queue):
        self.queue, self.at = queue, 0.0

    def record(self):
        self.at = max(self.queue.free, self.queue.host)

    def synchronize(self):
        self.queue.wait()

    def elapsed_time(self, end):
        return (end.at - self.at) / 1000.0


class Flush:
    def __init__(self, queue):
        self.queue = queue

    def zero_(self):
        self.queue.launch(3.0, 60.0)


@pytest.fixture
def simulated(monkeypatch):
    """A CUDA clock over a queue that is simulated, and the queue."""
    queue = Queue()
    monkeypatch.setattr(clocks.torch.cuda, "Event", lambda **_: Event(queue))
    clock = object.__new__(clocks.CudaClock)
    clock.graph, clock._flush = False, Flush(queue)
    return clock, queue


@pytest.mark.parametrize(
    ("host_us", "device_us", "wanted_us"),
    [(5, 9, 9), (80, 9, 80), (17, 22, 22), (22, 17, 22), (15, 300, 300), (34, 15000, 15000), (2, 1.5, 2)],
)
def test_a_sample_on_a_gpu_is_what_a_user_waits_for(simulated, host_us, device_us, wanted_us):
    clock, queue = simulated

    def run():
        queue.launch(host_us, device_us)

    found = clock.sample(run, max(host_us, device_us))
    assert found.time_us == pytest.approx(wanted_us, rel=0.03)
    assert found.device_us == pytest.approx(device_us, rel=0.03)
    assert found.host_us == (None if device_us > 500 else pytest.approx(wanted_us, rel=0.03))


def test_device_time_hides_the_host_and_a_graph_has_nothing_else(simulated):
    clock, queue = simulated

    def run():
        queue.launch(80.0, 9.0)

    assert clock.device(run) == pytest.approx(9.0)
    clock.graph = True
    assert clock.sample(run, 80.0) == (pytest.approx(9.0), pytest.approx(9.0), None)


LAUNCHES = {"device": (10, 17), "host": (27, 9), "large": (5, 60), "late": (95, 9)}
"""What calls need of host and device, in microseconds."""


def raced_on(simulated, monkeypatch, slow_us, effort):
    """Race calls on a host that is slow by a factor of two for so long."""
    clock, queue = simulated
    queue.slow, queue.slow_until = 2.0, slow_us
    runs = {
        name: lambda host_us=host_us, device_us=device_us: queue.launch(host_us, device_us)
        for name, (host_us, device_us) in LAUNCHES.items()
    }

    def once(self, run):
        started = queue.host
        run()
        queue.wait()
        return queue.host - started

    monkeypatch.setattr(clocks.CudaClock, "once", once)
    return race(runs, clock, effort)


@pytest.mark.parametrize("slow_us", [0.0, 20_000.0, 1e9])
def test_a_slow_host_makes_nobody_hopeless(simulated, monkeypatch, slow_us):
    raced = raced_on(simulated, monkeypatch, slow_us, Effort(samples=20, budget_s=9.0))
    assert {name for name, each in raced.items() if each.stopped} == {"large", "late"}
    for name, (_, device_us) in LAUNCHES.items():
        assert raced[name].device_us == pytest.approx(device_us, rel=0.03), "of a stopped one, too, and of a slow host"


def test_a_slow_host_for_most_of_the_samples_leaves_the_calm_time(simulated, monkeypatch):
    raced = raced_on(simulated, monkeypatch, 30_000.0, Effort(samples=20, budget_s=9.0))
    assert raced["host"].samples[0] == pytest.approx(54, rel=0.03)
    assert raced["host"].host_us == pytest.approx(27, rel=0.03)
    assert statistics.median(raced["host"].samples) == pytest.approx(54, rel=0.03), "what a user waited for just then"


PARTS = st.lists(st.tuples(st.floats(0.5, 1e5), st.floats(0.5, 1e5)), min_size=1, max_size=40)


@given(PARTS)
def test_what_is_kept_of_the_parts_bounds_what_a_user_waits_for(parts):
    runner = Runner(lambda: None, 0.0, [Sample(max(device, host), device, host) for device, host in parts])
    kept = measurement(runner.samples, device_us=runner.device_us, host_us=runner.host_us)
    assert kept.device_us == statistics.median(device for device, _ in parts)
    assert kept.host_us in [host for _, host in parts]
    assert kept.median_us >= max(kept.device_us, kept.host_us) or kept.median_us == pytest.approx(
        max(kept.device_us, kept.host_us)
    )
    assert all(each.time_us / clocks.HOST_DRIFT <= each.at_least_us <= each.time_us for each in runner.taken)


def test_where_the_parts_are_not_told_apart_they_are_not_made_up():
    runner = Runner(lambda: None, 0.0, [Sample(5.0), Sample(7.0)])
    assert (runner.samples, runner.device_us, runner.host_us) == ([5.0, 7.0], None, None)
    assert (measurement(runner.samples).device_us, measurement(runner.samples).host_us) == (None, None)


def test_a_race_that_would_take_too_long_gives_one_call_to_who_is_hopeless():
    calls = dict.fromkeys(("best", "near", "slow"), 0)

    def taking(name, time_us):
        def run():
            calls[name] += 1
            return time_us

        return run

    runs = {"best": taking("best", 1e6), "near": taking("near", 2e6), "slow": taking("slow", 10e6)}
    raced = race(runs, Scripted(), Effort(samples=3, steady=0, most_s=20.0))
    assert calls == {"best": 4, "near": 4, "slow": 1}
    assert raced["slow"].stopped
    assert raced["slow"].samples == [10e6]
    calls.update(dict.fromkeys(calls, 0))
    assert not race(runs, Scripted(), Effort(samples=3, steady=0, hopeless=0))["slow"].stopped
    assert calls["slow"] == timing.WARM_CALLS + timing.MIN_SAMPLES, "where there is time"


def test_a_long_call_is_sampled_once_where_that_is_asked_for():
    calls = []
    CpuClock(3, one_above_us=10.0).sample(lambda: calls.append(1), 1e4)
    assert len(calls) == 1
    CpuClock(3).sample(lambda: calls.append(1), 1e4)
    assert len(calls) == 4


@st.composite
def disturbed(draw, most_stalled=0.85):
    """Samples of a call that takes 10 us, and of it some that waited for a core, in any order."""
    count = draw(st.integers(10, 60))
    stalls = draw(st.lists(st.floats(30.0, 2e4), max_size=int(most_stalled * count)))
    return draw(st.permutations(stalls + [10.0] * (count - len(stalls))))


@settings(max_examples=examples(100))
@given(disturbed(), disturbed())
def test_waiting_for_a_core_is_no_gain(one, other):
    """Two kernels of the same time: no ratio above 1.1 is told, and none is surely slower."""
    kept, beside = measurement(one), measurement(other)
    ratio = carried(kept.median_us, beside.median_us, kept.noise, beside.noise)
    assert ratio is None or 1 / 1.1 <= ratio <= 1.1
    assert beside.median_us <= kept.median_us * (1 + kept.noise) * (1 + beside.noise) * 1.1
    found = [Evidence(each.median_us, Provenance.MEASURED, 0.0, each.noise) for each in (kept, beside)]
    found.sort(key=lambda each: each.time_us)
    assert not surely_slower(found[1], found[0])


def test_half_of_the_samples_waiting_alike_is_noise():
    waited, steady = measurement([32.0, 16000.0, 16000.0] * 7), measurement([32.0] * 20)
    assert waited.median_us == 16000.0
    assert carried(steady.median_us, waited.median_us, steady.noise, waited.noise) is None
    assert Runner(constant(1.0), taken=[Sample(each) for each in [32.0, 16000.0, 16000.0] * 7]).noise > 100


@given(st.floats(0.0, 0.1), st.floats(0.0, 0.1), st.floats(1.25, 1e3))
def test_calm_samples_tell_the_whole_ratio(noise, other_noise, ratio):
    assert carried(10.0, 10.0 * ratio, noise, other_noise) == pytest.approx(ratio)


def test_of_a_time_that_is_mostly_waiting_the_least_is_told():
    assert carried(10.0, 8000.0, 0.0, 399.0) == pytest.approx(2.0)
    assert carried(8000.0, 10.0, 399.0, 0.0) == pytest.approx(0.5)
