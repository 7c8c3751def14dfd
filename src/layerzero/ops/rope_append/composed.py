"""A rotation with an append out of what a library has for each: copies, rotated where they lie, then written away."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerzero.ops.rope.composed import Rotate

Append = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Of key, value, both caches, and the slots of a paged cache or the positions of a contiguous one."""


def rotate_then_append(rotate: Rotate, append: Append) -> Callable[..., Tensor]:
    """What a kernel of kv.rope_append and kv.rope_append.paged calls."""
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
        *,
        interleaved: bool = False,
    ) -> Tensor:
        copies = query.clone(memory_format=dense), key.clone(memory_format=dense)
        query, key = rotate(*copies, cos, sin, positions, interleaved)
        append(key, value, key_cache, value_cache, positions if slot_mapping is None else slot_mapping)
        return query

    return run
