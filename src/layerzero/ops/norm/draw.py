"""Random arguments of the normalisations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.draw import Draw

_HIDDEN = (1, 2, 3, 7, 8, 16, 33, 64, 100, 128, 257, 384)
_WIDE = (1024, 1031, 4096)


def _norm_sizes(draw: Draw) -> tuple[tuple[int, ...], int]:
    wide = draw.chance(0.08)
    hidden = draw.of(_WIDE if wide else _HIDDEN)
    return draw.leading((0, 1, 2, 3), (1, 4, 4, 1), (1, 2, 3) if wide else (1, 2, 3, 5, 17)), hidden


def _eps(draw: Draw) -> dict[str, Any]:
    return {"eps": draw.of((1e-6, 1e-5, 1e-3, 0.5))} if draw.chance(0.3) else {}


def _scaled(draw: Draw, tensor: Tensor) -> Tensor:
    """Now and then data whose squares no float16 holds."""
    return tensor * draw.of((0.02, 4.0, 300.0)) if draw.chance(0.15) else tensor


def rms_norm(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.rms_norm``."""
    rows, hidden = _norm_sizes(draw)
    arguments = {
        "input": draw.laid_out(_scaled(draw, draw.normal((*rows, hidden), dtype))),
        "weight": draw.laid_out(draw.normal((hidden,), dtype)),
    }
    return draw.poison(arguments, tuple(arguments)) | _eps(draw)


def add_residual_rms_norm_(draw: Draw, dtype: torch.dtype, written: tuple[str, ...] = ("residual",)) -> dict[str, Any]:
    """Draw a call of ``lz.add_residual_rms_norm_``; no axis of what is written into is expanded."""
    rows, hidden = _norm_sizes(draw)
    arguments = {
        name: draw.laid_out(draw.normal((*rows, hidden), dtype), expand=name not in written)
        for name in ("input", "residual")
    }
    arguments["weight"] = draw.laid_out(draw.normal((hidden,), dtype))
    return draw.poison(arguments, tuple(arguments)) | _eps(draw)


def add_rms_norm_(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.add_rms_norm_``."""
    return add_residual_rms_norm_(draw, dtype, ("input", "residual"))


def layer_norm(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.layer_norm``."""
    rows, hidden = _norm_sizes(draw)
    shape = (draw.of((1, 2, 3)), *((2,) if draw.chance(0.3) else ()), hidden) if draw.chance(0.25) else (hidden,)
    size = math.prod(shape)
    spread = torch.tensor([1.5, -1.5]).repeat(size)[:size].view(shape)  # equal numbers have no direction
    given = draw.of((shape[0] if len(shape) == 1 else shape, shape, list(shape)), (4, 4, 1))
    input_ = (draw.normal((*rows, *shape), torch.float32) / 2 + spread.to(draw.device)).to(dtype)
    arguments = {"input": draw.laid_out(_scaled(draw, input_), expand=False), "normalized_shape": given}
    for name in ("weight", "bias"):
        if draw.chance(0.7):
            arguments[name] = draw.laid_out(draw.normal(shape, dtype))
    return draw.poison(arguments, ("input",)) | _eps(draw)
