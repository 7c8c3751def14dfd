"""Collectives of one rank: what random calls draw."""

from __future__ import annotations

import numpy as np

from oracles.norm import rms


def _fused(c):
    total = c["residual"] + c["input"]
    return rms(total, c["weight"], c.get("eps", 1e-6)), total


ORACLES = {
    **dict.fromkeys(
        ("comm.all_reduce", "comm.all_gather", "comm.reduce_scatter", "comm.all_to_all"),
        lambda c: (np.copy(c["input"]),),
    ),
    "comm.all_reduce_add_rms_norm": _fused,
}
