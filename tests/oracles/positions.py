"""What surrounds a rotation: norms of heads before it, a cache behind it, a joined product apart; and linear biases."""

from __future__ import annotations

import numpy as np

from oracles.kv import append_quantized as quantized
from oracles.norm import rms
from oracles.rope import turned


def _rows(c, seq):
    places = np.arange(seq) if c.get("positions") is None else c["positions"]
    return c["cos"][places], c["sin"][places]


def _normed(x, weight, c):
    return rms(x, weight + bool(c.get("plus_one")), c.get("eps", 1e-6))


def _qk_norm_rope(c):
    tables = _rows(c, c["query"].shape[-3])
    pairs = (("query", "q_weight"), ("key", "k_weight"))
    return tuple(turned(_normed(c[name], c[of], c), *tables, c.get("interleaved", False)) for name, of in pairs)


def _split(c):
    qkv, heads, kv_heads = c["qkv"], c["heads"], c["kv_heads"]
    parts = heads + 2 * kv_heads
    apart = qkv.reshape(*qkv.shape[:-1], parts, qkv.shape[-1] // parts)
    query, key, value = np.split(apart, [heads, heads + kv_heads], -2)
    if c.get("q_weight") is not None:
        query, key = _normed(query, c["q_weight"], c), _normed(key, c["k_weight"], c)
    tables = _rows(c, qkv.shape[-2])
    return (*(turned(each, *tables, c.get("interleaved", False)) for each in (query, key)), value)


def _append(c):
    tables = _rows(c, 0)
    query, key = (turned(c[name], *tables, c.get("interleaved", False)) for name in ("query", "key"))
    batch, seq = key.shape[:2]
    places = np.broadcast_to(c["positions"], (batch, seq))
    for b in range(batch):
        for token in range(seq):
            c["key_cache"][b, places[b, token]] = key[b, token]
            c["value_cache"][b, places[b, token]] = c["value"][b, token]
    return query, c["key_cache"], c["value_cache"]


def _append_paged(c):
    tables = _rows(c, 0)
    query, key = (turned(c[name], *tables, c.get("interleaved", False)) for name in ("query", "key"))
    size = c["key_cache"].shape[1]
    for token, slot in enumerate(c["slot_mapping"]):
        if slot >= 0:
            c["key_cache"][slot // size, slot % size] = key[token]
            c["value_cache"][slot // size, slot % size] = c["value"][token]
    return query, c["key_cache"], c["value_cache"]


def _append_codes(c):
    tables = _rows(c, 0)
    query, key = (turned(c[name], *tables, c.get("interleaved", False)) for name in ("query", "key"))
    return (query, *quantized(c | {"key": key}))


def _split_append(c):
    parts = c["qkv"].shape[-1] // c["key_cache"].shape[-1]
    kv_heads = c["key_cache"].shape[-2]
    query, key, value = _split(c | {"heads": parts - 2 * kv_heads, "kv_heads": kv_heads})
    unturned = {"cos": np.ones_like(c["cos"]), "sin": np.zeros_like(c["sin"])}
    given = c | {"query": query, "key": key, "value": value} | unturned
    return _append_paged(given) if c.get("slot_mapping") is not None else _append(given)


def _alibi(c):
    out = np.zeros((len(c["slopes"]), c["q_len"], c["kv_len"]))
    for head, slope in enumerate(c["slopes"]):
        for row in range(c["q_len"]):
            for column in range(c["kv_len"]):
                ahead = row + c["kv_len"] - c["q_len"] - column
                out[head, row, column] = -np.inf if c.get("causal") and ahead < 0 else -slope * abs(ahead)
    return (out,)


ORACLES = {
    "posenc.qk_norm_rope": _qk_norm_rope,
    "posenc.split_qkv_norm_rope": _split,
    "kv.rope_append": _append,
    "kv.rope_append.paged": _append_paged,
    "kv.rope_append.quantized": _append_codes,
    "kv.split_qkv_norm_rope_append": _split_append,
    "kv.split_qkv_norm_rope_append.paged": _split_append,
    "posenc.alibi": _alibi,
}
