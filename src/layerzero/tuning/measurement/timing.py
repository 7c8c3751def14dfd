"""How long calls take: samples of kernels that race each other, what is kept of them, and when a run has to end."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerzero.core.evidence import Measurement
from layerzero.core.facts import Facts
from layerzero.core.system.memory import uncollected
from layerzero.tuning.measurement.clocks import CALMER, Clock, Run, Sample

WARM_CALLS = 5
"""Calls before the first sample: allocators, autotuners and caches have settled by then."""

MIN_SAMPLES = 3
"""Samples that every candidate gets, however slow it is."""

HOST_QUANTILE = 0.1
"""Of burst times: what interrupts a host only adds to them."""


@dataclass(slots=True)
class Runner:
    """One that is timed among others.

    Attributes:
        run: what a call is.
        about_us: how long it takes, roughly.
        taken: readings, in order.
        stopped: whether it was given up as hopeless.
    """

    run: Run
    about_us: float = 0.0
    taken: list[Sample] = field(default_factory=list)
    stopped: bool = False

    @property
    def samples(self) -> list[float]:
        """Microseconds of a call, in the order in which they were taken."""
        return [each.time_us for each in self.taken]

    @property
    def device_us(self) -> float | None:
        """Median of the device's time, None where it was not measured apart."""
        return _device_us(self.taken)

    @property
    def host_us(self) -> float | None:
        """A low quantile of the burst times, None where there were none."""
        return _host_us(self.taken)

    @property
    def noise(self) -> float:
        """Relative difference between what every other sample and what the rest says; of the parts, if there are."""
        if len(self.taken) < 2 or self.device_us is None:
            return max(differing(self.samples), stalled(self.samples))
        halves = [_by_parts(each) for each in (self.taken[::2], self.taken[1::2])]
        return abs(halves[0] - halves[1]) / _by_parts(self.taken)


def _device_us(taken: Sequence[Sample]) -> float | None:
    told = [each.device_us for each in taken if each.device_us]
    return statistics.median(told) if told else None


def _host_us(taken: Sequence[Sample]) -> float | None:
    told = [each.host_us for each in taken if each.host_us]
    return quantile(told, HOST_QUANTILE) if told else None


