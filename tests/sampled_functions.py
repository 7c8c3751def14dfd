"""The functions that sample, and what tests of several files give them."""

from __future__ import annotations

KINDS = {
    "sample": {},
    "sample_topk": {"top_k": 3},
    "sample_topp": {"top_p": 0.6},
    "sample_minp": {"min_p": 0.2},
    "sample_topk_topp": {"top_k": 4, "top_p": 0.7},
}
