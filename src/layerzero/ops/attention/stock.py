"""torch's own attention, with the arguments of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from layerzero.ops.attention.layout import CANONICAL, sequence_axis


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool | None = None, **others: Any
) -> Callable[[], torch.Tensor] | None:
    """``torch.nn.functional.scaled_dot_product_attention``; None for what it has no argument for."""
    layout, scale = others.pop("layout", None) or CANONICAL, others.pop("scale", None)
    mask = others.pop("attn_mask", None)
    causal = mask is None if causal is None else causal
    axis = sequence_axis(layout)
    single = query.shape[axis] == 1
    aligned = not causal or single or query.shape[axis] == key.shape[axis]  # torch aligns top-left
    if not aligned or any(not _neutral(each) for each in others.values()):
        return None
    heads = 1 if layout != CANONICAL else 2
    is_causal, grouped = causal and not single, query.shape[heads] != key.shape[heads]

    def run() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )

    def run_transposed() -> torch.Tensor:  # whoever has such tensors pays for their views in each call
        output = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=grouped,
        )
        return output.transpose(1, 2)

    return run if layout != CANONICAL else run_transposed


def _neutral(value: object) -> bool:
    return value is None or (not isinstance(value, torch.Tensor) and value in (False, 0.0))
