"""Rotary positions: each pair of entries turned by its angle."""

from __future__ import annotations

import numpy as np


def turned(x, cos, sin, interleaved):
    """x (*, S, H, D), cos and sin (*, S, half)."""
    half = cos.shape[-1]
    c, s = cos[..., None, :], sin[..., None, :]
    out = x.copy()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def _rope(c):
    places = c.get("positions")
    places = np.arange(c["query"].shape[-3]) if places is None else places
    cos, sin = c["cos"][places], c["sin"][places]
    return tuple(turned(c[name], cos, sin, c.get("interleaved", False)) for name in ("query", "key"))


def _one(c):
    return _rope(c | {"query": c["input"], "key": c["input"]})[:1]


ORACLES = {"posenc.rope": _rope, "posenc.rope.inplace": _rope, "posenc.rope.one": _one}
