"""What a rotation with an append is, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops.paged.declare import append_paged_kv_reference
from layerzero.ops.rope.reference import rope_reference


def rope_append_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotate queries and keys; write each token's key and value into its sequence's cache, at its position.

    Shapes: query (B, S, H, D), key (B, S, K, D), value (B, S, K, D_v), cos and sin (P, R/2), key_cache (B, L, K, D),
    value_cache (B, L, K, D_v), positions (B, S), (1, S) or (S,) → (B, S, H, D). Mutates both caches.
    Dtype, units and source: as of ``posenc.rope``.
    """
    turned, key = rope_reference(query, key, cos, sin, positions=positions, interleaved=interleaved)
    write_rows(key, value, key_cache, value_cache, positions)
    return turned


def write_rows(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, positions: Tensor) -> None:
    """Write tokens (B, S, K, D) into the rows of caches (B, L, K, D) that their positions name."""
    batch, seq = key.shape[:2]
    places = positions.long().expand(batch, seq)
    sequences = torch.arange(batch, device=key.device).unsqueeze(1)
    key_cache[sequences, places] = key
    value_cache[sequences, places] = value


def rope_append_paged_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotate queries and keys; write each token's key and value into its slot, -1 into none.

    Shapes: query (T, H, D), key (T, K, D), value (T, K, D_v), cos and sin (P, R/2), caches as of ``kv.append.paged``,
    positions and slot_mapping (T,) → (T, H, D). Mutates both caches.
    Dtype, units and source: as of ``posenc.rope`` and ``kv.append.paged``.
    """
    turned, key = rope_reference(query, key, cos, sin, positions=positions, interleaved=interleaved)
    append_paged_kv_reference(key, value, key_cache, value_cache, slot_mapping)
    return turned


def fake(query: Tensor, *_: object, **__: object) -> Tensor:
    """The rotated query; the caches are written into."""
    return query.new_empty(query.shape)
