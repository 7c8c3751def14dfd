"""Products with stacks of weights: a loop over groups, and which rows are whose."""

from __future__ import annotations

import numpy as np


def _batched(c):
    out = np.einsum("gmk,gnk->gmn", c["input"], c["weight"])
    return (out if c.get("bias") is None else out + c["bias"][:, None],)


def _grouped(c):
    rows, bias = c["input"], c.get("bias")
    out = np.zeros((len(rows), c["weight"].shape[1]))
    start = 0
    for group, end in enumerate(int(each) for each in c["group_ends"]):
        for row in range(start, end):
            out[row] = c["weight"][group] @ rows[row] + (0 if bias is None else bias[group])
        start = end
    return (out,)


ORACLES = {"mlp.batched": _batched, "mlp.grouped": _grouped}
