"""A time for sizes that are too far from all measured ones: that of the nearest measured call, by the work there is.

Only for operations without tensors. Any of their kernels takes any size, and who is quickest hardly changes beyond what
was measured; without a time the library that defines a tokenizer would run, 21 times slower than the quickest (20,000
texts of 400 characters, 2 CPU cores, 2026-11-22).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from layerzero.tuning.predicting.prediction import Model, Prediction, apart, predict

ERROR_PER_DOUBLING = 0.1
"""log2: what a time is taken to be off by, for each doubling of a size beyond the nearest measured one."""


def scaled(model: Model, sizes: Mapping[str, int]) -> Prediction | None:
    """The time of the nearest measured call, as many times as there is more of the largest size."""
    if not sizes or min(sizes.values()) <= 0 or not {*model.axes} <= sizes.keys():
        return None
    wanted = [math.log2(sizes[name]) for name in model.axes]
    nearest = min(sorted({*model.points}), key=lambda point: apart(wanted, point), default=None)
    if nearest is None:
        return None
    there = {name: 2.0**place for name, place in zip(model.axes, nearest, strict=True)} | model.fixed
    there |= {one: there[other] * 2**between for one, other, between in model.ties if other in there}
    measured = {name: round(value) for name, value in there.items()}
    found = predict(model, measured)
    if found is None or measured.keys() != sizes.keys():
        return None
    away = math.fsum(abs(math.log2(sizes[name] / measured[name])) for name in sizes)
    largest = max(sizes, key=lambda name: sizes[name])
    time_us = found.time_us * sizes[largest] / measured[largest]
    return Prediction(time_us, found.error + ERROR_PER_DOUBLING * away, away)
