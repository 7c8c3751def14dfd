"""FlashInfer's plans for batches: which tile works where, made once for a shape and kept.

Read: BatchPrefillWithRaggedKVCacheWrapper.plan of flashinfer-python 0.7.2.post1 and 0.7.4, and the planners in
include/flashinfer/attention/scheduler.cuh (2026-12-01). The wrapper would hold 8 MiB for each plan; the library says
what a plan takes, or what its planner writes bounds it.

Memory of the host in which FlashInfer writes a plan, kept from being written again before the device has read it.

A wrapper writes every plan into the same pinned buffer and has it copied without waiting (``cudaMemcpyAsync`` at the
end of ``PrefillPlan``, ``PrefillSM90Plan`` and ``MLAPlan`` in include/flashinfer/attention/scheduler.cuh, 0.7.2). Where
lengths and starts are on the host nothing else waits, so a host that is two steps ahead overwrites what the device has
yet to copy. A wrapper that goes gives its buffer to the next one at once: torch does not know of that copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.backends.flashinfer.modules import Variant, compiled_for, planned, version
from layerzero.backends.shape_cache import Prepared
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import within
from layerzero.core.limit_kinds import Limit
from layerzero.core.system import forking


class FlashInferPlan(NamedTuple):
    """A planned module and the constants of its shape."""

    module: Any
    info: Any
    integers: Tensor
    queries: Tensor
    keys: Tensor
    masks: Tensor
    scratch_bytes: int


def _splitting(backend: str) -> tuple[int, ...]:
    """What follows the shape: no fixed size of parts, parts allowed, no further blocks, lengths not uniform.

    From 0.7.4 on it is also given whether uniform lengths stay so in every replay.
    """
    if backend != "fa2":
        return ()
    return (-1, False, 0, 0, False) if within(version() or "0", ">=0.7.4") else (-1, False, 0, 0)


def _plan(
    backend: str, arguments: tuple[Any, ...], index: int, sizes: tuple[int, int, int, int, int], causal: bool, left: int
) -> FlashInferPlan:
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
    splitting = _splitting(backend)
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
        plan = FlashInferPlan(module, info, integers, *constants, max(scratch_bytes, 1))
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


_UNREAD: dict[int, tuple[torch.cuda.Event, list[torch.Tensor]]] = {}
"""Pinned buffers that a device may still copy from, by an event behind the copy."""

_LOCK = forking.lock()


class Staging:
    """Plans of one wrapper, each once the device has read the one before."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper, self._device = wrapper, device
        self._read: torch.cuda.Event | None = None

    def plan(self, *given: Any, **told: Any) -> None:
        """Have the wrapper plan; waits where the device has not come to the copy of its plan before."""
        if self._device.type != "cuda":
            self._wrapper.plan(*given, **told)
            return
        if self._read is None:
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            self._read.synchronize()
        try:
            self._wrapper.plan(*given, **told)
        finally:
            self._read.record(torch.cuda.current_stream(self._device))
            _keep(self._read, _pinned(self._wrapper))


def _pinned(wrapper: Any) -> list[torch.Tensor]:
    """The pinned buffers of a wrapper, whatever it calls them: that of pod.py has two."""
    return [each for each in vars(wrapper).values() if isinstance(each, torch.Tensor) and each.is_pinned()]


def _keep(read: torch.cuda.Event, buffers: list[torch.Tensor]) -> None:
    """Keep buffers until the device has read them, and let go of those that it has read."""
    with _LOCK:
        done = [name for name, (event, _) in _UNREAD.items() if event is not read and event.query()]  # type: ignore[no-untyped-call]
        for name in done:
            del _UNREAD[name]
        _UNREAD[id(read)] = read, buffers
