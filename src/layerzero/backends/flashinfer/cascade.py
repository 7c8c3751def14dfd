"""FlashInfer behind a shared prefix: a plan for the prefix, one for the rest, and its merge of both in place.

The same that its MultiLevelCascadeAttentionWrapper does, which returns no log-sum-exp. Both plans live on a step. Its
merge takes log-sum-exps in base 2 as (tokens, heads), and says NaN where neither part saw a key: there they are finite.
Read: cascade.py of flashinfer-python 0.7.2.post1. Library: flashinfer-python 0.7.2, Apache-2.0; arXiv:2501.01005.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import FLASHINFER
from layerzero.backends.flashinfer.modules import batches_key, batches_prebuilt, is_built
from layerzero.backends.flashinfer.paged import WORKSPACE_BYTES
from layerzero.backends.flashinfer.varlen import OF_PAGES, STEPPED, PlannedPages, arguments_of
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.cascade.declare import CASCADE
from layerzero.ops.cascade.merge import MERGE_STATES
from layerzero.ops.paged.step import StepMetadata

_LN_2, _LOG2_E = math.log(2.0), math.log2(math.e)
_NOTHING = -1e30
"""What stands for -inf in its merge: beside it any other part has all the weight, and two of them make it again."""


class _Cascade:
    """Two plans of one step: all queries to the prefix as one sequence, each to what follows."""

    def __init__(self, step: StepMetadata, arguments: dict[str, Any], page_size: int, shared_blocks: int) -> None:
        self._shared, tables = shared_blocks * page_size, step.block_tables
        batch, device = len(tables), tables.device
        self._lens = step.context_lens - self._shared
        alone = torch.full((1,), self._shared, dtype=torch.int32)
        together = torch.tensor([0, batch], dtype=torch.int32)
        apart = torch.arange(batch + 1, dtype=torch.int32)
        prefix = StepMetadata(
            tables[:1, :shared_blocks],
            alone.to(device),
            cu_seqlens_q=together.to(device),
            host=(alone, together),
            capturable=step.capturable,
        )
        self._rest = StepMetadata(
            tables[:, shared_blocks:],
            self._lens,
            cu_seqlens_q=apart.to(device),
            host=(self._lens_on_host(step), apart),
            capturable=step.capturable,
        )
        self._apart, self._prefix = apart, prefix
        self.prefix = PlannedPages(prefix, arguments, page_size, "fa2")
        self.rest = PlannedPages(self._rest, arguments, page_size, "fa2")

    def _lens_on_host(self, step: StepMetadata) -> Tensor:
        return step.host[0] - self._shared

    def update(self, step: StepMetadata) -> None:
        self._lens.copy_(step.context_lens - self._shared)
        self._prefix.advance(host=self._prefix.host)
        self._rest.advance(host=(self._lens_on_host(step), self._apart))
        self.prefix.update(self._prefix)
        self.rest.update(self._rest)


def _load_cascade(facts: Facts) -> Callable[..., Any]:
    from flashinfer import merge_state_in_place

    arguments, page_size = arguments_of(facts) | {"causal": False}, facts.size("page_size")
    owner = ("flashinfer.cascade", page_size, *arguments.values())

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        shared_blocks: int,
        return_lse: bool = False,
        step: StepMetadata,
        **_: Any,
    ) -> Any:
        both = step.slot((owner, shared_blocks), lambda each: _Cascade(each, arguments, page_size, shared_blocks))
        tokens, caches = query.squeeze(1), (key_cache, value_cache)
        output, lse = both.prefix.run(tokens, caches, return_lse=True)
        if shared_blocks < block_tables.shape[1]:
            merge_state_in_place(output, lse, *both.rest.run(tokens, caches, return_lse=True))
        return (output.unsqueeze(1), (lse * _LN_2).unsqueeze(-1)) if return_lse else output.unsqueeze(1)

    return run


def _load_merge(facts: Facts) -> Callable[..., Any]:
    from flashinfer import merge_state

    def run(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        sums = [(lse.t() * _LOG2_E).clamp(min=_NOTHING).contiguous() for lse in (lse_a, lse_b)]
        output, lse = merge_state(output_a, sums[0], output_b, sums[1])
        return output, torch.where(lse <= 0.5 * _NOTHING, -torch.inf, lse * _LN_2).t().contiguous()

    return run


def _merged_heads(facts: Facts) -> Reason | None:
    """As many heads as a block of its merge has room for: 1024 threads, one for 8 numbers of a head."""
    most = 8 * 1024 // facts.size("value_dim")
    if facts.size("heads") <= most:
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "heads", f"at most {most} beside this value_dim", facts.size("heads"))


def _merge_built(facts: Facts) -> bool:
    return is_built("cascade", facts)


_MERGED_HEADS = limit.Custom("heads * value_dim <= 8192", _merged_heads)  # "invalid argument" beyond (H200, 2026-11-22)

KERNELS = (
    Kernel(
        id="flashinfer.cascade",
        operations=(CASCADE.name,),
        backend=FLASHINFER,
        load=_load_cascade,
        layout="NHD",
        accepts=("scale", "softcap", "return_lse", "step", "shared_blocks"),
        limits=(limit.platform("cuda"), limit.arch(min=(8, 0)), *OF_PAGES, *STEPPED, _MERGED_HEADS),
        build_key=lambda facts: ("cascade", batches_key("fa2")(facts)),
        prebuilt=lambda facts: batches_prebuilt("fa2")(facts) and _merge_built(facts),
        workspace_bytes=lambda _: WORKSPACE_BYTES,
        priority=58,  # 636 us against 454 of a flat decode, 64 sequences behind 8192 tokens, eager (H200, 2026-11-22)
    ),
    Kernel(
        id="flashinfer.merge_states",
        operations=(MERGE_STATES.name,),
        backend=FLASHINFER,
        load=_load_merge,
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float16", "bfloat16"),
            limit.dim("value_dim", one_of=(64, 128, 256)),
            _MERGED_HEADS,
            limit.contiguous("output_a", "output_b"),
            limit.aligned(16, "output_a", "output_b"),
        ),
        deterministic=True,
        build_key=lambda facts: ("merge", facts.device.sm),
        prebuilt=_merge_built,
        priority=60,
    ),
)
