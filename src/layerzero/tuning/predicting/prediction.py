"""Times of calls that nobody measured, from measured ones that differ in sizes only: a sum and its residuals.

A call takes a part that is always there, parts that grow with one size, and a part that grows with all the work: a sum
of shares of products of sizes, no share below zero. What that leaves over is smooth, so the nearest residuals are added
where that helps. What it is worth is asked of the data: every point is predicted from all others, and their error,
scaled by the distance to the nearest point, is the error that a prediction claims. Calls smaller than all that were
measured take the floor, if the data shows one, or the host's time: that is the one estimate that no distance limits.

Predictions are for choosing: kernels of one family err alike, so their order is known better than their times. What
more structure gave, and what less, on the times of an H200 that ship, is in docs/decisions/0057.

Some sizes are worked through in tiles, as attention's queries and keys: where that explains the data better, lengths
between their multiples count as the next multiple. Which sizes those are, and which run side by side, the operation
says (:class:`Meaning`).

Where device and host were told apart, all this is about the device's time, which is clean. The host's hardly depends on
sizes and is one number; a call takes the longer of both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from operator import le, mul, sub
from typing import NamedTuple

import msgspec

from layerzero.core.arguments import Axis

MAX_DISTANCE = 4.0
"""Doublings of all sizes together from the nearest measured point, beyond which there is no evidence.

A kernel without a time beside others with one is passed over, which costs more than a rough time: a half of an H200's
times, predicted from the other half, chose at 1.072 of the best within 2 doublings, at 1.035 within 4 (2026-11-22).
"""

MAX_OUTSIDE = 2.0
"""Doublings of one size beyond all measured ones."""

ERROR_FLOOR = 0.02
"""log2: 1.4 %, what clocks and neighbours move a median by; no prediction claims less."""

ERROR_AT_HALF = 2.0
"""log2: a claimed error of a factor of 4 halves the confidence.

Kernels of one family err alike, so their order is known better than their times. Over 67 calls of an H200 the choice
took 1.13 times the best one's time at a half of 0.25, 1.06 at 1 and 1.05 at 2 (2026-11-21).
"""

HOST_MARGIN = 1.2
"""A host's typical time counts so many times: it is slower for seconds more often than it is quicker.

Choices recomputed from an H200's stored times took 1.009 to 1.010 times the best of three judgements of 80 calls at
1.2, 1.010 to 1.014 at 1 and 1.011 to 1.014 at 1.3 (2026-11-22).
"""

WAITS = 1.1
"""A burst that takes so many times the device's time waits for the host; gaps between two calls are less."""

CARRIED_MAY_DIFFER = 1.0
"""How many are carried by one may differ from all measured ones, by so many doublings: then all kernels are off alike.
"""

MIN_CONFIDENCE = 0.1


def waits(device_us: float | None, host_us: float | None) -> bool:
    """Whether calls back to back wait for their host."""
    return host_us is not None and device_us is not None and host_us > WAITS * device_us


class Meaning(msgspec.Struct, frozen=True, array_like=True):
    """What an operation says of its sizes (:class:`layerzero.core.arguments.Axis`).

    Attributes:
        beside: those whose entries run side by side, so that only their product counts.
        carried: pairs of one and the one that carries it: beside that product, how many go with each counts.
        tiled: those that are worked through in tiles.
    """

    beside: tuple[str, ...] = ()
    carried: tuple[tuple[str, str], ...] = ()
    tiled: tuple[str, ...] = ()


PLAIN = Meaning()
"""Every size counts as it is."""


@functools.cache
def meaning_of(axes: tuple[Axis, ...]) -> Meaning:
    """What the axes of an operation say."""
    beside = [axis for axis in axes if axis.beside]
    return Meaning(
        tuple(axis.name for axis in beside if not axis.carries),
        tuple((name, axis.name) for axis in beside for name in axis.carries),
        tuple(axis.name for axis in axes if axis.tiled),
    )


class Point(NamedTuple):
    """A measured time: sizes by name, microseconds; of device and host where they were told apart."""

    sizes: Mapping[str, int]
    time_us: float
    device_us: float | None = None
    host_us: float | None = None
    meaning: Meaning = PLAIN

    @property
    def waits(self) -> bool:
        """Whether the host decided about it."""
        return waits(self.device_us, self.host_us)


class Model(msgspec.Struct, frozen=True):
    """What was learnt about one kernel and one family of works: ``time = sum of share * term``, bent by residuals.

    Attributes:
        axes: extents (see :func:`extents`) that vary on their own, in the order of the coordinates.
        ties: extents that follow another one: (extent, the other, difference in log2).
        fixed: extents that never varied; a call that differs in one gets no prediction,
            :data:`CARRIED_MAY_DIFFER` apart.
        low, high: bounds of all points, axis by axis.
        powers: of each term, the power of each axis.
        shares: of the terms, in microseconds; each term is 1 at the largest sizes of all.
        points, residuals: coordinates of all points, and what the sum leaves over there, log2.
        bent: whether the nearest residuals are added.
        error: root mean square of the errors when each point was left out, log2.
        reach: mean distance of a left-out point to its nearest neighbour, in doublings.
        within: how far from the nearest point there is evidence, in doublings.
        floor_us: what the smallest calls take, however small they are; 0 where the data shows none. The device's,
            where that was told apart.
        floor_error: how far the times that hardly exceed it are from it, root mean square, log2.
        at_floor: coordinates of the points that take hardly longer, or less than the host.
        tile: lengths count as the next multiple of it.
        host_us: what the host takes, at any size; 0 where it was not told apart, or where no point waited for it.
        host_error: by how much half of the points that waited for it exceed that, log2.
        meaning: what the operation said of its sizes.
        told: whether the times are the device's, told apart from what a caller waits for.
    """

    axes: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    powers: tuple[tuple[int, ...], ...]
    shares: tuple[float, ...]
    points: tuple[tuple[float, ...], ...]
    residuals: tuple[float, ...]
    bent: bool
    error: float
    reach: float
    within: float
    host_us: float
    host_error: float
    meaning: Meaning
    ties: tuple[tuple[str, str, float], ...] = ()
    fixed: dict[str, float] = {}
    floor_us: float = 0.0
    floor_error: float = 0.0
    at_floor: tuple[tuple[float, ...], ...] = ()
    tile: int = 1
    told: bool = False