def _by_parts(taken: Sequence[Sample]) -> float:
    """The longer of device and host, each by its own statistic."""
    return max(_device_us(taken) or 0.0, _host_us(taken) or 0.0) or statistics.median([each.time_us for each in taken])


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        samples: samples of each candidate.
        budget_s: seconds for each candidate; beyond them none gets more than the few samples that all get.
        fill: go on sampling until the budget is used up, up to ten times the samples: noise wants many short runs.
        hopeless: one that is so many times slower than the best in each of a few turns gets no more, its host's time
            counted :data:`~layerzero.tuning.measurement.clocks.HOST_DRIFT` times less; 0 lets all go on.
        steady: where a contender for the first place is noisier, contenders are timed again by a calmer clock.
        steady_s: unless that would take longer, by what their samples took so far.
        most_s: where the fewest samples of all would take longer, by one call of each, each is warmed up once, and a
            kernel that was hopelessly slower in that call gets no other one, the slowest first.
    """

    samples: int = 20
    budget_s: float = 0.5
    fill: bool = False
    hopeless: float = 2.5
    steady: float = 0.05
    steady_s: float = math.inf
    most_s: float = math.inf


STALLED = 1.0
"""How far above a low quantile a median is, relative, before most samples are no longer those of one steady time: they
waited for a core (a busy CPU gave 16 ms for 32 us), and two halves that waited alike differ by nothing. A host whose
times merely scatter, by 10 or 25 %, is below: what the halves differ by tells of that."""

CONTENDS = 1.5
"""Times the best: a nearer one may be the best."""


def race(runs: Mapping[str, Run], clock: Clock, effort: Effort, *, seed: int = 0) -> dict[str, Runner]:
    """Time candidates side by side: a sample of each in turn, in an order drawn anew, so that drift hits all alike.

    They have run before: what compiles or loads is not timed here.
    """
    order = random.Random(seed)  # noqa: S311  # an order, no secret
    runners = {name: Runner(run) for name, run in runs.items()}
    for runner in runners.values():
        runner.about_us = clock.once(runner.run)
    if not _stopped_for_time(runners, effort):
        for runner in runners.values():
            for _ in range(WARM_CALLS - 1):
                runner.about_us = clock.once(runner.run)
    with uncollected():
        sample_s = _turns(runners, clock, effort, order)
        calmer = clock.calmer() if effort.steady else None
        for _ in range(2):
            contenders = _contenders(runners)
            if calmer is None or all(differing(runner.samples) <= effort.steady for runner in contenders.values()):
                break
            if MIN_SAMPLES * CALMER * sum(sample_s[name] for name in contenders) > effort.steady_s:
                break
            for runner in contenders.values():
                runner.taken = []
            sample_s |= _turns(contenders, calmer, effort, order)
            calmer = calmer.calmer()
    return runners


def _stopped_for_time(runners: Mapping[str, Runner], effort: Effort) -> bool:
    """Whether a race would take too long; then runners that one call showed to be hopeless are stopped until not."""
    if (WARM_CALLS + MIN_SAMPLES) * sum(runner.about_us for runner in runners.values()) <= effort.most_s * 1e6:
        return False
    ordered = sorted(runners.values(), key=lambda runner: runner.about_us)
    while MIN_SAMPLES * sum(runner.about_us for runner in ordered) > effort.most_s * 1e6:
        slowest = ordered.pop()
        if not ordered or not effort.hopeless or slowest.about_us <= effort.hopeless * ordered[0].about_us:
            break
        slowest.taken, slowest.stopped = [Sample(slowest.about_us)], True
    return True


def _turns(runners: Mapping[str, Runner], clock: Clock, effort: Effort, order: random.Random) -> dict[str, float]:
    """Sample each in turn until there is enough of all; what a sample of each took, seconds."""
    spent = dict.fromkeys(runners, 0.0)
    for turn in range(max(effort.samples, MIN_SAMPLES) * (10 if effort.fill else 1)):
        racing = [name for name, runner in runners.items() if not runner.stopped]
        late = sum(spent[name] for name in racing) > effort.budget_s * max(len(racing), 1)
        if not racing or (turn >= MIN_SAMPLES and late):
            break
        order.shuffle(racing)
        for name in racing:
            started = time.perf_counter()
            runners[name].taken.append(clock.sample(runners[name].run, runners[name].about_us))
            spent[name] += time.perf_counter() - started
        if turn + 1 >= MIN_SAMPLES and effort.hopeless:
            _stop_hopeless(runners, effort.hopeless)
    return {name: seconds / max(len(runners[name].taken), 1) for name, seconds in spent.items()}


def _contenders(runners: Mapping[str, Runner]) -> dict[str, Runner]:
    """Those that may be the best one."""
    medians = {name: statistics.median(runner.samples) for name, runner in runners.items() if not runner.stopped}
    best_us = min(medians.values(), default=0.0)
    return {name: runners[name] for name, median_us in medians.items() if median_us <= CONTENDS * best_us}


def _stop_hopeless(runners: Mapping[str, Runner], factor: float) -> None:
    """Give up those that were never within the factor of the best of the same turn.

    Neither a disturbed sample nor a slow phase of the host gives up a kernel: the one passes within the turns; in the
    other, one that waits for its host seems hopeless next to one that waits for the device.
    """
    racing = [runner for runner in runners.values() if not runner.stopped]
    best = min(racing, key=lambda runner: statistics.median(runner.samples))
    for runner in racing:
        turns = zip(runner.taken, best.taken, strict=True)
        runner.stopped = all(own.at_least_us > factor * other.time_us for own, other in turns)


def measurement(samples: Sequence[float], *, noise: float | None = None, **others: Any) -> Measurement:
    """What is kept of samples; there is at least one, and they are in the order in which they were taken.

    ``noise`` is that of :class:`Runner`, as ``device_us`` and ``host_us`` among the other fields are; without it, noise
    is that of the samples.
    """
    return Measurement(
        median_us=statistics.median(samples),
        p95_us=quantile(samples, 0.95),
        variance_us2=statistics.pvariance(samples),
        samples=len(samples),
        noise=max(differing(samples), stalled(samples)) if noise is None else noise,
        **others,
    )


def differing(samples: Sequence[float]) -> float:
    """Relative difference between the medians of every other sample and of the rest; 0.03 where one is all there is."""
    if len(samples) < 2:
        return 0.03
    halves = statistics.median(samples[::2]), statistics.median(samples[1::2])
    return abs(halves[0] - halves[1]) / statistics.median(samples)


def stalled(samples: Sequence[float]) -> float:
    """How much longer than undisturbed the median says, relative; 0 up to :data:`STALLED`.

    A median over one more than this is the low quantile: what the call takes where nothing interrupts the host.
    """
    if not samples:
        return 0.0
    above = statistics.median(samples) / quantile(samples, HOST_QUANTILE) - 1
    return above if above > STALLED else 0.0


def carried(time_us: float, other_us: float, noise: float | None, other_noise: float | None) -> float | None:
    """How many times as long the other takes, as far as samples say so; None where noise may be all of it.

    Beyond :data:`STALLED`, noise is taken off the ratio: a time that is mostly waiting says how long it is at least.
    """
    ratio, own, others = other_us / time_us, noise or 0.0, other_noise or 0.0
    doubt = 1 + own + others
    if max(ratio, 1 / ratio) <= doubt * (1 + 1e-9):  # at the edge, too: rounding decides nothing
        return None
    if max(own, others) <= STALLED:
        return ratio
    return ratio / doubt if ratio > 1 else ratio * doubt


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least this share of all does not exceed."""
    ordered = sorted(samples)
    rank = -int(-share * len(ordered) // 1)  # the ceiling
    return ordered[min(max(rank, 1), len(ordered)) - 1]


_FLOP_S = {"cuda": 1e12}
_BYTE_S = {"cuda": 1e11}
_CPU_FLOP_S, _CPU_BYTE_S = 5e9, 5e8
"""What is assumed of measuring a call, with its comparisons in float64, before the first of its operation was measured:
a tenth of what devices do, since each of some kernels runs some dozens of times."""

_LARGE_ELEMENTS, _ELEMENT_S = 2**24, 4.5e6
"""On a CPU, tensors from here on are drawn, widened, copied and compared for every kernel: decoding over 268 million
elements took 56 s in float32, where its work says 2.4, and in bfloat16 it was the last call of a run that took 116 s of
90 (AMD EPYC, two cores, 2026-11-23)."""


class TimeOverError(Exception):
    """The time of a run is over before a call could be measured; nothing of it is kept."""


class Deadline:
    """The end of a run: so many seconds from now, or never. ``now`` reads a clock that only goes forward."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds >= 0):
            raise ValueError(f"budget_s: wanted seconds, 0 or more, got {seconds!r}")
        self._now = now
        self.began = now()
        self.until = math.inf if seconds is None else self.began + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite where there is no end."""
        return self.until - self._now()

    @property
    def spent_s(self) -> float:
        return self._now() - self.began

    def passed(self) -> bool:
        return self.left_s <= 0.0

    def sooner(self, seconds: float) -> Deadline:
        """The end of a part of the run that leaves so many seconds for what follows it."""
        return Deadline(None if self.until == math.inf else max(self.left_s - seconds, 0.0), self._now)

    def part(self, share: float) -> Callable[[], bool]:
        """A question whether this share of what is left now is over."""
        left = self.left_s
        until = math.inf if left == math.inf else self._now() + share * left
        return lambda: self._now() >= until


SHOWS_S = 0.05
"""Assumed seconds from which on a call's own time says something of larger ones. What a small one takes is loading,
proving and sampling: by that alone, an H100 left half of its calls as too large after the first (2026-11-22)."""


class Pace:
    """How long measuring a call takes: what any call of its operation does, and what grows with its work."""

    def __init__(self) -> None:
        self._least_s: dict[str, float] = {}
        self._largest: dict[str, tuple[float, float]] = {}

    def seconds(self, facts: Facts) -> float:
        """How long measuring a call is likely to take; 0 where the operation does not say its work."""
        name, assumed = facts.operation.name, _assumed_s(facts)
        if assumed <= 0:
            return 0.0
        _, factor = self._largest.get(name, (0.0, 1.0))
        return self._least_s.get(name, 0.0) + factor * assumed

    def took(self, facts: Facts, seconds: float) -> None:
        """Learn from a call that was measured: of small ones the quickest, of large ones the largest tells most."""
        name, assumed = facts.operation.name, _assumed_s(facts)
        if assumed < SHOWS_S:
            self._least_s[name] = min(self._least_s.get(name, math.inf), seconds)
            return
        factor = max(seconds - self._least_s.get(name, 0.0), 0.0) / assumed
        self._largest[name] = max(self._largest.get(name, (0.0, 0.0)), (assumed, factor))


def _assumed_s(facts: Facts) -> float:
    if facts.operation.work is None:
        return 0.0
    work, kind = facts.operation.work(facts), facts.device.torch_type
    sizes = [(math.prod(each.shape), each.dtype.itemsize) for each in facts.tensors.values()]
    elements = sum(count for count, _ in sizes)
    moved = max(work.bytes, sum(count * size for count, size in sizes))  # what is not read is drawn all the same
    handled_s = elements / _ELEMENT_S if kind == "cpu" and elements >= _LARGE_ELEMENTS else 0.0
    return max(work.flops / _FLOP_S.get(kind, _CPU_FLOP_S), moved / _BYTE_S.get(kind, _CPU_BYTE_S), handled_s)
