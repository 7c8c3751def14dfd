"""Tokens between caches: rows, slots and pages, one number after the other."""

from __future__ import annotations

import numpy as np


def _append(c):
    batch, seq = c["key"].shape[:2]
    places = np.broadcast_to(c["positions"], (batch, seq))
    for name in ("key", "value"):
        for row in range(batch):
            for token in range(seq):
                c[f"{name}_cache"][row, places[row, token]] = c[name][row, token]
    return c["key_cache"], c["value_cache"]


def _gather(c):
    size = c["key_cache"].shape[1]
    found = []
    for name in ("key_cache", "value_cache"):
        cache = c[name]
        rows = [
            cache[slot // size, slot % size] if slot >= 0 else np.zeros(cache.shape[2:]) for slot in c["slot_mapping"]
        ]
        found.append(np.array(rows).reshape(len(rows), *cache.shape[2:]))
    return tuple(found)


def _copy(c):
    for name in ("key_cache", "value_cache"):
        before = c[name].copy()
        for source, target in zip(c["from_pages"], c["to_pages"], strict=True):
            c[name][target] = before[source]
    return c["key_cache"], c["value_cache"]


def append_quantized(c):
    """The quotients themselves: what rounds them is judged by one step."""
    size, shape = c["key_cache"].shape[1], c["key_cache"].shape[:3]
    for name in ("key", "value"):
        scale, cache = np.broadcast_to(c[f"{name}_scale"], shape), c[f"{name}_cache"]
        whole = cache.dtype == np.int8
        for token, slot in enumerate(c["slot_mapping"]):
            if slot >= 0:
                quotient = c[name][token] / scale[slot // size, slot % size][:, None]
                cache[slot // size, slot % size] = np.clip(np.rint(quotient), -127, 127) if whole else quotient
    return c["key_cache"], c["value_cache"]


ORACLES = {
    "kv.append.quantized": append_quantized,
    "kv.append.batched": _append,
    "kv.append.contiguous": _append,
    "kv.gather.paged": _gather,
    "kv.copy_blocks": _copy,
}
