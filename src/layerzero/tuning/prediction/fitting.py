"""Learning a model of times from points: a sum of products of sizes, what it leaves over, and what that is worth.

Here, too, what measured times are worth together: one for each kernel, with a confidence.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

import msgspec

from layerzero.core.evidence import HOST_MARGIN, Evidence, Provenance
from layerzero.tuning.prediction.predict import (
    Model,
    Point,
    Prediction,
    doublings,
    extents,
    nearby,
    predict,
    sumprod,
    terms,
    waits,
)

MAX_POINTS = 128
MAX_TERMS = 16
"""With more products of sizes, there is one term for each size and one for the product of all."""

MIN_REACH = 1 / 8
"""Doublings; points that lie closer say no more about their neighbours, and the same sizes again nothing at all."""

_TILE, _TILE_GAIN = 128, 0.9
"""What lengths may count in multiples of, and how much of the error has to be gone then: less is noise."""

_FEW_ERROR = 0.5
"""What times are off by at a doubling where they are too few to tell, log2: 1.32 in the median, 1.53 in nine of ten
(120 pairs of an H200's table, 2026-11-22)."""

_SWEEPS, _SETTLED = 300, 1e-6
"""How often shares are gone through, unless none moves any more: 30 times choose at 1.033 of the best where 300 and
more do at 1.030 (an H200's times, a fifth of them predicted from the rest, 2026-11-22)."""


def fit(points: Sequence[Point]) -> Model | None:
    """Learn from points of one kernel and family; None where there are none.

    Where most points tell device and host apart, the rest does not count.
    """
    points = [each for each in points[:MAX_POINTS] if all(size > 0 for size in each.sizes.values())]
    told = [(each, each.device_us) for each in points if each.device_us is not None]
    told_apart = 2 * len(told) > len(points)
    host = _host(points) if told_apart else (0.0, 0.0)
    times = [device_us for _, device_us in told] if told_apart else [each.time_us for each in points]
    points = [each for each, _ in told] if told_apart else points
    if not points:
        return None
    whole = _fitted(points, times, host, 1)
    tiled = any(each.sizes.get(name, 0) % _TILE for each in points for name in each.meaning.tiled)
    rounded = _fitted(points, times, host, _TILE) if tiled else whole
    found = rounded if rounded.error < _TILE_GAIN * whole.error else whole
    return msgspec.structs.replace(found, told=told_apart)


def _fitted(points: Sequence[Point], times: Sequence[float], host: tuple[float, float], tile: int) -> Model:
    """The model of these times with lengths in multiples of a tile, judged by bending to each point without it."""
    measured = [extents(each.sizes, each.meaning, tile) for each in points]
    axes = tuple(sorted(measured[0]))
    x = [tuple(math.log2(each[name]) for name in axes) for each in measured]
    high = tuple(map(max, zip(*x, strict=True)))
    powers = _powers(x, high)
    rows = [terms(powers, high, each) for each in x]
    shares = fit_sum(rows, times)
    residuals = [math.log2(time_us / sumprod(row, shares)) for row, time_us in zip(rows, times, strict=True)]
    used, error, reach = sum(share > 0 for share in shares), _FEW_ERROR, 1.0
    if len(x) > used:
        others = [_others(x, residuals, number) for number in range(len(x))]
        left = [own - nearby(each)[0] for own, each in zip(residuals, others, strict=True)]
        # each share that was fitted hides some of the error
        error = math.sqrt(sumprod(left, left) / len(x)) * len(x) / (len(x) - used)
        reach = math.fsum(min(each)[0] for each in others) / len(x)
    return Model(
        axes=axes,
        high=high,
        powers=powers,
        shares=shares,
        points=tuple(x),
        residuals=tuple(residuals),
        error=error,
        reach=max(reach, MIN_REACH),
        tile=tile,
        host_us=host[0],
        host_error=host[1],
        meaning=points[0].meaning,
    )


def _powers(x: Sequence[Sequence[float]], high: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """What a time may be a sum of: a part that is always there, and products of sizes that differ among the points.

    Of products that these points do not separate, as where queries are as many as keys, or features always the same,
    the one of most sizes stands for all: a size that never varied is taken to be more of the work.
    """
    every = list(itertools.product((0, 1), repeat=len(high)))
    if len(every) > MAX_TERMS:
        every = [each for each in every if sum(each) in (0, 1, len(high))]
    told = {tuple(terms([each], high, place)[0] for place in x): each for each in every[1:]}
    return every[0], *told.values()


def _host(points: Sequence[Point]) -> tuple[float, float]:
    """What the host takes as a rule, and what half of the points are off by, log2; 0 where no point waited for it."""
    waited = [each.host_us for each in points if each.waits and each.host_us]
    if not waited:
        return 0.0, 0.0
    host_us = statistics.median_low(waited)
    return host_us, statistics.median([abs(math.log2(each / host_us)) for each in waited])


def _others(x: Sequence[Sequence[float]], residuals: Sequence[float], number: int) -> list[tuple[float, float]]:
    """What is left over at all other points than this one, with their distances from it."""
    found = list(zip(doublings(x, x[number]), residuals, strict=True))
    return found[:number] + found[number + 1 :]


class HeldOut(msgspec.Struct, frozen=True):
    """How far predictions are from times that they were not made from.

    Attributes:
        points: times that were held out.
        predicted: of them, those that got a prediction.
        median_error, p90_error: relative, of the predicted.
        within_claim: share of the predicted that lie within twice the error that they claim.
    """

    points: int
    predicted: int
    median_error: float
    p90_error: float
    within_claim: float


_FOLDS = 5


def held_out_error(groups: Sequence[Sequence[Point]]) -> HeldOut:
    """Predict every fifth point of each group from the others, in turn; groups are of one kernel and family."""
    errors: list[float] = []
    count = within = 0
    for points in groups:
        for fold in range(_FOLDS):
            held = points[fold::_FOLDS]
            model = fit([each for number, each in enumerate(points) if number % _FOLDS != fold])
            count += len(held)
            for each in held:
                found = None if model is None else predict(model, each.sizes)
                if found is not None:
                    away = abs(math.log2(found.time_us / _predicted(each, found)))
                    errors.append(away)
                    within += away <= 2 * found.error
    ordered = sorted(2**away - 1 for away in errors) or [math.nan]
    share = within / len(errors) if errors else math.nan
    return HeldOut(count, len(errors), ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.9)], share)


