"""A rotation with an append out of what a library has for each: copies, rotated where they lie, then written away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.rope.composed import Rotate

Append = Callable[..., None]
"""Of key, value, both caches, the slots of a paged cache or the positions of a contiguous one, and any scales."""


def rotate_then_append(rotate: Rotate, append: Append) -> Callable[..., Tensor]:
    """What a kernel of kv.rope_append, kv.rope_append.paged and kv.rope_append.quantized calls."""
    dense = torch.contiguous_format

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        positions: Tensor,
        slot_mapping: Tensor | None = None,
        *scales: Tensor,
        interleaved: bool = False,
    ) -> Tensor:
        copies = query.clone(memory_format=dense), key.clone(memory_format=dense)
        query, key = rotate(*copies, cos, sin, positions, interleaved)
        append(key, value, key_cache, value_cache, positions if slot_mapping is None else slot_mapping, *scales)
        return query

    return run


Split = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""A kernel of posenc.split_qkv_norm_rope: of qkv, cos, sin, and by name heads, kv_heads, positions and its norm."""


def split_then_append(split: Split, append: Append, heads: int, kv_heads: int) -> Callable[..., Tensor]:
    """What a kernel of kv.split_qkv_norm_rope_append and the same of a paged cache calls."""

    def run(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        positions: Tensor,
        slot_mapping: Tensor | None = None,
        **norm: Any,
    ) -> Tensor:
        query, key, value = split(qkv, cos, sin, heads=heads, kv_heads=kv_heads, positions=positions, **norm)
        append(key, value, key_cache, value_cache, positions if slot_mapping is None else slot_mapping)
        return query

    return run
