"""Attention, a query at a time."""

from __future__ import annotations

import numpy as np


def one(query, keys, values, scale, softcap, bias, seen, sink):
    """One query (D,) over keys (S, D) that it sees: its output and log-sum-exp."""
    scores = keys @ query * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores + np.where(seen, bias, 0), -np.inf)
    if sink is not None:
        scores = np.append(scores, sink)
    if not len(scores) or (scores == -np.inf).all():
        return np.zeros(values.shape[1]), -np.inf
    most = scores.max()
    weights = np.exp(scores - most)
    total = weights.sum()
    return (weights / total)[: len(values)] @ values, most + np.log(total)


def attend(c, batch, head, keys, values, length):
    """Every query of a batch entry and a head, whose last stands at the last of ``length`` keys."""
    query = c["query"][batch, :, head]
    scale = query.shape[-1] ** -0.5 if c.get("scale") is None else c["scale"]
    left, right = c.get("window") or (-1, -1)
    columns = np.arange(len(keys))
    outputs, sums = [], []
    for row, each in enumerate(query):
        place = row + length - len(query)
        seen, bias = columns < length, np.zeros(len(keys))
        if c.get("causal"):
            seen = seen & (columns <= place)
        if left >= 0:
            seen = seen & (columns >= place - left)
        if right >= 0:
            seen = seen & (columns <= place + right)
        if c.get("alibi_slopes") is not None:
            slopes = c["alibi_slopes"]
            slope = slopes[head] if slopes.ndim == 1 else slopes[batch % len(slopes), head]
            bias = bias - slope * np.abs(place - columns)
        if c.get("attn_mask") is not None:
            mask = c["attn_mask"]
            mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
            mask = np.broadcast_to(mask, (c["query"].shape[0], c["query"].shape[2], len(query), len(keys)))
            mask = mask[batch, head, row]
            if mask.dtype == bool:
                seen = seen & mask
            else:
                bias = bias + mask
                seen = seen & ~(bias == -np.inf)
        sink = None if c.get("sinks") is None else c["sinks"][head]
        output, total = one(each, keys, values, scale, c.get("softcap"), bias, seen, sink)
        outputs.append(output)
        sums.append(total)
    return np.array(outputs).reshape(len(query), values.shape[1]), np.array(sums).reshape(len(query))


def shaped(c, dim):
    batch, seq, heads, _ = c["query"].shape
    return np.zeros((batch, seq, heads, dim)), np.zeros((batch, heads, seq))


def told(c, output, sums):
    return (output, sums) if c.get("return_lse") else (output,)


def _attention(c):
    output, sums = shaped(c, c["value"].shape[-1])
    batch, _, heads, _ = output.shape
    group = heads // c["key"].shape[2]
    for b in range(batch):
        length = c["key"].shape[1] if c.get("kv_lens") is None else int(c["kv_lens"][b])
        for h in range(heads):
            keys, values = (c[name][b, :, h // group].copy() for name in ("key", "value"))
            keys[length:], values[length:] = 0, 0  # nobody reads them: they may hold anything
            output[b, :, h], sums[b, h] = attend(c, b, h, keys, values, length)
    return told(c, output, sums)


ORACLES = dict.fromkeys(
    (f"attention.{kind}.{form}" for kind in ("standard", "gqa") for form in ("prefill", "decode")), _attention
)
