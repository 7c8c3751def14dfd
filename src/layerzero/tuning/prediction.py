"""Times of calls that nobody measured, from measured ones that differ in sizes only: piecewise power laws.

In logarithms a time is close to a plane over the sizes as long as the same resource bounds it. A tree splits the sizes
where two planes explain the data better than one; inside a leaf, the plane is bent towards the nearest residuals if
that helps. What it is worth is asked of the data: every point is predicted from all others, and their error, scaled by
the distance to the nearest point, is the error that a prediction claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from operator import mul, sub
from typing import NamedTuple

import msgspec

MAX_DISTANCE = 2.0
"""Doublings of all sizes together from the nearest measured point, beyond which there is no evidence."""

MAX_OUTSIDE = 1.0
"""Doublings of one size beyond all measured ones."""

ERROR_FLOOR = 0.02
"""log2: 1.4 %, what clocks and neighbours move a median by; no prediction claims less."""

ERROR_AT_HALF = 0.25
"""log2: a claimed error of 19 % halves the confidence."""

MIN_CONFIDENCE = 0.1


class Point(NamedTuple):
    """A measured time: sizes by name, microseconds."""

    sizes: Mapping[str, int]
    time_us: float


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One regime: ``log2(time) = plane · (1, x)``, bent by residuals where ``bent``.

    Attributes:
        plane: offset and slopes.
        points: coordinates of its points.
        residuals: of the points.
        bent: whether the nearest residuals are added.
        low, high: their bounds, axis by axis.
        error: root mean square of the errors when each point was left out, log2.
        reach: mean distance of a left-out point to its nearest neighbour, in doublings.
    """

    plane: tuple[float, ...]
    points: tuple[tuple[float, ...], ...]
    residuals: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    bent: bool
    error: float
    reach: float


Split = tuple[int, float, float, int, int]
"""Where regimes meet: an axis (see :func:`along`), ``below`` and ``above`` on it, and the children left and right."""


class Model(msgspec.Struct, frozen=True):
    """What was learnt about one kernel and one family of works.

    Attributes:
        axes: sizes that vary on their own, in the order of the coordinates.
        ties: sizes that follow another one: (size, the other, difference in log2).
        fixed: sizes that never varied; a call that differs in one gets no prediction.
        splits, leaves: the tree; a child is a split's number, or the leaf ``-1 - child``.
        root: the first child.
    """

    axes: tuple[str, ...]
    ties: tuple[tuple[str, str, float], ...]
    fixed: dict[str, int]
    splits: tuple[Split, ...]
    leaves: tuple[Leaf, ...]
    root: int


class Prediction(NamedTuple):
    """A time in microseconds, the error that it claims in log2, and how far the nearest point is, in doublings."""

    time_us: float
    error: float
    distance: float

    @property
    def confidence(self) -> float:
        """0 to 1."""
        return 1 / (1 + (self.error / ERROR_AT_HALF) ** 2)

    @property
    def noise(self) -> float:
        """The claimed error as a share of the time."""
        return float(2**self.error - 1)


def predict(model: Model, sizes: Mapping[str, int]) -> Prediction | None:
    """Estimate a time; None too far from what was measured, or in a direction that never was."""
    if sizes.keys() != {*model.axes, *model.fixed, *(tie[0] for tie in model.ties)} or min(sizes.values()) <= 0:
        return None
    if any(sizes[name] != size for name, size in model.fixed.items()):
        return None
    if any(abs(math.log2(sizes[one] / sizes[other]) - apart) > 1e-6 for one, other, apart in model.ties):
        return None
    x = [math.log2(sizes[name]) for name in model.axes]
    found = [prediction for leaf in _leaves(model, x) if (prediction := _from_leaf(leaf, x)) is not None]
    if not found:
        return None
    if len(found) == 1:
        best = found[0]
    else:  # between two regimes: either may hold, so their difference is part of the error
        logs = [math.log2(each.time_us) for each in found]
        error = max(*(each.error for each in found), (max(logs) - min(logs)) / 2)
        best = Prediction(2 ** (sum(logs) / len(logs)), error, min(each.distance for each in found))
    return best if best.confidence >= MIN_CONFIDENCE else None


def _leaves(model: Model, x: Sequence[float]) -> list[Leaf]:
    """The regimes that a call may be in: more than one where it lies between their points."""
    found, todo = [], [model.root]
    while todo:
        child = todo.pop()
        if child < 0:
            found.append(model.leaves[-child - 1])
            continue
        axis, below, above, left, right = model.splits[child]
        place = along(x, axis)
        if place < above:
            todo.append(left)
        if place > below:
            todo.append(right)
    return found


def _from_leaf(leaf: Leaf, x: Sequence[float]) -> Prediction | None:
    for place, low, high in zip(x, leaf.low, leaf.high, strict=True):
        if not low - MAX_OUTSIDE <= place <= high + MAX_OUTSIDE:
            return None
    if len(x) == 2:  # most families; a third of the time
        one, two = x
        distances = [abs(one - first) + abs(two - second) for first, second in leaf.points]
    else:
        distances = [apart(x, point) for point in leaf.points]
    nearest = min(distances)
    if nearest > MAX_DISTANCE:
        return None
    log = sumprod(leaf.plane, (1.0, *x))
    if leaf.bent:
        log += nearby(nsmallest(2 * len(x), zip(distances, leaf.residuals, strict=True)))
    error = leaf.error * nearest / leaf.reach if nearest > leaf.reach or leaf.bent else leaf.error
    return Prediction(2**log, max(error, ERROR_FLOOR), nearest)


def along(x: Sequence[float], axis: int) -> float:
    """The coordinate on an axis; on the one after the last, the product of all sizes: how much work there is."""
    return x[axis] if axis < len(x) else math.fsum(x)


def nearby(found: Sequence[tuple[float, float]]) -> float:
    """Mean of the nearest residuals, by inverse squared distance."""
    shares = [1 / max(distance, 1e-6) ** 2 for distance, _ in found]
    return sumprod(shares, [residual for _, residual in found]) / sum(shares)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Doublings between two points, along all axes together."""
    return math.fsum(map(abs, map(sub, one, other)))


def sumprod(one: Iterable[float], other: Iterable[float]) -> float:
    """Sum of products (``math.sumprod`` from Python 3.12 on)."""
    return math.fsum(map(mul, one, other))
