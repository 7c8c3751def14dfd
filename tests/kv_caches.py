"""Small caches of sequences in every form, what is written into them, and what attention gives without one."""

from __future__ import annotations

import torch

import layerzero as lz

FORMS = {
    "paged": {"pages": 12, "page_size": 16},
    "heads first": {"pages": 12, "page_size": 16, "layout": "HND"},
    "contiguous": {"max_sequences": 4, "max_length": 64, "strategy": "contiguous"},
    "virtual": {"max_sequences": 4, "max_length": 64, "strategy": "virtual"},
    "unified": {"max_sequences": 4, "max_length": 64, "strategy": "unified"},
}


def made(**form):
    return lz.KVCache(2, 2, 32, dtype=torch.float32, **(form or FORMS["paged"]))


def drawn(tokens):
    return torch.randn(tokens, 4, 32), torch.randn(tokens, 2, 32), torch.randn(tokens, 2, 32)


def appended(cache, names, counts, layer=0):
    """Write random tokens into one layer and attend; the new keys and values by name, and the output."""
    query, key, value = drawn(sum(counts))
    with cache.writing(names, counts) as step:
        lz.append_paged_kv_(key, value, cache.layer(layer), slot_mapping=step.slots)
        shaped = query.unsqueeze(1) if step.cu_seqlens_q is None else query
        output = lz.paged_attention(shaped, cache.layer(layer), step=step).reshape(query.shape)
    return dict(
        zip(names, zip(query.split(counts), key.split(counts), value.split(counts), strict=True), strict=True)
    ), output


def plain(query, keys, values):
    return lz.attention(query[None], keys[None], values[None], causal=True, layout="BSHD")[0]
