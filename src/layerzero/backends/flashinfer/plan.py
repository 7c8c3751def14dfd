"""FlashInfer's plans for batches: which tile works where, made once for a shape and kept.

Read: BatchPrefillWithRaggedKVCacheWrapper.plan of flashinfer-python 0.7.2.post1, and the planners in
include/flashinfer/attention/scheduler.cuh (2026-11-21). The wrapper would hold 8 MiB for each plan; what a plan takes
is asked of the library, or bounded by what its planner writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.backends.flashinfer.modules import Variant, compiled_for, planned
from layerzero.backends.prepared import Prepared
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.limit import Limit


class Plan(NamedTuple):
    """A planned module and the constants of its shape."""

    module: Any
    info: Any
    integers: Tensor
    queries: Tensor
    keys: Tensor
    masks: Tensor
    scratch_bytes: int


def _plan(
    backend: str, arguments: tuple[Any, ...], index: int, sizes: tuple[int, int, int, int, int], causal: bool, left: int
) -> Plan:
    """Plan for equal lengths; waits for the device, since the plan is copied there from memory that is then freed."""
    from flashinfer.prefill import get_batch_prefill_module

    *dtypes, head_dim, value_dim, positions, windowed, capped = arguments
    module = get_batch_prefill_module(
        backend, *dtypes, torch.int32, head_dim, value_dim, positions, windowed, capped, False
    )
    batch, seq_q, seq_k, heads, kv_heads = sizes
    queries, keys = (torch.arange(batch + 1, dtype=torch.int32) * length for length in (seq_q, seq_k))
    lengths = torch.full((batch,), seq_k, dtype=torch.int32)
    shape = (batch * seq_q, batch, heads, kv_heads, 1, False, head_dim, value_dim, causal, left)
    splitting = (-1, False, 0, 0) if backend == "fa2" else ()  # no fixed size, allowed, no blocks beside, not uniform
    with torch.cuda.device(index):
        device = torch.device("cuda", index)
        if backend == "fa2":
            anywhere = torch.empty(1, dtype=torch.uint8, device=device)
            needed = module.workspace_size(anywhere, queries, keys, lengths, *shape, *splitting)
            scratch_bytes, integer_bytes = (int(count) for count in needed)
        else:  # seven numbers for each tile of at least 128 queries, one for each multiprocessor, each list aligned
            scratch_bytes, integer_bytes = 1, 28 * batch * -(-seq_q // 128) * heads + 8192
        scratch = torch.empty(max(scratch_bytes, 1), dtype=torch.uint8, device=device)
        integers = torch.empty(integer_bytes, dtype=torch.uint8, device=device)
        staging = torch.empty(integer_bytes, dtype=torch.uint8, pin_memory=True)
        info = module.plan(scratch, integers, staging, queries, keys, lengths, *shape, *splitting)
        masks = torch.arange(batch + 1, dtype=torch.int32) * -(-seq_q * seq_k // 8)
        constants = queries.to(device), keys.to(device), masks.to(device)
        plan = Plan(module, info, integers, *constants, max(scratch_bytes, 1))
        torch.cuda.current_stream().synchronize()
    return plan


PLANS = Prepared(_plan, 512)


def plan_key(backend: str) -> Callable[[Facts], tuple[Any, ...]]:
    """What the plan of a call depends on, as the arguments that make it."""

    def key(facts: Facts) -> tuple[Any, ...]:
        sizes = tuple(facts.size(name) for name in ("batch", "seq_q", "seq_k", "heads", "kv_heads"))
        variant = Variant.of(facts)
        return backend, compiled_for(facts), facts.device.index, sizes, variant.causal, variant.left

    return key


def plan_before_capture(backend: str) -> Limit:
    """Legal under capture only where the plan is there; a single sequence needs none."""
    made = PLANS.before_capture("its plan", plan_key(backend))
    return limit.Custom(made.text, lambda facts: made.check_facts(facts) if planned(backend, facts) else None)
