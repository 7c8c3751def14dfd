"""Operations on every element, and softmax of rows."""

from __future__ import annotations

import numpy as np


def _scaled(c):
    factor = c["scale"] if c.get("scale_by_row") is None else c["scale_by_row"][..., None]
    return (c["residual"] + factor * c["input"],)


def _softmax(c):
    row = c["input"] / (1.0 if c.get("temperature") is None else c["temperature"])
    weights = np.exp(row - row.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True),)


ORACLES = {
    "elementwise.add_bias": lambda c: (c["input"] + c["bias"],),
    "elementwise.add": lambda c: (c["residual"] + c["input"],),
    "elementwise.scaled_add": _scaled,
    "elementwise.softmax": _softmax,
    "elementwise.cast": lambda c: (c["input"],),
}
