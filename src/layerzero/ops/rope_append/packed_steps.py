"""A rotation with an append as separate calls: torch's, as models with a static cache make them, and libraries' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.rope import stock as rope_stock
from layerzero.ops.rope.split import Rotate


def rope_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor | None = None,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    layout: str = "NHD",
    **table: Any,
) -> Callable[[], Tensor] | None:
    """The rotation of Transformers' models, then the new keys and values by index; a slot of -1 is looked for.

    None of a quantized cache: torch has no append into one.
    """
    if key_scale is not None or value_scale is not None:
        return None
    turn = rope_stock.rope(query, key, positions=positions, layout="BSHD", **table)
    caches = [each if layout == "NHD" else each.transpose(1, 2) for each in (key_cache, value_cache)]

    def run() -> Tensor:
        turned, new = turn()
        _write(new, value, caches, positions, slot_mapping)
        return turned

    return run


def split_qkv_norm_rope_append(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor | None = None,
    *,
    layout: str = "NHD",
    **more: Any,
) -> Callable[[], Tensor]:
    """Views of the product, norms and rotation of Transformers' models, then the new keys and values by index."""
    caches = [each if layout == "NHD" else each.transpose(1, 2) for each in (key_cache, value_cache)]
    kv_heads, head_dim = caches[0].shape[-2:]
    heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    turn = rope_stock.split_qkv_norm_rope(qkv, heads, kv_heads, positions=positions, **more)

    def run() -> Tensor:
        query, key, value = turn()
        _write(key, value, caches, positions, slot_mapping)
        return query

    return run


def _write(
    key: Tensor, value: Tensor, caches: Sequence[Tensor], positions: Tensor, slot_mapping: Tensor | None
) -> None:
    """Tokens into the rows of sequences, or into slots; a slot of -1 is looked for."""
    if slot_mapping is None:
        places = positions.long().expand(key.shape[:2])
        index = torch.arange(len(key), device=key.device).unsqueeze(1), places
    else:
        there = slot_mapping >= 0
        slots, page_size = slot_mapping[there], caches[0].shape[1]
        index, key, value = (slots // page_size, slots % page_size), key[there], value[there]
    for cache, tokens in zip(caches, (key, value), strict=True):
        cache[index] = tokens


Append = Callable[..., None]
"""Of key, value, both caches, the slots of a paged cache or the positions of a contiguous one, and any scales."""


def rotate_then_append(rotate: Rotate, append: Append, *, in_place: bool = True) -> Callable[..., Tensor]:
    """What a kernel of kv.rope_append, kv.rope_append.paged and kv.rope_append.quantized calls.

    ``in_place``: whether ``rotate`` writes into queries and keys, which get copies then.
    """
    dense = torch.contiguous_format

    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor, interleaved: bool = False) -> Tensor:
        cos, sin, key_cache, value_cache, positions, *slots_and_scales = rest
        if in_place:
            query, key = query.clone(memory_format=dense), key.clone(memory_format=dense)
        query, key = rotate(query, key, cos, sin, positions, interleaved)
        append(key, value, key_cache, value_cache, *(slots_and_scales or (positions,)))
        return query

    return run


Split = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""A kernel of posenc.split_qkv_norm_rope: of qkv, cos, sin, and by name heads, kv_heads, positions and its norm."""


def split_then_append(split: Split, append: Append, heads: int, kv_heads: int) -> Callable[..., Tensor]:
    """What a kernel of kv.split_qkv_norm_rope_append and the same of a paged cache calls."""

    def run(qkv: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor, **norm: Any) -> Tensor:
        key_cache, value_cache, positions, *slots = rest
        query, key, value = split(qkv, cos, sin, heads=heads, kv_heads=kv_heads, positions=positions, **norm)
        append(key, value, key_cache, value_cache, *(slots or (positions,)))
        return query

    return run
