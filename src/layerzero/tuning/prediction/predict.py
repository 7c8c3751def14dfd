"""Times of calls that were not measured, from measured ones that differ in sizes only: a sum and its residuals.

A call takes a part that is always there, parts that grow with one size, and a part that grows with all the work: a sum
of shares of products of sizes, no share below zero. What that leaves over is smooth: the nearest residuals are added.
The data say what it is worth: every point is predicted from all others, and their error, larger by the distance to the
nearest point, is the error that a prediction claims. A single point has a sum, too: half of it grows.

Predictions are for choosing: kernels of one family err alike, so their order is known better than their times. What
more structure gave, and what less, on the times that ship, is in docs/decisions/0057 and 0062.

Some sizes are worked through in tiles, as attention's queries and keys: where that explains the data better, lengths
between their multiples count as the next multiple. Which sizes those are, and which run side by side, the operation
says (:class:`Meaning`).

Where device and host were measured apart, all this is about the device's time, which is clean. The host's hardly
depends on sizes and is one number; a call takes the longer of both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from operator import mul
from typing import NamedTuple

import msgspec

from layerzero.core.arguments import Axis
from layerzero.core.evidence import HOST_MARGIN

MAX_DISTANCE = 6.0
"""Doublings of all sizes together from the nearest measured point, beyond which there is no evidence.

A kernel without a time among others with one is passed over, which costs more than a rough time. Choices made for the
third of each family's calls with the least work, from the other two thirds, took 1.22 of the best within 4, 1.15 within
6 and 1.13 within 8; from one call each, the worst took 11 times the best within 6 and 127 within 8
(docs/decisions/0062, 2026-11-23).
"""

NEIGHBOURS = 4
"""So many of the nearest residuals bend the sum."""

ERROR_FLOOR = 0.02
"""log2: 1.4 %, what clocks and neighbours move a median by; no prediction claims less."""

ERROR_AT_HALF = 2.0
"""log2: a claimed error of a factor of 4 halves the confidence.

Kernels of one family err alike, so their order is known better than their times. Over 67 calls of an H200 the choice
took 1.13 times the best one's time at a half of 0.25, 1.06 at 1 and 1.05 at 2 (2026-11-21).
"""

WAITS = 1.1
"""A burst that takes so many times the device's time waits for the host; gaps between two calls are less."""

MIN_CONFIDENCE = 0.1


def waits(device_us: float | None, host_us: float | None) -> bool:
    """Whether calls back to back wait for their host."""
    return host_us is not None and device_us is not None and host_us > WAITS * device_us


class Meaning(msgspec.Struct, frozen=True, array_like=True):
    """What an operation says of its sizes (:class:`layerzero.core.arguments.Axis`).

    Attributes:
        beside: those whose entries run side by side, so that only their product counts.
        carried: pairs of one and the one that carries it: besides that product, how many go with each counts.
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
    """A measured time: sizes by name, microseconds; of device and host where they were measured apart."""

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
        axes: extents (see :func:`extents`), in the order of the coordinates.
        high: the largest of all points, axis by axis.
        powers: of each term, the power of each axis.
        shares: of the terms, in microseconds; each term is 1 at the largest sizes of all.
        points, residuals: coordinates of all points, and what the sum leaves over there, log2.
        error: root mean square of the errors when each point was left out, log2.
        reach: mean distance of a left-out point to its nearest neighbour, in doublings.
        tile: lengths count as the next multiple of it.
        host_us: what the host takes, at any size; 0 where it was not measured apart, or where no point waited for it.
        host_error: by how much half of the points that waited for it exceed that, log2.
        meaning: what the operation said of its sizes.
        told: whether the times are the device's, measured apart from what a caller waits for.
    """

    axes: tuple[str, ...]
    high: tuple[float, ...]
    powers: tuple[tuple[int, ...], ...]
    shares: tuple[float, ...]
    points: tuple[tuple[float, ...], ...]
    residuals: tuple[float, ...]
    error: float
    reach: float
    tile: int
    host_us: float
    host_error: float
    meaning: Meaning
    told: bool = False


class Prediction(NamedTuple):
    """A time in microseconds, the error that it claims in log2, and how far the nearest point is, in doublings.

    ``device_us`` is the device's part, None where no point has it.
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
    found |= {f"{one}/{other}": sizes[one] / sizes[other] for one, other in carried}
    if tile > 1:
        found |= {name: -(-sizes[name] // tile) * tile for name in meaning.tiled if name in sizes}
    return found


def predict(model: Model, sizes: Mapping[str, int], farthest: float = MAX_DISTANCE) -> Prediction | None:
    """Estimate a time; None where the nearest measured call is too many doublings away."""
    if not sizes or min(sizes.values()) <= 0:
        return None
    asked = extents(sizes, model.meaning, model.tile)
    if asked.keys() != {*model.axes}:
        return None
    x = [math.log2(asked[name]) for name in model.axes]
    distances = doublings(model.points, x)
    distance = min(distances)
    if distance > farthest:
        return None
    middle, differ = nearby(zip(distances, model.residuals, strict=True))
    time_us = sumprod(terms(model.powers, model.high, x), model.shares) * 2.0**middle
    error = max(model.error * max(1.0, distance / model.reach), differ, ERROR_FLOOR)
    found = _waited_for(model, Prediction(time_us, error, distance))
    return found if found.confidence >= MIN_CONFIDENCE else None


def _waited_for(model: Model, device: Prediction) -> Prediction:
    """What a user waits for: the longer of both. An error of the device counts as far as it reaches over the host."""
    host_us = HOST_MARGIN * model.host_us
    if not host_us:
        return device._replace(device_us=device.time_us) if model.told else device
    if device.time_us >= host_us:
        return device._replace(device_us=device.time_us)
    covered = math.log2(host_us / device.time_us)
    error = max(model.host_error, device.error - covered, ERROR_FLOOR)
    return Prediction(host_us, error, device.distance, device.time_us)


def terms(powers: Sequence[Sequence[int]], high: Sequence[float], x: Sequence[float]) -> list[float]:
    """Products of sizes, each 1 at the largest sizes."""
    below = [place - top for place, top in zip(x, high, strict=True)]
    return [2.0 ** sumprod(power, below) for power in powers]


def nearby(found: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Mean of the nearest residuals by inverse squared distance, and what they differ by where a kernel switches."""
    near = nsmallest(NEIGHBOURS, found)
    shares = [1 / (away * away + 1e-12) for away, _ in near]
    total = math.fsum(shares)
    middle = sumprod(shares, [residual for _, residual in near]) / total
    differ = sumprod(shares, [(residual - middle) ** 2 for _, residual in near]) / total
    return middle, math.sqrt(differ)


def doublings(points: Sequence[Sequence[float]], x: Sequence[float]) -> list[float]:
    """How far each point is, along all axes together."""
    found = [0.0] * len(points)
    for place, column in zip(x, zip(*points, strict=True), strict=True):
        found = [away + abs(other - place) for away, other in zip(found, column, strict=True)]
    return found


def sumprod(one: Iterable[float], other: Iterable[float]) -> float:
    """Sum of products (``math.sumprod`` from Python 3.12 on)."""
    return math.fsum(map(mul, one, other))
