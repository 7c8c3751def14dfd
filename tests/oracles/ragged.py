"""Sequences one after the other: each is attended alone, by itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from oracles.attention import attend, told


def alone(c, sequence, first, last):
    """The arguments of a call of one batch entry, which has the queries from ``first`` up to ``last``."""
    slopes = c.get("alibi_slopes")
    own = slopes if slopes is None or slopes.ndim == 1 else slopes[sequence]
    return {**c, "query": c["query"][None, first:last], "alibi_slopes": own}


def each_alone(c, starts, dim, keys_of):
    """All sequences; ``keys_of(sequence, head)`` gives the keys and the values that belong to one."""
    tokens, heads, _ = c["query"].shape
    output, sums = np.zeros((tokens, heads, dim)), np.zeros((heads, tokens))
    for sequence, (first, last) in enumerate(pairwise(starts.tolist())):
        for head in range(heads):
            keys, values = keys_of(sequence, head)
            call = alone(c, sequence, first, last)
            if c.get("tree_mask") is not None:
                call["attn_mask"] = _of_tree(c["tree_mask"], first, last, len(keys))
            own = attend(call, 0, head, keys, values, len(keys))
            output[first:last, head], sums[head, first:last] = own
    return told(c, output, sums)


def _of_tree(tree, first, last, length):
    """Which keys the queries of one sequence see, key by key."""
    count = last - first
    seen = np.ones((count, length), dtype=bool)
    for row in range(count):
        for key in range(max(length - count, 0), length):
            if count <= tree.shape[1]:
                seen[row, key] = tree[first + row, key - (length - count)]
    return seen


def _ragged(c):
    group = c["query"].shape[1] // c["key"].shape[1]
    ends = c["cu_seqlens_k"].tolist()

    def keys_of(sequence, head):
        rows = slice(ends[sequence], ends[sequence + 1])
        return c["key"][rows, head // group], c["value"][rows, head // group]

    return each_alone(c, c["cu_seqlens_q"], c["value"].shape[-1], keys_of)


ORACLES = dict.fromkeys((f"attention.{kind}.prefill.ragged" for kind in ("standard", "gqa")), _ragged)
