"""Learning a model of times from points: a sum of products of sizes, a floor, and what both are worth."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from heapq import nsmallest
from operator import le
from typing import NamedTuple

import msgspec

from layerzero.tuning.predicting.prediction import (
    MAX_DISTANCE,
    Model,
    Point,
    apart,
    extents,
    nearby,
    predict,
    sumprod,
    terms,
)
from layerzero.tuning.predicting.shares import fit_sum

MAX_POINTS = 128
MAX_TERMS = 12
"""With more sizes than make so many products, there is one term for each size and one for the product of all."""

MIN_REACH = 1 / 8
"""Doublings; points that lie closer say no more about their neighbours, and the same sizes again nothing at all."""

_AT_FLOOR = 1.5
"""Times up to so much above the smallest say nothing about what lies below the floor."""

_FLOOR_POINTS, _FLOOR_SPAN = 3, 2.0
"""A floor is one where so many points stand on it, with so many doublings of work between them."""

_ODD = 0.15
"""So many points, in proportion, may take longer than larger ones on the floor; where more do, it is all noise."""

_TILE, _TILE_GAIN = 128, 0.9
"""What lengths may count in multiples of, and how much of the error has to be gone then: less is noise."""

NEAR, _NEAR_ERROR = 1.0, 0.5
"""Doublings within which one time says something of its neighbours, and what it is off by at most there, log2."""

Rows = Sequence[tuple[float, ...]]
"""Coordinates of points: log2 of the sizes that vary."""


class _Space(NamedTuple):
    """What the points of a model have in common, and their coordinates."""

    axes: tuple[str, ...]
    ties: tuple[tuple[str, str, float], ...]
    fixed: dict[str, float]
    x: list[tuple[float, ...]]
    low: tuple[float, ...]
    high: tuple[float, ...]
    powers: tuple[tuple[int, ...], ...]


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
    whole = _fitted(points, times, host, 1) or _near(points, times, host)
    tiled = any(each.sizes.get(name, 0) % _TILE for each in points for name in each.meaning.tiled)
    rounded = _fitted(points, times, host, _TILE) if tiled else None
    found = rounded if rounded is not None and rounded.error < _TILE_GAIN * whole.error else whole
    return msgspec.structs.replace(found, told=told_apart)


def _fitted(points: Sequence[Point], times: Sequence[float], host: tuple[float, float], tile: int) -> Model | None:
    """The model of these times with lengths in multiples of a tile, judged by leaving each point out."""
    space = _space(points, tile)
    x = space.x
    if not space.axes or len(points) < max(3, len(space.axes) + 2):
        return None
    fitted = fit_sum([terms(space.powers, space.high, each) for each in x], [math.log2(each) for each in times])
    plain, bent, reach = [], [], 0.0
    for number, follows in enumerate(fitted.follows):
        left_out = fitted.residuals[number] / max(1 - follows[number], 1e-3)
        near = _neighbours(x, number)
        reach += near[0][0] / len(x)
        # residuals of the neighbours by the sum that was made without this point
        others = [(away, fitted.residuals[index] + follows[index] * left_out) for away, index in near]
        plain.append(left_out)
        bent.append(left_out - nearby(others))
    errors = _mean_square(plain), _mean_square(bent)
    floor_us = _floor(x, times)
    on_it = [time_us <= _AT_FLOOR * floor_us for time_us in times]
    above = [math.log2(time_us / floor_us) for time_us, low in zip(times, on_it, strict=True) if low]
    return Model(
        axes=space.axes,
        ties=space.ties,
        fixed=space.fixed,
        low=space.low,
        high=space.high,
        powers=space.powers,
        shares=fitted.shares,
        points=tuple(x),
        residuals=tuple(fitted.residuals),
        bent=errors[1] < errors[0],
        error=min(errors),
        reach=max(reach, MIN_REACH),
        within=MAX_DISTANCE,
        floor_us=floor_us,
        floor_error=_mean_square(above) if above else 0.0,
        at_floor=tuple(each for each, low, time_us in zip(x, on_it, times, strict=True) if low or time_us <= host[0]),
        tile=tile,
        host_us=host[0],
        host_error=host[1],
        meaning=points[0].meaning,
    )


def _near(points: Sequence[Point], times: Sequence[float], host: tuple[float, float]) -> Model:
    """The model of times that are too few to tell what they are worth: what lies beside them takes about as long.

    Half of a time is taken to be always there, half to grow with all sizes: all kernels of a call err alike in that.
    From each single call of an H200's table, its neighbours within a doubling got kernels at 1.031 of the best, where
    torch's own took 1.35 (120 pairs, 2026-11-22).
    """
    measured = [extents(each.sizes, each.meaning) for each in points]
    axes = tuple(sorted(measured[0]))
    x = [tuple(math.log2(each[name]) for name in axes) for each in measured]
    low, high = (tuple(map(end, zip(*x, strict=True))) for end in (min, max))
    powers, shares = ((0,) * len(axes), (1,) * len(axes)), (max(times) / 2, max(times) / 2)
    sums = [math.log2(sumprod(terms(powers, high, each), shares)) for each in x]
    return Model(
        axes=axes,
        low=low,
        high=high,
        powers=powers,
        shares=shares,
        points=tuple(x),
        residuals=tuple(math.log2(time_us) - each for time_us, each in zip(times, sums, strict=True)),
        bent=True,
        error=_NEAR_ERROR,
        reach=1.0,
        within=NEAR,
        host_us=host[0],
        host_error=host[1],
        meaning=points[0].meaning,
    )


def _host(points: Sequence[Point]) -> tuple[float, float]:
    """What the host takes as a rule, and what half of the points are off by, log2; 0 where no point waited for it."""
    waited = [each.host_us for each in points if each.waits and each.host_us]
    if not waited:
        return 0.0, 0.0
    host_us = statistics.median_low(waited)
    return host_us, statistics.median([abs(math.log2(each / host_us)) for each in waited])


def _floor(x: Rows, times: Sequence[float]) -> float:
    """What the smallest calls take, where work of very different size takes the same and hardly any less longer."""
    least = min(times)
    on_it = [place for place, time_us in zip(x, times, strict=True) if time_us <= _AT_FLOOR * least]
    work = [math.fsum(place) for place in on_it]
    if len(work) < _FLOOR_POINTS or max(work) - min(work) < _FLOOR_SPAN:
        return 0.0
    above = [place for place, time_us in zip(x, times, strict=True) if time_us > _AT_FLOOR * least]
    odd = sum(any(all(map(le, place, other)) for other in on_it) for place in above)
    return 0.0 if odd > _ODD * len(on_it) else least


def _space(points: Sequence[Point], tile: int) -> _Space:
    """Lay points out along what varies among them."""
    measured = [extents(each.sizes, each.meaning, tile) for each in points]
    axes, ties, fixed = _axes(measured)
    x = [tuple(math.log2(each[name]) for name in axes) for each in measured]
    columns = list(zip(*x, strict=True))
    return _Space(
        axes, ties, fixed, x, tuple(map(min, columns)), tuple(map(max, columns)), tuple(_powers(axes, ties))
    )  # fmt: skip


def _powers(axes: Sequence[str], ties: Sequence[tuple[str, str, float]]) -> list[tuple[int, ...]]:
    """The products of sizes that a time may grow with; sizes that go together make raised."""
    highest = [1 + sum(other == name for _, other, _ in ties) for name in axes]
    every = list(itertools.product(*(range(power + 1) for power in highest)))
    return every if len(every) <= MAX_TERMS else [each for each in every if sum(each) <= 1 or [*each] == highest]


def _axes(
    measured: Sequence[dict[str, float]],
) -> tuple[tuple[str, ...], tuple[tuple[str, str, float], ...], dict[str, float]]:
    """Tell extents that vary on their own from those that follow another one and those that never vary."""
    axes: list[str] = []
    ties: list[tuple[str, str, float]] = []
    fixed: dict[str, float] = {}
    for name in sorted(measured[0]):
        column = [math.log2(each[name]) for each in measured]
        if max(column) == min(column):
            fixed[name] = measured[0][name]
            continue
        for other in axes:
            between = [own - math.log2(each[other]) for own, each in zip(column, measured, strict=True)]
            if max(between) - min(between) < 1e-9:
                ties.append((name, other, between[0]))
                break
        else:
            axes.append(name)
    return tuple(axes), tuple(ties), fixed


def _neighbours(x: Rows, number: int) -> list[tuple[float, int]]:
    """The nearest other points, with their distances."""
    others = ((apart(x[number], other), index) for index, other in enumerate(x) if index != number)
    return nsmallest(2 * len(x[0]), others)


def _mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sumprod(values, values) / len(values))


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


def held_out_error(groups: Sequence[Sequence[Point]], folds: int = 5) -> HeldOut:
    """Predict every ``folds``-th point of each group from the others, in turn; groups are of one kernel and family."""
    errors: list[float] = []
    count = within = 0
    for points in groups:
        for fold in range(folds):
            held = points[fold::folds]
            model = fit([each for number, each in enumerate(points) if number % folds != fold])
            count += len(held)
            for each in held:
                found = None if model is None else predict(model, each.sizes)
                if found is not None:
                    away = abs(math.log2(found.time_us / each.time_us))
                    errors.append(away)
                    within += away <= 2 * found.error
    ordered = sorted(2**away - 1 for away in errors) or [math.nan]
    share = within / len(errors) if errors else math.nan
    return HeldOut(count, len(errors), ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.9)], share)
