"""Convolutions as sums over the places of a filter."""

from __future__ import annotations

import numpy as np


def _steps(given, axes):
    return (given,) * axes if isinstance(given, int) else tuple(given) * (axes if len(given) == 1 else 1)


def _conv(c):
    x, weight, groups = c["input"], c["weight"], c["groups"]
    axes = weight.ndim - 2
    stride, dilation = _steps(c["stride"], axes), _steps(c["dilation"], axes)
    sizes = weight.shape[2:]
    spans = [step * (size - 1) for step, size in zip(dilation, sizes, strict=True)]
    if c["padding"] == "same":
        ends = [(span // 2, span - span // 2) for span in spans]
    else:
        ends = [(each, each) for each in _steps(0 if c["padding"] == "valid" else c["padding"], axes)]
    x = np.pad(x, [(0, 0)] * (x.ndim - axes) + ends)
    lengths = [
        (x.shape[axis - axes] - span - 1) // step + 1
        for axis, (span, step) in enumerate(zip(spans, stride, strict=True))
    ]
    share, results = x.shape[-axes - 1] // groups, weight.shape[0] // groups
    parts = []
    for group in range(groups):
        channels = x[(..., slice(group * share, (group + 1) * share), *[slice(None)] * axes)]
        own = weight[group * results : (group + 1) * results]
        total = np.zeros((*x.shape[: -axes - 1], results, *lengths))
        for place in np.ndindex(*sizes):
            window = tuple(
                slice(at * d, at * d + s * (length - 1) + 1, s)
                for at, d, s, length in zip(place, dilation, stride, lengths, strict=True)
            )
            letters = "yz"[:axes]
            total += np.einsum(f"...c{letters},kc->...k{letters}", channels[(..., *window)], own[(..., *place)])
        parts.append(total)
    out = np.concatenate(parts, axis=-axes - 1)
    bias = c.get("bias")
    return (out if bias is None else out + bias.reshape(-1, *[1] * axes),)


ORACLES = {"conv.conv1d": _conv, "conv.conv2d": _conv}
