"""torch's own operators, with the arguments of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Any]


def add_bias(input: Tensor, bias: Tensor) -> Run:
    """``+``."""
    return lambda: input + bias


def add_residual(
    residual: Tensor,
    input: Tensor,
    *,
    scale_by_row: Tensor | None = None,
    scale: float | None = None,
) -> Run:
    """``+=``, of what was multiplied before."""

    def run() -> None:
        if scale_by_row is None:
            residual.add_(input, alpha=1 if scale is None else scale)
        else:
            residual.add_(input * scale_by_row.unsqueeze(-1).to(input.dtype))

    return run


def softmax(input: Tensor, *, temperature: float | None = None) -> Run:
    """``torch.softmax``; a temperature divides in float32 at least, where half precision would overflow."""
    if temperature is None:
        return lambda: input.softmax(-1)
    wide = torch.promote_types(input.dtype, torch.float32)
    return lambda: (input.to(wide) / temperature).softmax(-1).to(input.dtype)


def cast(input: Tensor, *, out_dtype: torch.dtype) -> Run:
    """``Tensor.to``."""
    return lambda: input.to(out_dtype, copy=True)
