"""Block-sparse attention: each query with the keys of the blocks that its row names."""

from __future__ import annotations

import numpy as np

from oracles.attention import told


def _blocks(c):
    tokens, heads, width = c["query"].shape
    group = heads // c["key"].shape[1]
    scale = width**-0.5 if c.get("scale") is None else c["scale"]
    output, sums = np.zeros((tokens, heads, c["value"].shape[-1])), np.full((heads, tokens), -np.inf)
    for token, head in np.ndindex(tokens, heads):
        row, size = token // c["block_rows"], c["block_cols"]
        named = c["block_indices"][c["block_indptr"][row] : c["block_indptr"][row + 1]]
        seen = [int(block) * size + place for block in named for place in range(size)]
        if not seen:
            continue
        scores = c["key"][seen, head // group] @ c["query"][token, head] * scale
        most = scores.max()
        shares = np.exp(scores - most)
        sums[head, token] = most + np.log(shares.sum())
        output[token, head] = shares / shares.sum() @ c["value"][seen, head // group]
    return told(c, output, sums)


def _variable(c):
    tokens, heads, width = c["query"].shape
    group = heads // c["key"].shape[1]
    scale = width**-0.5 if c.get("scale") is None else c["scale"]
    output, sums = np.zeros((tokens, heads, c["value"].shape[-1])), np.full((heads, tokens), -np.inf)
    for head in range(heads):
        of = head // group
        rows, columns = (np.repeat(np.arange(len(c[name][of])), c[name][of]) for name in ("row_sizes", "col_sizes"))
        for token in range(tokens):
            seen = c["seen_blocks"][of, rows[token], columns].astype(bool)
            if not seen.any():
                continue
            scores = c["key"][seen, of] @ c["query"][token, head] * scale
            most = scores.max()
            shares = np.exp(scores - most)
            sums[head, token] = most + np.log(shares.sum())
            output[token, head] = shares / shares.sum() @ c["value"][seen, of]
    return told(c, output, sums)


ORACLES = {"attention.sparse.block": _blocks, "attention.sparse.variable": _variable}