class Prediction(NamedTuple):
    """A time in microseconds, the error that it claims in log2, and how far the nearest point is, in doublings.

    ``device_us`` is the device's part, None where no point told it.
    """

    time_us: float
    error: float
    distance: float
    device_us: float | None = None

    @property
    def confidence(self) -> float:
        """0 to 1."""
        return 1 / (1 + (self.error / ERROR_AT_HALF) ** 2)

    @property
    def noise(self) -> float:
        """The claimed error as a share of the time."""
        return float(2**self.error - 1)


def extents(sizes: Mapping[str, int], meaning: Meaning, tile: int = 1) -> dict[str, float]:
    """What the work of a call depends on: of what runs side by side only the product, of tiles only whole ones."""
    beside = [name for name in meaning.beside if name in sizes]
    carried = [pair for pair in meaning.carried if sizes.keys() >= {*pair}]
    gone = {*beside, *(carrier for _, carrier in carried)}
    found: dict[str, float] = {name: size for name, size in sizes.items() if name not in gone}
    if beside:
        found["*".join(beside)] = math.prod(sizes[name] for name in beside)
    found |= {_share(*pair): sizes[pair[0]] / sizes[pair[1]] for pair in carried}
    if tile > 1:
        found |= {name: -(-sizes[name] // tile) * tile for name in meaning.tiled if name in sizes}
    return found


def _share(carried: str, carrier: str) -> str:
    """The name of how many go with each."""
    return f"{carried}/{carrier}"


def predict(model: Model, sizes: Mapping[str, int]) -> Prediction | None:
    """Estimate a time; None too far from what was measured, or in a direction that never was."""
    found = _place(model, sizes)
    if found is None:
        return None
    x, away = found
    outside = max(map(max, map(sub, model.low, x), map(sub, x, model.high)))
    best = _from_sum(model, x, away) if outside <= MAX_OUTSIDE else None
    if best is not None:
        best = _waited_for(model, best)
        return best if best.confidence >= MIN_CONFIDENCE else None
    if any(all(map(le, x, point)) for point in model.at_floor):
        # Something larger takes no longer, or waits for the host all the same: how far away that is does not matter.
        nearest = min(apart(x, point) for point in model.at_floor)
        return _waited_for(model, Prediction(model.floor_us, max(model.floor_error, ERROR_FLOOR), nearest + away))
    return None


def _waited_for(model: Model, device: Prediction) -> Prediction:
    """What a user waits for: the longer of both. An error of the device counts as far as it reaches over the host."""
    host_us = HOST_MARGIN * model.host_us
    if not host_us:
        return device._replace(device_us=device.time_us) if model.told else device
    if device.time_us >= host_us:
        return device._replace(device_us=device.time_us)
    covered = math.log2(host_us / device.time_us) if device.time_us else math.inf
    error = max(model.host_error, device.error - covered, ERROR_FLOOR)
    return Prediction(host_us, error, device.distance, device.time_us)


def _place(model: Model, sizes: Mapping[str, int]) -> tuple[list[float], float] | None:
    """The coordinates of a call, and the doublings by which its fixed extents differ; None where nothing is known."""
    if not sizes or min(sizes.values()) <= 0:
        return None
    asked, away = extents(sizes, model.meaning, model.tile), 0.0
    if asked.keys() != {*model.axes, *model.fixed, *(tie[0] for tie in model.ties)}:
        return None
    for name, extent in model.fixed.items():
        if asked[name] != extent:
            differs = abs(math.log2(asked[name] / extent))
            if differs > CARRIED_MAY_DIFFER or name not in [_share(*pair) for pair in model.meaning.carried]:
                return None
            away += differs
    if any(abs(math.log2(asked[one] / asked[other]) - between) > 1e-6 for one, other, between in model.ties):
        return None
    return [math.log2(asked[name]) for name in model.axes], away


def _from_sum(model: Model, x: Sequence[float], away: float) -> Prediction | None:
    if len(x) == 2:  # most families; a third of the time
        one, two = x
        distances = [abs(one - first) + abs(two - second) for first, second in model.points]
    else:
        distances = [apart(x, point) for point in model.points]
    distance = min(distances) + away
    if distance > model.within:
        return None
    log = math.log2(sumprod(terms(model.powers, model.high, x), model.shares))
    near = nsmallest(2 * len(x), zip(distances, model.residuals, strict=True))
    middle = nearby(near)
    differ = math.sqrt(
        nearby([(away, (residual - middle) ** 2) for away, residual in near])
    )  # a kernel may switch there
    error = model.error * distance / model.reach if distance > model.reach or model.bent else model.error
    return Prediction(2.0 ** (log + model.bent * middle), max(error, differ, ERROR_FLOOR), distance)


def terms(powers: Sequence[Sequence[int]], high: Sequence[float], x: Sequence[float]) -> list[float]:
    """Products of sizes, each 1 at the largest sizes."""
    below = [place - top for place, top in zip(x, high, strict=True)]
    return [2.0 ** sumprod(power, below) for power in powers]


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
