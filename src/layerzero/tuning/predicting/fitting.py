"""Learning a model of times from points: tiles, sums, where regimes meet, and what all of it is worth."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from operator import le
from typing import NamedTuple

import msgspec

from layerzero.tuning.predicting.prediction import (
    ERROR_FLOOR,
    Leaf,
    Model,
    Point,
    Split,
    along,
    apart,
    extents,
    is_uneven,
    nearby,
    predict,
    sumprod,
    terms,
)
from layerzero.tuning.predicting.shares import Sum, fit_sum

MAX_POINTS = 128
MAX_DEPTH = 3
MAX_TERMS = 12
"""With more sizes than make so many products, there is one term for each size and one for the product of all."""

_GAIN = 1 / 3
"""A split leaves at most so much of the squared error of left-out points: half of it splits the noise of a grid."""

MIN_REACH = 1 / 8
"""Doublings; points that lie closer say no more about their neighbours, and the same sizes again nothing at all."""

_AT_FLOOR = 1.5
"""Times up to so much above the smallest say nothing about what lies below the floor."""

_FLOOR_POINTS, _FLOOR_SPAN = 3, 2.0
"""A floor is one where so many points stand on it, with so many doublings of work between them."""

_ODD = 0.15
"""So many points, in proportion, may take longer than larger ones on the floor; where more do, it is all noise."""

_TILES = (1, 64, 128, 192, 256)
_UNEVEN_POINTS = 3
"""Lengths between multiples that are needed to tell tiles."""

_TILE_GAIN = 0.9
"""What is tried next leaves at most so much of the error of the best before it: more tiles fit noise, too."""

MAX_UNEVEN = 0.5
"""log2: ends that are masked add 41 % at most; what looks like more is another regime."""

_UNEVEN_WEIGHT = 1.0
"""Squared differences in evenness between points and their neighbours that a share for uneven lengths is told from."""

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
    """Learn from points of one kernel and family; None where they are too few to tell what they are worth.

    Where most points tell device and host apart, the rest does not count.
    """
    points = [each for each in points[:MAX_POINTS] if all(size > 0 for size in each.sizes.values())]
    told = [(each, each.device_us) for each in points if each.device_us is not None]
    told_apart = 2 * len(told) > len(points)
    host_us, host_error = _host(points) if told_apart else (0.0, 0.0)
    times = [device_us for _, device_us in told] if told_apart else [each.time_us for each in points]
    points = [each for each, _ in told] if told_apart else points
    if len(points) < 3:
        return None
    uneven = [is_uneven(each.sizes, each.meaning) for each in points]
    tile, more = _tiles(points, times, uneven)
    space = _space(points, tile)
    if not space.axes or len(points) < len(space.axes) + 2:
        return None
    floor_us = _floor(space.x, times)
    y = [math.log2(time_us) - more * ends for time_us, ends in zip(times, uneven, strict=True)]
    splits: list[Split] = []
    leaves: list[Leaf] = []
    root = _grow(space, range(len(y)), y, splits, leaves, MAX_DEPTH)
    return Model(
        axes=space.axes,
        ties=space.ties,
        fixed=space.fixed,
        low=space.low,
        high=space.high,
        powers=space.powers,
        floor_us=floor_us,
        floor_error=_spread([time_us for time_us in times if time_us <= _AT_FLOOR * floor_us], floor_us),
        at_floor=tuple(
            place
            for place, time_us in zip(space.x, times, strict=True)
            if time_us <= _AT_FLOOR * floor_us or time_us <= host_us
        ),
        splits=tuple(splits),
        leaves=tuple(leaves),
        root=root,
        tile=tile,
        uneven=more,
        host_us=host_us,
        host_error=host_error,
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


def _powers(axes: Sequence[str], ties: Sequence[tuple[str, str, float]]) -> Iterator[tuple[int, ...]]:
    """The products of sizes that a time may grow with; sizes that go together make raised."""
    highest = [1 + sum(other == name for _, other, _ in ties) for name in axes]
    every = list(itertools.product(*(range(power + 1) for power in highest)))
    if len(every) <= MAX_TERMS:
        yield from every
        return
    yield (0,) * len(axes)
    for number in range(len(axes)):
        yield tuple(int(number == other) for other in range(len(axes)))
    yield tuple(highest)


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


def _tiles(points: Sequence[Point], times: Sequence[float], uneven: Sequence[bool]) -> tuple[int, float]:
    """The multiple that lengths count as, and what ends that have to be masked add, log2; (1, 0) if nothing tells."""
    if sum(uneven) < _UNEVEN_POINTS or sum(uneven) == len(points):
        return 1, 0.0
    y = [math.log2(time_us) for time_us in times]
    best, least = (1, 0.0), math.inf
    for tile in _TILES:
        space = _space(points, tile)
        if not space.axes or len(points) < len(space.axes) + 2:
            continue
        fitted = _sum(space, range(len(y)), y)
        near = [_neighbours(space.x, number) for number in range(len(y))]
        off = [
            own - nearby([(away, fitted.residuals[index]) for away, index in each])
            for own, each in zip(fitted.residuals, near, strict=True)
        ]
        ends = [
            float(own) - nearby([(away, float(uneven[index])) for away, index in each])
            for own, each in zip(uneven, near, strict=True)
        ]
        weight = sumprod(ends, ends)
        more = min(max(sumprod(off, ends) / weight, 0.0), MAX_UNEVEN) if weight >= _UNEVEN_WEIGHT else 0.0
        for added in (0.0, more):
            error = _mean_square([each - added * end for each, end in zip(off, ends, strict=True)])
            if error < least * _TILE_GAIN:
                best, least = (tile, added), error
    return best


def _neighbours(x: Rows, number: int) -> list[tuple[float, int]]:
    """The nearest other points, with their distances."""
    others = ((apart(x[number], other), index) for index, other in enumerate(x) if index != number)
    return nsmallest(2 * len(x[0]), others)


def _grow(
    space: _Space, chosen: Sequence[int], y: Sequence[float], splits: list[Split], leaves: list[Leaf], depth: int
) -> int:
    """Add the tree of these points; return its root."""
    whole = _leaf(space, chosen, _sum(space, chosen, y))
    cut = _best_cut(space, chosen, y, whole) if depth and whole.error > ERROR_FLOOR else None
    if cut is None:
        leaves.append(whole)
        return -len(leaves)
    place, sides = cut
    number = len(splits)
    splits.append((*place, 0, 0))
    left, right = (_grow(space, side, y, splits, leaves, depth - 1) for side in sides)
    splits[number] = (*place, left, right)
    return number


_Cut = tuple[tuple[int, float, float], tuple[list[int], list[int]]]
"""A place to split at (axis, below, above), and the points of both sides."""


def _best_cut(space: _Space, chosen: Sequence[int], y: Sequence[float], whole: Leaf) -> _Cut | None:
    """Where residuals jump or bend most, if the sums of both sides miss left-out points by enough less."""
    dims = len(space.axes)
    least = 2 * (dims + 1)  # with fewer points, anything fits
    residuals = dict(zip(chosen, whole.residuals, strict=True))
    found: list[tuple[float, _Cut]] = []
    for axis in range(dims + 1 if dims > 1 else dims):
        at = {index: along(space.x[index], axis) for index in chosen}
        ordered = sorted(chosen, key=at.__getitem__)
        for size in range(least, len(ordered) - least + 1):
            below, above = at[ordered[size - 1]], at[ordered[size]]
            if below < above:
                sides = ordered[:size], ordered[size:]
                cost = sum(
                    _unexplained([at[each] for each in side], [residuals[each] for each in side]) for side in sides
                )
                found.append((cost, ((axis, below, above), sides)))
    if not found:
        return None
    best = min(found, key=lambda each: each[0])[1]
    left_over = sum(_leaf(space, side, _sum(space, side, y)).error ** 2 * len(side) for side in best[1])
    return best if left_over < _GAIN * whole.error**2 * len(chosen) else None


def _unexplained(along_axis: Sequence[float], residuals: Sequence[float]) -> float:
    """Squared error that a straight line leaves over."""
    x, y = statistics.fmean(along_axis), statistics.fmean(residuals)
    across = [each - x for each in along_axis]
    up = [each - y for each in residuals]
    width = sumprod(across, across)
    return sumprod(up, up) - (sumprod(across, up) ** 2 / width if width else 0.0)


def _sum(space: _Space, chosen: Sequence[int], y: Sequence[float]) -> Sum:
    """Fit the terms of some points to their times, log2."""
    return fit_sum(
        [terms(space.powers, space.high, space.x[index]) for index in chosen], [y[index] for index in chosen]
    )


def _leaf(space: _Space, chosen: Sequence[int], fitted: Sum) -> Leaf:
    """Judge a sum and its bent form by leaving each point out."""
    x = [space.x[index] for index in chosen]
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
    return Leaf(
        shares=fitted.shares,
        points=tuple(x),
        residuals=tuple(fitted.residuals),
        bent=errors[1] < errors[0],
        error=min(errors),
        reach=max(reach, MIN_REACH),
    )


def _spread(times: Sequence[float], from_us: float) -> float:
    """Root mean square of the distances from a time, log2."""
    return _mean_square([math.log2(time_us / from_us) for time_us in times]) if times else 0.0


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
