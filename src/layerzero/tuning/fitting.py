"""Learning a model of times from points: the floor, where regimes meet, the plane in each, and what it is worth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from heapq import nsmallest
from operator import le
from typing import NamedTuple

import msgspec

from layerzero.tuning.prediction import (
    ERROR_FLOOR,
    SHARPNESS,
    WAITS,
    Leaf,
    Model,
    Point,
    Split,
    along,
    apart,
    extents,
    nearby,
    predict,
    sumprod,
)

MAX_POINTS = 128
MAX_DEPTH = 4
MAX_CUTS = 8
"""Cuts that are tried along each size."""

_GAIN = 1 / 3
"""A split leaves at most so much of the squared error of left-out points.

On a synthetic roofline 0.25 to 0.4 choose alike, and 0.5 splits the noise of a coarse grid. On times of an H200, whose
host drifted, held-out errors grow as it shrinks, and choices get better down to here (2026-11-21).
"""

_RIDGE = 1e-6

MIN_REACH = 1 / 8
"""Doublings; points that lie closer say no more about their neighbours, and the same sizes again nothing at all."""

_AT_FLOOR = 1.5
"""Times up to so much above the smallest say nothing about what lies below the floor."""

_FLOOR_POINTS, _FLOOR_SPAN = 3, 2.0
"""A floor is one where so many points stand on it, with so many doublings of work between them."""

_ODD = 0.15
"""So many points, in proportion, may take longer than larger ones on the floor; where more do, it is all noise."""

_CALM = 0.1
"""Quantile of the host times of a family: what interrupts or slows a host only adds to them."""

Rows = Sequence[tuple[float, ...]]
"""Coordinates of points: log2 of the sizes that vary."""


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
    measured = [extents(each.sizes) for each in points]
    axes, ties, fixed = _axes(measured)
    if not axes or len(points) < len(axes) + 2:
        return None
    x = [tuple(math.log2(each[name]) for name in axes) for each in measured]
    floor_us = _floor(x, times)
    above = [number for number, time_us in enumerate(times) if time_us > _AT_FLOOR * floor_us]
    splits: list[Split] = []
    leaves: list[Leaf] = []
    root = None
    if len(above) >= len(axes) + 2:
        left = [math.log2(times[number] ** SHARPNESS - floor_us**SHARPNESS) / SHARPNESS for number in above]
        root = _grow([x[number] for number in above], left, splits, leaves, MAX_DEPTH)
    elif not floor_us:
        return None
    columns = list(zip(*x, strict=True))
    return Model(
        axes=axes,
        ties=ties,
        fixed=fixed,
        low=tuple(map(min, columns)),
        high=tuple(map(max, columns)),
        floor_us=floor_us,
        floor_error=_spread([time_us for time_us in times if time_us <= _AT_FLOOR * floor_us], floor_us),
        at_floor=tuple(
            place
            for place, time_us in zip(x, times, strict=True)
            if time_us <= _AT_FLOOR * floor_us or time_us <= host_us
        ),
        splits=tuple(splits),
        leaves=tuple(leaves),
        root=root,
        host_us=host_us,
        host_error=host_error,
    )


def _host(points: Sequence[Point]) -> tuple[float, float]:
    """What the host takes, and by how much half of the points exceed that, log2; 0 where no point waited for it."""
    waited: list[float] = []
    ahead: list[float] = []
    for each in points:
        if each.host_us is not None and each.device_us is not None:
            (waited if each.host_us > WAITS * each.device_us else ahead).append(each.host_us)
    if not waited:
        return 0.0, 0.0
    waited.sort()
    calm = min([waited[int(_CALM * (len(waited) - 1))], *ahead])  # a host that got ahead needs less than the burst took
    return calm, math.log2(waited[len(waited) // 2] / calm)


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


def _grow(x: Rows, y: Sequence[float], splits: list[Split], leaves: list[Leaf], depth: int) -> int:
    """Add the tree of these points; return its root."""
    whole = _leaf(x, _plane(x, y))
    cut = _best_cut(x, y, whole) if depth and whole.error > ERROR_FLOOR else None
    if cut is None:
        leaves.append(whole)
        return -len(leaves)
    axis, below, above = cut
    number = len(splits)
    splits.append((axis, below, above, 0, 0))
    left, right = (_grow(*side, splits, leaves, depth - 1) for side in _sides(x, y, axis, below))
    splits[number] = (axis, below, above, left, right)
    return number


def _sides(x: Rows, y: Sequence[float], axis: int, below: float) -> tuple[tuple[Rows, list[float]], ...]:
    """The points up to a coordinate, and those beyond it."""
    pairs = list(zip(x, y, strict=True))
    low = [pair for pair in pairs if along(pair[0], axis) <= below]
    high = [pair for pair in pairs if along(pair[0], axis) > below]
    return tuple(([point for point, _ in side], [value for _, value in side]) for side in (low, high))


def _best_cut(x: Rows, y: Sequence[float], whole: Leaf) -> tuple[int, float, float] | None:
    """The cut whose two planes fit best, if their leaves miss left-out points by enough less than one leaf does."""
    dims = len(x[0])
    best: _Cut | None = None
    for axis in range(dims + 1 if dims > 1 else dims):
        gaps = list(itertools.pairwise(sorted({along(point, axis) for point in x})))
        step = max(1, math.ceil(len(gaps) / MAX_CUTS))
        tried = [(cut, number) for number in range(0, len(gaps), step) if (cut := _cut(x, y, axis, gaps[number]))]
        if tried:
            _, near = min(tried, key=lambda pair: pair[0].cost)
            between = range(max(0, near - step + 1), min(len(gaps), near + step))
            cuts = [cut for number in between if (cut := _cut(x, y, axis, gaps[number]))]
            best = min([*cuts, *([best] if best else [])], key=lambda cut: cut.cost)
    if best is None:
        return None
    left_over = sum(_leaf(points, plane).error ** 2 * len(points) for points, plane in best.sides)
    return best.place if left_over < _GAIN * whole.error**2 * len(y) else None


class _Cut(NamedTuple):
    """A place to split at, the points and the plane of both sides, and the squared error that is left over."""

    place: tuple[int, float, float]
    sides: list[tuple[Rows, _Plane]]
    cost: float


def _cut(x: Rows, y: Sequence[float], axis: int, gap: tuple[float, float]) -> _Cut | None:
    """Split at a gap; None where a side has less than twice as many points as a plane has numbers: few fit anyway."""
    sides = _sides(x, y, axis, gap[0])
    if min(len(values) for _, values in sides) < 2 * (len(x[0]) + 1):
        return None
    planes = [(points, _plane(points, values)) for points, values in sides]
    return _Cut((axis, *gap), planes, sum(plane.error**2 * len(points) for points, plane in planes))


class _Plane(NamedTuple):
    """A least-squares plane, what it leaves over, and what it leaves over of a point that it was not made from."""

    plane: tuple[float, ...]
    residuals: list[float]
    left_out: list[float]
    projected: list[list[float]]
    error: float


def _plane(x: Rows, y: Sequence[float]) -> _Plane:
    """Fit a plane. In plain Python: torch's threads do not survive a fork, and there are few points."""
    rows = [(1.0, *point) for point in x]
    size = len(rows[0])
    gram = [
        [sum(row[i] * row[j] for row in rows) + (_RIDGE if i == j else 0.0) for j in range(size)] for i in range(size)
    ]
    inverse = _inverse(gram)
    target = [sum(row[i] * value for row, value in zip(rows, y, strict=True)) for i in range(size)]
    plane = [sumprod(line, target) for line in inverse]
    residuals = [value - sumprod(plane, row) for row, value in zip(rows, y, strict=True)]
    projected = [[sumprod(line, row) for line in inverse] for row in rows]
    left_out = [
        residual / max(1 - sumprod(row, image), 1e-3)
        for residual, row, image in zip(residuals, rows, projected, strict=True)
    ]
    return _Plane(tuple(plane), residuals, left_out, projected, _mean_square(left_out))


