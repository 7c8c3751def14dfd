"""Rotation and append as a model with a static cache does them, with the arguments of ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerzero.ops.rope import stock as rope_stock


def rope_append(
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
    layout: str = "NHD",
) -> Callable[[], Tensor]:
    """The rotation of Transformers' models, then the new keys and values by index; a slot of -1 is looked for."""
    turn = rope_stock.rope(query, key, cos, sin, positions, interleaved=interleaved, layout="BSHD")
    caches = [each if layout == "NHD" else each.transpose(1, 2) for each in (key_cache, value_cache)]

    def run() -> Tensor:
        turned, new = turn()
        if slot_mapping is None:
            places = positions.long().expand(key.shape[:2])
            index = torch.arange(len(key), device=key.device).unsqueeze(1), places
            pair = new, value
        else:
            there = slot_mapping >= 0
            slots, page_size = slot_mapping[there], caches[0].shape[1]
            index, pair = (slots // page_size, slots % page_size), (new[there], value[there])
        for cache, tokens in zip(caches, pair, strict=True):
            cache[index] = tokens
        return turned

    return run
