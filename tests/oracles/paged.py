"""A paged cache: what lies on the pages of each sequence, one token after the other."""

from __future__ import annotations

import numpy as np

from oracles.attention import attend, shaped, told


def _paged(c):
    output, sums = shaped(c, c["value_cache"].shape[-1])
    batch, _, heads, _ = output.shape
    size, group = c["key_cache"].shape[1], heads // c["key_cache"].shape[2]
    for b in range(batch):
        length = int(c["context_lens"][b])
        slots = [(int(c["block_tables"][b, token // size]), token % size) for token in range(length)]
        for h in range(heads):
            pairs = []
            for name in ("key_cache", "value_cache"):
                found = [c[name][page, offset, h // group] for page, offset in slots]
                pairs.append(np.array(found).reshape(length, c[name].shape[-1]))
            output[b, :, h], sums[b, h] = attend(c, b, h, *pairs, length)
    return told(c, output, sums)


def _append(c):
    size = c["key_cache"].shape[1]
    for token, slot in enumerate(c["slot_mapping"]):
        if slot >= 0:
            for name in ("key", "value"):
                c[f"{name}_cache"][slot // size, slot % size] = c[name][token]
    return c["key_cache"], c["value_cache"]


ORACLES = {
    "attention.standard.decode.paged": _paged,
    "attention.gqa.decode.paged": _paged,
    "kv.append.paged": _append,
}
