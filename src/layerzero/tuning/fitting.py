"""Learning a model of times from points: where regimes meet, the plane in each, and what it is worth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from heapq import nsmallest
from typing import NamedTuple

import msgspec

from layerzero.tuning.prediction import ERROR_FLOOR, Leaf, Model, Point, Split, along, apart, nearby, predict, sumprod

MAX_POINTS = 128
MAX_DEPTH = 4
MAX_CUTS = 8
"""Cuts that are tried along each size."""

_GAIN = 0.5
"""A split has to halve the squared error."""

_RIDGE = 1e-6

MIN_REACH = 1 / 8
"""Doublings; points that lie closer say no more about their neighbours, and the same sizes again nothing at all."""

Rows = Sequence[tuple[float, ...]]
"""Coordinates of points: log2 of the sizes that vary."""


def fit(points: Sequence[Point]) -> Model | None:
    """Learn from points of one kernel and family; None where they are too few to tell what they are worth."""
    points = [each for each in points[:MAX_POINTS] if all(size > 0 for size in each.sizes.values())]
    if len(points) < 3:
        return None
    axes, ties, fixed = _axes(points)
    if not axes or len(points) < len(axes) + 2:
        return None
    x = [tuple(math.log2(each.sizes[name]) for name in axes) for each in points]
    y = [math.log2(each.time_us) for each in points]
    splits: list[Split] = []
    leaves: list[Leaf] = []
    root = _grow(x, y, splits, leaves, MAX_DEPTH)
    return Model(axes, ties, fixed, tuple(splits), tuple(leaves), root)


def _axes(
    points: Sequence[Point],
) -> tuple[tuple[str, ...], tuple[tuple[str, str, float], ...], dict[str, int]]:
    """Tell sizes that vary on their own from those that follow another one and those that never vary."""
    axes: list[str] = []
    ties: list[tuple[str, str, float]] = []
    fixed: dict[str, int] = {}
    for name in sorted(points[0].sizes):
        column = [math.log2(each.sizes[name]) for each in points]
        if max(column) == min(column):
            fixed[name] = points[0].sizes[name]
            continue
        for other in axes:
            apart = [own - math.log2(each.sizes[other]) for own, each in zip(column, points, strict=True)]
            if max(apart) - min(apart) < 1e-9:
                ties.append((name, other, apart[0]))
                break
        else:
            axes.append(name)
    return tuple(axes), tuple(ties), fixed


def _grow(x: Rows, y: Sequence[float], splits: list[Split], leaves: list[Leaf], depth: int) -> int:
    """Add the tree of these points; return its root."""
    whole = _plane(x, y)
    cut = _best_cut(x, y, whole) if depth and whole.error > ERROR_FLOOR else None
    if cut is None:
        leaves.append(_leaf(x, whole))
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


def _best_cut(x: Rows, y: Sequence[float], whole: _Plane) -> tuple[int, float, float] | None:
    """The cut that leaves the smallest squared error, if it halves that of the whole."""
    least = len(x[0]) + 2
    best, best_cost = None, _GAIN * whole.error**2 * len(y)
    dims = len(x[0])
    for axis in range(dims + 1 if dims > 1 else dims):
        gaps = list(itertools.pairwise(sorted({along(point, axis) for point in x})))
        for below, above in gaps[:: max(1, math.ceil(len(gaps) / MAX_CUTS))]:
            sides = _sides(x, y, axis, below)
            if min(len(values) for _, values in sides) < least:
                continue
            cost = sum(_plane(*side).error ** 2 * len(side[1]) for side in sides)
            if cost < best_cost:
                best, best_cost = (axis, below, above), cost
    return best


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
    columns = list(zip(*x, strict=True))
    return Leaf(
        plane=fitted.plane,
        points=tuple(x),
        residuals=tuple(fitted.residuals),
        low=tuple(map(min, columns)),
        high=tuple(map(max, columns)),
        bent=bent_error < fitted.error,
        error=min(fitted.error, bent_error),
        reach=max(reach, MIN_REACH),
    )


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
