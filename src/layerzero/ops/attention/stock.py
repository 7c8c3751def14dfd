"""torch's own attention, with the arguments of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from layerzero.ops.attention.layout import CANONICAL, sequence_axis


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = True, **others: Any
) -> Callable[[], torch.Tensor] | None:
    """``torch.nn.functional.scaled_dot_product_attention``; None for what it has no argument for."""
    layout, scale = others.pop("layout", None) or CANONICAL, others.pop("scale", None)
    axis = sequence_axis(layout)
    single = query.shape[axis] == 1
    aligned = not causal or single or query.shape[axis] == key.shape[axis]  # torch aligns top-left
    if not aligned or any(each is not None and each is not False and each != 0.0 for each in others.values()):
        return None
    heads_first = layout != CANONICAL
    q, k, v = (each if heads_first else each.transpose(1, 2) for each in (query, key, value))
    grouped = q.shape[1] != k.shape[1]

    def run() -> torch.Tensor:
        output = functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal and not single, scale=scale, enable_gqa=grouped
        )
        return output if heads_first else output.transpose(1, 2)

    return run
