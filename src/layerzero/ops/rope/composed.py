"""Norm and rotation out of what a library has for each: two norms into new memory, rotated where they lie."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerzero.ops.rope.split import parts

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""Of contiguous heads (..., H, D) with a weight (D,) and eps, into new contiguous memory."""

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor]]
"""Of query, key, cos, sin, positions, interleaved; it may write over query and key and return them."""

ACCEPTS = ("positions", "interleaved", "eps")
"""What such a kernel honours; libraries that add one to the weight say so themselves."""


SPLIT_ACCEPTS = ("heads", "kv_heads", "positions", "q_weight", "k_weight", "interleaved", "eps")
"""The same of one that takes a joined product apart first."""


def norm_then_rope(norm: Norm, rotate: Rotate) -> Callable[..., tuple[Tensor, Tensor]]:
    """What a kernel of posenc.qk_norm_rope calls."""

    def run(
        query: Tensor,
        key: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        positions: Tensor | None = None,
        interleaved: bool = False,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        return rotate(norm(query, q_weight, eps), norm(key, k_weight, eps), cos, sin, positions, interleaved)

    return run


def split_then_norm_rope(norm: Norm, rotate: Rotate) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """What a kernel of posenc.split_qkv_norm_rope calls whose library wants each part in memory of its own."""
    dense = torch.contiguous_format

    def run(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        heads: int,
        kv_heads: int,
        positions: Tensor | None = None,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        interleaved: bool = False,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (each.clone(memory_format=dense) for each in parts(qkv, heads, kv_heads))
        if q_weight is not None and k_weight is not None:
            query, key = norm(query, q_weight, eps), norm(key, k_weight, eps)
        return *rotate(query, key, cos, sin, positions, interleaved), value

    return run
