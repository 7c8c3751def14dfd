"""Attention in parts: what one softmax over all keys gives, whoever shares them."""

from __future__ import annotations

import numpy as np

from oracles.paged import decode


def _merge(c):
    parts = [(c[f"output_{part}"], c[f"lse_{part}"]) for part in "ab"]
    output, lse = np.zeros(c["output_a"].shape), np.full(c["lse_a"].shape, -np.inf)
    for head, token in np.ndindex(lse.shape):
        seen = [(each[token, head], sums[head, token]) for each, sums in parts if sums[head, token] != -np.inf]
        if not seen:
            continue
        most = max(total for _, total in seen)
        shares = np.array([np.exp(total - most) for _, total in seen])
        lse[head, token] = most + np.log(shares.sum())
        output[token, head] = shares / shares.sum() @ np.array([each for each, _ in seen])
    return output, lse


ORACLES = {"attention.merge_states": _merge, "attention.cascade.decode.paged": decode}
