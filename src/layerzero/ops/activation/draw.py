"""Random arguments of activations: shapes, memory, gates apart and joined, data on both sides of every bend."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.ops.draw import Draw

_FEATURES = (1, 2, 3, 7, 8, 16, 24, 33, 64, 100, 128, 257, 1536)


def _shape(draw: Draw) -> tuple[int, ...]:
    rows = tuple(draw.of((1, 2, 3, 5, 17)) for _ in range(draw.of((0, 1, 2, 3), (1, 6, 3, 1))))
    return (*((0, *rows) if draw.chance(0.02) else rows), draw.of(_FEATURES))


def _width(draw: Draw) -> float:
    """The deviation of what is activated: 1, now and then as wide as activations get before they are flat or straight.

    What a gate is multiplied by stays near 1: it scales the error of the activation, which tolerances bound for that.
    """
    return float(draw.of((4.0, 12.0))) if draw.chance(0.3) else 1.0


def _alone(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    arguments = {"input": draw.laid_out(draw.normal(_shape(draw), dtype) * _width(draw))}
    draw.poison(arguments, ("input",))
    return arguments


def _gated(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    shape = _shape(draw)
    gate, up = draw.normal(shape, dtype) * _width(draw), draw.normal(shape, dtype)
    if draw.chance(0.5):
        arguments = {"input": draw.laid_out(torch.cat((gate, up), -1))}
    else:
        arguments = {"input": draw.laid_out(gate), "up": draw.laid_out(up)}
    draw.poison(arguments, tuple(arguments))
    return arguments


def _approximate(draw: Draw) -> dict[str, Any]:
    return {"approximate": draw.of(("none", "tanh", "tanh"))} if draw.chance(0.7) else {}


def gelu(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.gelu``."""
    return _alone(draw, dtype) | _approximate(draw)


def silu(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.silu``."""
    return _alone(draw, dtype)


def relu2(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.relu2``."""
    return _alone(draw, dtype)


def silu_mul(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.silu_mul``."""
    return _gated(draw, dtype)


def gelu_mul(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.gelu_mul``."""
    return _gated(draw, dtype) | _approximate(draw)


def swiglu_oai(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.swiglu_oai``."""
    arguments = _gated(draw, dtype)
    if draw.chance(0.3):
        arguments |= {"alpha": draw.of((1.0, 1.702, 0.5)), "limit": draw.of((7.0, 1.5, 7))}
    return arguments
