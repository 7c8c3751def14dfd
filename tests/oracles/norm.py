"""Norms, row by row."""

from __future__ import annotations

import numpy as np


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _layer(c):
    x, shape = c["input"], tuple(c["normalized_shape"])
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    mean = x.mean(axes, keepdims=True)
    out = (x - mean) / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + c.get("eps", 1e-5))
    if c.get("weight") is not None:
        out = out * c["weight"]
    return (out if c.get("bias") is None else out + c["bias"],)


def _add_rms(c):
    total = c["input"] + c["residual"]
    return rms(total, c["weight"], c.get("eps", 1e-6)), total


ORACLES = {
    "norm.rms": lambda c: (rms(c["input"], c["weight"], c.get("eps", 1e-6)),),
    "norm.layer": _layer,
    "norm.add_rms": _add_rms,
    "norm.add_rms.inplace": _add_rms,
}