def _predicted(point: Point, found: Prediction) -> float:
    """What a prediction is of: with device and host apart, a wait for the host has the margin that choices give it."""
    if found.device_us is None or point.device_us is None:
        return point.time_us
    waited_us = HOST_MARGIN * point.host_us if point.waits and point.host_us else 0.0
    return max(point.device_us, waited_us)


def fit_sum(rows: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[float, ...]:
    """Fit shares of each row of terms to times: relative errors, least squares, none negative.

    Each share in turn is what is best given the others, or 0. They start from the largest time, half of it always there
    (the first term), half growing with all there is (the last): what few times leave open stays so, and all kernels of
    a call err alike in that. In plain Python: torch's threads do not survive a fork, and there are few points and fewer
    terms.
    """
    columns = list(zip(*rows, strict=True))
    weights = [time_us**-2.0 for time_us in times]  # what is to be small is relative
    heavy = [[value * weight for value, weight in zip(column, weights, strict=True)] for column in columns]
    gram = [[sumprod(one, other) for other in columns] for one in heavy]
    wanted = [sumprod(column, times) for column in heavy]
    shares = [0.0 for _ in wanted]
    shares[0] = shares[-1] = max(times) / 2
    for _ in range(_SWEEPS):
        moved = 0.0
        for number, line in enumerate(gram):
            if line[number] > 0:  # products of sizes may be too small to count
                share = max(0.0, shares[number] + (wanted[number] - sumprod(line, shares)) / line[number])
                moved = max(moved, abs(share - shares[number]))
                shares[number] = share
        if moved <= _SETTLED * max(shares):
            break
    return tuple(shares)


FULL_SAMPLES = 10
"""A median of fewer samples counts in proportion."""

SPREAD_AT_HALF = 0.1
"""Relative error of a median at which it counts half."""

OTHER_CONDITION = 0.8
"""What a time counts that was taken under another condition of the machine than the other times."""

FROM_ELSEWHERE = 0.9
"""What an imported time counts: the same device by name, not this one."""

OTHER_LAYOUT = 0.9
"""What a prediction counts that was learnt from tensors with their axes in another order: a view or a copy apart.

So does one from a mask whose rows are aligned otherwise, or that is for one batch in place of each.
"""

TOGETHER_S = 10.0
"""Times of one contest are written within a second of each other."""


class Time(msgspec.Struct, frozen=True):
    """One measured time that holds here."""

    kernel: str
    environment: bytes
    condition: str
    source: str
    median_us: float
    noise: float
    samples: int
    variance_us2: float
    written_at: str
    adapts: str = ""
    device_us: float | None = None
    host_us: float | None = None
    error: float | None = None
    as_measured_us: float | None = None
    """The median that was measured, where ``median_us`` is another number that stands for a replay."""

    @property
    def waits(self) -> bool:
        """Whether the host decided about it."""
        return waits(self.device_us, self.host_us)


def weighed(
    times: Sequence[Time],
    hosts: Mapping[tuple[str, str], float] | None = None,
    present: Callable[[], str] | None = None,
) -> dict[str, Evidence]:
    """One time for each kernel, all under one condition as far as they go, since times are for comparing.

    That is the ``present`` condition of the machine where two kernels have times of it, else the one that most have,
    the latest of several. It is read only where times of several conditions are known. A kernel without a time of
    it has its own of another one, times what kernels with times of both took longer or shorter.

    Of several times, those measured here come first, then enough samples, then the latest; of several errors the
    largest counts. ``hosts`` says what the host takes as a rule for a kernel with its adaptations over its family: by
    that, the host's pace just then is known, and taken out.
    """
    shared = _shared(times, present)

    def rank(time: Time) -> tuple[object, ...]:
        return time.source == "", time.condition == shared, time.samples >= FULL_SAMPLES, time.written_at

    best: dict[str, Time] = {}
    errors: dict[str, float] = {}
    for time in times:
        if time.error is not None:
            errors[time.kernel] = max(time.error, errors.get(time.kernel, 0.0))
        other = best.get(time.kernel)
        if other is None or rank(time) > rank(other):
            best[time.kernel] = time
    best = {kernel: _under(shared, time, times) for kernel, time in best.items()}
    apart = all(time.device_us is not None for time in best.values())  # else it is unknown which of the two waited
    margin = HOST_MARGIN if apart else 1.0
    paces: dict[str, float] = {}
    for run in _runs([time for time in best.values() if time.host_us is not None and time.waits]):
        paces |= dict.fromkeys([time.kernel for time in run], _pace(run, hosts or {}))
    return {
        kernel: _evidence(time, errors.get(kernel), time.condition == shared, paces.get(kernel, 1.0), margin)
        for kernel, time in best.items()
    }


def _shared(times: Sequence[Time], present: Callable[[], str] | None) -> str:
    """The condition that times are compared under."""
    kernels: dict[str, set[str]] = {time.condition: set() for time in times}
    if len(kernels) < 2:
        return next(iter(kernels), "")
    latest: dict[str, str] = {}
    for time in times:
        kernels[time.condition].add(time.kernel)
        latest[time.condition] = max(latest.get(time.condition, ""), time.written_at)
    now = "" if present is None else present()
    if now and len(kernels.get(now, ())) > 1:
        return now
    return max(kernels, key=lambda condition: (len(kernels[condition]), latest[condition]))


def _under(shared: str, time: Time, times: Sequence[Time]) -> Time:
    """A time as it would be under the shared condition, by the kernels of the same calls that have times of both.

    What heat or load costs is calibrated by each device's own times: a factor of 1.15 for all would be right for none.
    """
    if time.condition == shared:
        return time
    own = [each for each in times if each.source == time.source]  # another machine's would tell the machines apart
    here, there = ({each.kernel: each for each in own if each.condition == it} for it in (shared, time.condition))
    both = [(here[kernel], there[kernel]) for kernel in here.keys() & there.keys()]
    if not both:
        return time
    factor = math.exp(statistics.median([math.log(_times_longer(now, then)) for now, then in both]))
    measured_us = time.median_us if time.as_measured_us is None else time.as_measured_us
    device_us = None if time.device_us is None else factor * time.device_us
    moved = {
        "median_us": factor * time.median_us,
        "device_us": device_us,
        "variance_us2": factor**2 * time.variance_us2,
    }
    return msgspec.structs.replace(time, **moved, as_measured_us=measured_us)


def _times_longer(now: Time, then: Time) -> float:
    """By what a condition multiplied a time: the device's where both have it apart."""
    return now.device_us / then.device_us if now.device_us and then.device_us else now.median_us / then.median_us


def _runs(times: Iterable[Time]) -> Iterator[list[Time]]:
    """Times that were measured side by side: of one contest, written one after another."""
    run: list[Time] = []
    for time in sorted(times, key=lambda each: (each.source, each.written_at)):
        if run and (time.source != run[-1].source or not _together(run[-1].written_at, time.written_at)):
            yield run
            run = []
        run.append(time)
    if run:
        yield run


def _together(one: str, other: str) -> bool:
    try:
        return abs((datetime.fromisoformat(other) - datetime.fromisoformat(one)).total_seconds()) <= TOGETHER_S
    except (ValueError, TypeError):  # a file from elsewhere may say anything, with a time zone or without
        return one == other


def _pace(times: Iterable[Time], hosts: Mapping[tuple[str, str], float]) -> float:
    """How many times longer than as a rule the host took when these were measured; 1 where nothing tells.

    One kernel alone may need more of the host at some sizes; all at once, each compared with its own family, is the
    machine: over 373 calls of an H200 the pace went from 0.74 to 1.9, and half of what was left was below 1.2 %
    (2026-11-22).
    """
    factors = [
        time.host_us / hosts[time.kernel, time.adapts]
        for time in times
        if time.host_us is not None and hosts.get((time.kernel, time.adapts))
    ]
    return statistics.median_low(factors) if len(factors) > 1 else 1.0


def _evidence(time: Time, error: float | None, alike: bool, pace: float, margin: float) -> Evidence:
    confidence = min(1.0, time.samples / FULL_SAMPLES) / (1 + (_spread(time) / SPREAD_AT_HALF) ** 2)
    confidence *= (1.0 if alike else OTHER_CONDITION) * (FROM_ELSEWHERE if time.source else 1.0)
    provenance = Provenance.IMPORTED if time.source else Provenance.MEASURED
    measured_us = time.median_us if time.as_measured_us is None else time.as_measured_us
    cost_us = _cost_us(time, pace, margin)
    return Evidence(measured_us, provenance, confidence, time.noise, time.device_us, cost_us=cost_us, error=error)


def _cost_us(time: Time, pace: float, margin: float) -> float:
    """What a call takes while the host runs at its usual pace."""
    if time.device_us is None:
        return time.median_us
    if time.waits and time.host_us is not None:
        return max(time.device_us, margin * time.host_us / pace)
    return time.device_us


def _spread(time: Time) -> float:
    """Relative error of a median.

    Half the difference between two halves of the samples; a variance is made by outliers, which no median feels, unless
    there are too few samples to halve.
    """
    if time.samples >= FULL_SAMPLES:
        return time.noise / 2
    return max(time.noise / 2, math.sqrt(time.variance_us2 / time.samples) / time.median_us)
