"""Latent attention over pages: a key is the latent vector and the rotated part, a value the latent vector."""

from __future__ import annotations

import numpy as np

from oracles.attention import told


def _decode(c):
    batch, queries, heads, width = c["q_nope"].shape
    size = c["ckv_cache"].shape[1]
    output, sums = np.zeros((batch, queries, heads, width)), np.full((batch, heads, queries), -np.inf)
    for b, i, h in np.ndindex(batch, queries, heads):
        seen = int(c["context_lens"][b]) - queries + 1 + i
        slots = [(int(c["block_tables"][b, token // size]), token % size) for token in range(seen)]
        if not slots:
            continue
        latent = np.array([c["ckv_cache"][slot] for slot in slots])
        rotated = np.array([c["kpe_cache"][slot] for slot in slots])
        scores = (latent @ c["q_nope"][b, i, h] + rotated @ c["q_pe"][b, i, h]) * c["scale"]
        most = scores.max()
        shares = np.exp(scores - most)
        sums[b, h, i] = most + np.log(shares.sum())
        output[b, i, h] = shares / shares.sum() @ latent
    return told(c, output, sums)


ORACLES = {"attention.mla.decode.paged": _decode}
