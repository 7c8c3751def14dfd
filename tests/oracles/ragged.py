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
            own = attend(alone(c, sequence, first, last), 0, head, keys, values, len(keys))
            output[first:last, head], sums[head, first:last] = own
    return told(c, output, sums)


def _ragged(c):
    group = c["query"].shape[1] // c["key"].shape[1]
    ends = c["cu_seqlens_k"].tolist()

    def keys_of(sequence, head):
        rows = slice(ends[sequence], ends[sequence + 1])
        return c["key"][rows, head // group], c["value"][rows, head // group]

    return each_alone(c, c["cu_seqlens_q"], c["value"].shape[-1], keys_of)


ORACLES = dict.fromkeys((f"attention.{kind}.prefill.ragged" for kind in ("standard", "gqa")), _ragged)
