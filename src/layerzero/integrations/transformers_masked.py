"""A few tokens behind others and a mask, on a CPU: torch's own function, where that is what would be chosen.

A plan of a masked call serves one length of keys, and each step has another. To choose took 440 us a layer where the
kernel takes 30 (4 tokens behind 64, float32, AMD EPYC, one thread, 2026-11-25). Here the kernel is asked for once for a
class of lengths.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import functional

import layerzero as lz
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS

KERNEL = "torch.sdpa.cpu_flash"
"""The kernel that the function below runs, too."""

MOST = 256
"""Classes of calls that are remembered."""

_chosen: tuple[object, dict[Hashable, str | None]] = (None, {})
"""The kernels of each class, and the epoch in which they were chosen."""


def by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor | None:
    """Attend (B, H, S_q, D) behind a mask; None where ``lz.attention`` should: whatever listens hears of it then."""
    queries, keys = query.shape[2], key.shape[2]
    if not query.is_cpu or keys <= queries or mask.ndim != 4 or mask.shape[1] != 1 or ENGINE.watchers:
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    global _chosen
    epoch = CALLS["attention"].dispatcher.cache.current
    if _chosen[0] is not epoch:
        _chosen = epoch, {}
    known = _chosen[1]
    of_call = query.shape, key.shape[:2], keys.bit_length(), mask.shape[:3], mask.dtype, query.dtype, scale
    about: Hashable = *of_call, value.shape[3], torch.get_num_threads(), current_policy()
    if about not in known:
        if len(known) >= MOST:
            known.clear()
        asked = lz.which("attention", query, key, value, False, scale, layout="BHSD", attn_mask=mask)
        found = asked["kernel_id"]
        known[about] = None if found is None else str(found)
    if known[about] != KERNEL:
        return None
    heads, kv_heads = query.shape[1], key.shape[1]
    if queries == 1 and heads != kv_heads:  # heads of a group as so many queries of one head: keys are read once
        grouped = query.reshape(query.shape[0], kv_heads, heads // kv_heads, query.shape[3])
        attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
        return attended.reshape(query.shape[0], heads, 1, value.shape[3])
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads
    )