def _leaf(x: Rows, fitted: _Plane) -> Leaf:
    """Judge a plane and its bent form by leaving each point out."""
    dims = len(x[0])
    bent_errors, reach = [], 0.0
    for number, point in enumerate(x):
        near = nsmallest(
            2 * dims,
            [(apart(point, other), index) for index, other in enumerate(x) if index != number],
        )
        reach += near[0][0] / len(x)
        left_out, image = fitted.left_out[number], fitted.projected[number]
        others = [  # residuals of the neighbours by the plane that was made without this point
            (distance, fitted.residuals[index] + sumprod((1.0, *x[index]), image) * left_out)
            for distance, index in near
        ]
        bent_errors.append(left_out - nearby(others))
    bent_error = _mean_square(bent_errors)
    return Leaf(
        plane=fitted.plane,
        points=tuple(x),
        residuals=tuple(fitted.residuals),
        bent=bent_error < fitted.error,
        error=min(fitted.error, bent_error),
        reach=max(reach, MIN_REACH),
    )


def _spread(times: Sequence[float], from_us: float) -> float:
    """Root mean square of the distances from a time, log2."""
    return _mean_square([math.log2(time_us / from_us) for time_us in times]) if times else 0.0


def _mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sumprod(values, values) / len(values))


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """Gauss-Jordan on a small positive definite matrix."""
    size = len(matrix)
    work = [[*row, *(1.0 if i == j else 0.0 for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(work[row][column]))
        work[column], work[pivot] = work[pivot], work[column]
        scale = work[column][column]
        work[column] = [value / scale for value in work[column]]
        for row in range(size):
            if row != column and work[row][column]:
                factor = work[row][column]
                work[row] = [value - factor * lead for value, lead in zip(work[row], work[column], strict=True)]
    return [row[size:] for row in work]


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
