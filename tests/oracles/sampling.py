"""Draws, as the probabilities of each row and what may come; what is done to logits before and asked after."""

from __future__ import annotations

import numpy as np

NEAR = 1e-5
"""How near a bound float32 decides."""


def softmax(row, temperature=1.0):
    row = row / temperature
    weights = np.exp(row - row.max()) if len(row) else row
    return weights / weights.sum()


def of_row(c, name, row, default=None):
    if c.get(f"{name}_by_row") is not None:
        return c[f"{name}_by_row"].reshape(-1)[row]
    return default if c.get(name) is None else c[name]


def by_k(weights, k, near=0.0):
    """Fewer than k are likelier."""
    last = np.sort(weights)[::-1][min(max(int(k), 1), len(weights)) - 1]
    return weights >= last * (1 - near)


def by_p(weights, p, slack=0.0, near=0.0):
    """What is likelier has less than p of the row; the likeliest always stays."""
    order = np.sort(weights)[::-1]
    before = np.concatenate(([0.0], np.cumsum(order)[:-1]))
    kept = before < (p + slack) * weights.sum()
    return weights >= order[max(int(kept.sum()), 1) - 1] * (1 - near)


def by_share(weights, p, slack=0.0):
    return weights >= min(weights.max() * p * (1 + slack), weights.max())


def sets(kind, weights, k, p):
    """What is surely kept, and what may be."""
    if kind == "topk":
        return by_k(weights, k), by_k(weights, k, NEAR)
    if kind == "topp":
        return by_p(weights, p, -NEAR), by_p(weights, p, NEAR, NEAR)
    if kind == "minp":
        return by_share(weights, p, NEAR), by_share(weights, p, -NEAR)
    if kind == "topk_topp":
        first, widest = by_k(weights, k), by_k(weights, k, NEAR)
        if (first != widest).any():
            return first, widest
        left = weights * first
        return first & by_p(left, p, -NEAR), first & by_p(left, p, NEAR, NEAR)
    return np.ones(len(weights), bool), np.ones(len(weights), bool)


def all_three(weights, k, p, share):
    """Top-k, then top-p of what it leaves, then min-p; what is None keeps all."""
    kind = {(1, 1): "topk_topp", (1, 0): "topk", (0, 1): "topp", (0, 0): ""}[k is not None, p is not None]
    sure, may = sets(kind, weights, k, p)
    if share is not None:
        sure, may = sure & by_share(weights, share, NEAR), may & by_share(weights, share, -NEAR)
    return sure, may


def _drawn(kind, source):
    def oracle(c):
        shape = c[source].shape
        found, may = [], []
        for row, values in enumerate(c[source].reshape(-1, shape[-1])):
            warm = min(max(of_row(c, "temperature", row, 1.0), 1e-6), 1e6)
            weights = softmax(values, warm) if source == "logits" else values
            count, share, least = (of_row(c, name, row) for name in ("top_k", "top_p", "min_p"))
            if kind == "filtered":
                sure, possible = all_three(weights, count, share, least)
            else:
                sure, possible = sets(kind, weights, count, least if kind == "minp" else share)
            kept = weights * sure
            found.append(kept / kept.sum())
            may.append(possible & (weights > 0))
        return ((np.array(found).reshape(shape), np.array(may, bool).reshape(shape)),)

    return oracle


def _penalties(c):
    logits = c["logits"]
    vocab = logits.shape[-1]
    out = logits.reshape(-1, vocab).copy()
    for row, values in enumerate(out):
        if "output_ids" in c:
            said = [int(each) for each in c["output_ids"].reshape(len(out), -1)[row] if each >= 0]
            counts = np.bincount(said, minlength=vocab) if said else np.zeros(vocab, int)
            asked = np.zeros(vocab, bool)
            if c.get("prompt_ids") is not None:
                asked[[int(each) for each in c["prompt_ids"].reshape(len(out), -1)[row] if each >= 0]] = True
        else:
            counts = c["output_counts"].reshape(-1, vocab)[row]
            mask = c.get("prompt_mask")
            asked = np.zeros(vocab, bool) if mask is None else mask.reshape(-1, vocab)[row]
        repetition = of_row(c, "repetition", row, 1.0)
        for place in range(vocab):
            if counts[place] or asked[place]:
                values[place] = values[place] / repetition if values[place] > 0 else values[place] * repetition
            values[place] -= of_row(c, "frequency", row, 0.0) * counts[place]
            values[place] -= of_row(c, "presence", row, 0.0) * bool(counts[place])
    return (out.reshape(logits.shape),)


def _bias(c):
    logits = c["logits"]
    out = logits.reshape(-1, logits.shape[-1]).copy()
    for row, values in enumerate(out):
        ids, bias = (c[name].reshape(len(out), -1)[row] for name in ("bias_ids", "bias"))
        for place, more in zip(ids, bias, strict=True):
            if place >= 0:
                values[place] += more
    return (out.reshape(logits.shape),)


def _logprobs(c):
    logits = c["logits"]
    found = []
    for row, values in enumerate(logits.reshape(-1, logits.shape[-1])):
        warm = values / min(max(of_row(c, "temperature", row, 1.0), 1e-6), 1e6)
        most = warm.max()
        found.append(warm[c["ids"].reshape(-1)[row]] - most - np.log(np.exp(warm - most).sum()))
    return (np.array(found).reshape(logits.shape[:-1]),)


def _bitmask(c):
    logits = c["logits"]
    out = logits.reshape(-1, logits.shape[-1]).copy()
    for values, words in zip(out, c["bitmask"].reshape(len(out), -1), strict=True):
        for place in range(len(values)):
            if not int(words[place // 32]) >> place % 32 & 1:
                values[place] = -np.inf
    return (out.reshape(logits.shape),)


KINDS = ("categorical", "topk", "topp", "minp", "topk_topp", "filtered")
ORACLES = {
    **{f"sampling.{kind}": _drawn(kind, "logits") for kind in KINDS},
    **{f"sampling.{kind}.probs": _drawn(kind, "probs") for kind in KINDS},
    "sampling.greedy": lambda c: (c["logits"].argmax(-1),),
    "sampling.penalties": _penalties,
    "sampling.penalties.counted": _penalties,
    "sampling.bias": _bias,
    "sampling.bitmask": _bitmask,
    "sampling.logprobs": _logprobs,
}
