"""FlashInfer's prefill over sequences of unlike lengths: one after the other, or over pages; FlashAttention 2 and 3.

Both plan on the host, from starts and lengths there. A step copies those once for all layers, or has them from its
caller; without a step each call copies and plans. A capturable step plans into fixed buffers, so that a captured graph
replays after ``advance``. A mixed batch may be planned as it is, or as a decode of the first sequences and a prefill of
the rest. Log-sum-exps come in base 2 as (tokens, heads).
Read: BatchPrefillWithRaggedKVCacheWrapper and BatchPrefillWithPagedKVCacheWrapper of flashinfer-python 0.7.2.post1.
Library: flashinfer-python 0.7.2, Apache-2.0; arXiv:2501.01005.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import TEMPLATE_DIMS, kernel
from layerzero.backends.flashinfer.modules import Variant, batches_key, batches_prebuilt
from layerzero.backends.flashinfer.paged import (
    SAME_STRIDES,
    WORKSPACE_BYTES,
    Planned,
    buffers,
    plannable,
    planned_for,
    workspace,
)
from layerzero.backends.flashinfer.plan import Staging
from layerzero.core import limits as limit
from layerzero.core.errors import InvalidCallError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Limit
from layerzero.ops.attention.reference import lse_of_spoiled_rows
from layerzero.ops.paged import mixed
from layerzero.ops.paged.step import StepMetadata
from layerzero.ops.ragged import declare as ragged
from layerzero.ops.ragged.starts import RaggedMetadata

_LN_2 = math.log(2.0)


def arguments_of(facts: Facts) -> dict[str, Any]:
    """What a plan takes of a call, besides its lengths."""
    variant, dtype = Variant.of(facts), facts["dtype"]
    return {
        "num_qo_heads": facts.size("heads"),
        "num_kv_heads": facts.size("kv_heads"),
        "head_dim_qk": facts.size("head_dim"),
        "head_dim_vo": facts.size("value_dim"),
        "causal": variant.causal,
        "window_left": variant.left,
        "logits_soft_cap": variant.softcap,
        "sm_scale": variant.scale,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }


class _PlannedRagged:
    """One wrapper and its plan, for the starts that a step has now."""

    def __init__(self, step: RaggedMetadata, arguments: dict[str, Any], backend: str) -> None:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        device, count = step.cu_seqlens_q.device, len(step.cu_seqlens_q)
        fixed = buffers(step.capturable, device, qo_indptr_buf=count, kv_indptr_buf=count)
        self._arguments = arguments
        scratch = workspace(device, capturable=step.capturable)
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(scratch, "NHD", backend=backend, **fixed)
        self._staging, self.run = Staging(self._wrapper, device), self._wrapper.run
        self.update(step)

    def update(self, step: RaggedMetadata) -> None:
        self._staging.plan(*step.host, **self._arguments)


class PlannedPages:
    """One wrapper over pages and its plan, for the starts and lengths that a step has now."""

    def __init__(self, step: StepMetadata, arguments: dict[str, Any], page_size: int, backend: str) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        device, (batch, _) = step.block_tables.device, step.block_tables.shape
        fixed = buffers(
            step.capturable,
            device,
            qo_indptr_buf=batch + 1,
            paged_kv_indptr_buf=batch + 1,
            paged_kv_indices_buf=max(step.block_tables.numel(), 1),
            paged_kv_last_page_len_buf=batch,
        )
        self._arguments, self._page_size = arguments, page_size
        scratch = workspace(device, capturable=step.capturable)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend=backend, **fixed)
        self._staging, self.run = Staging(self._wrapper, device), self._wrapper.run
        self.update(step)

    def update(self, step: StepMetadata) -> None:
        starts, (indptr, indices, last) = step.host[1], pages_of(step, self._page_size)
        self._staging.plan(starts, indptr, indices, last, page_size=self._page_size, **self._arguments)


def pages_of(step: StepMetadata, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables as FlashInfer has them: where each sequence's pages begin, the pages, tokens of each last page.

    The first and the last lie on the host; nothing waits for the device where the step has its lengths there.
    """
    lens, tables = step.host[0], step.block_tables
    blocks = (lens + (page_size - 1)) // page_size
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
    torch.cumsum(blocks, 0, dtype=torch.int32, out=indptr[1:])
    last = (lens - (blocks - 1).clamp(min=0) * page_size).int()
    if step.host_tables is not None:  # one copy in place of four launches, 20 to 40 us each on a slow host
        used = torch.arange(tables.shape[1]) < blocks.unsqueeze(1)
        return indptr, step.host_tables[used].to(tables.device, non_blocking=True), last
    total, shifts = int(indptr[-1]), torch.arange(len(lens)) * tables.shape[1] - indptr[:-1]
    on_device = torch.stack((shifts, blocks.long())).to(tables.device, non_blocking=True)
    places = torch.repeat_interleave(on_device[0], on_device[1], output_size=total)
    places += torch.arange(total, device=tables.device)
    return indptr, tables.reshape(-1)[places], last


class Parts:
    """The two steps of which a mixed one consists: the first sequences decode, the others have several queries."""

    def __init__(self, step: StepMetadata, decodes: int) -> None:
        self._decodes = decodes
        self._starts = self._later(step)
        self.steps = [
            self._step(step, *each) for each in ((slice(decodes), None), (slice(decodes, None), self._starts))
        ]

    def _later(self, step: StepMetadata) -> Tensor:
        assert step.cu_seqlens_q is not None
        return step.cu_seqlens_q[self._decodes :] - self._decodes

    def _host(self, step: StepMetadata) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        lens, starts = step.host
        later = starts[self._decodes :] - self._decodes
        return (lens[: self._decodes],), (lens[self._decodes :], later)

    def _tables(self, step: StepMetadata) -> tuple[Tensor | None, Tensor | None]:
        tables = step.host_tables
        return (None, None) if tables is None else (tables[: self._decodes], tables[self._decodes :])

    def _step(self, step: StepMetadata, rows: slice, starts: Tensor | None) -> StepMetadata:
        return StepMetadata(
            step.block_tables[rows],
            step.context_lens[rows],
            cu_seqlens_q=starts,
            host=self._host(step)[0 if starts is None else 1],
            host_tables=self._tables(step)[0 if starts is None else 1],
            capturable=step.capturable,
        )

    def update(self, step: StepMetadata) -> None:
        """Bring both up to date, as a slot of the mixed one does."""
        self._starts.copy_(self._later(step))
        for part, host, tables in zip(self.steps, self._host(step), self._tables(step), strict=True):
            part.advance(host=host, host_tables=tables)


class _Split:
    """Two plans of one mixed step: a decode of the first sequences, a prefill of the others."""

    def __init__(
        self, step: StepMetadata, arguments: dict[str, Any], page_size: int, backend: str, decodes: int
    ) -> None:
        self._parts = Parts(step, decodes)
        self.decode = Planned(self._parts.steps[0], of_decode(arguments, page_size), tensor_cores=True)
        self.prefill = PlannedPages(self._parts.steps[1], arguments, page_size, backend)

    def update(self, step: StepMetadata) -> None:
        self._parts.update(step)
        self.decode.update(self._parts.steps[0])
        self.prefill.update(self._parts.steps[1])


def of_decode(arguments: dict[str, Any], page_size: int) -> dict[str, Any]:
    """What a plan for one query a sequence takes, of what one for several takes."""
    kept = {name: value for name, value in arguments.items() if name not in ("head_dim_qk", "head_dim_vo", "causal")}
    return kept | {"head_dim": arguments["head_dim_qk"], "page_size": page_size}


def natural(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Both results, the second one from (T, H) in base 2 to (H, T) in base e: NaN where the output's row is.

    Its states drop a part of NaN where they are merged (``max(s - s_max, -inf)`` in cascade.cuh and state.cuh).
    """
    return output, lse_of_spoiled_rows(output, lse * _LN_2).t().contiguous()


def _load_ragged(facts: Facts, backend: str) -> Callable[..., Any]:
    arguments = arguments_of(facts)
    owner = (f"flashinfer.{backend}.ragged", *arguments.values())

    make = functools.partial(_PlannedRagged, arguments=arguments, backend=backend)

    def run(*tensors: Tensor, return_lse: bool = False, step: RaggedMetadata | None = None, **_: Any) -> Any:
        query, key, value, cu_seqlens_q, cu_seqlens_k = tensors
        if step is not None:
            check_belongs(step.cu_seqlens_q is cu_seqlens_q and step.cu_seqlens_k is cu_seqlens_k, "ragged_attention")
        alone = functools.partial(RaggedMetadata, cu_seqlens_q, cu_seqlens_k)
        planned = planned_for(step, alone, owner, query, make)
        result = planned.run(query, key, value, return_lse=return_lse)
        return natural(*result) if return_lse else result

    return run


def check_belongs(belongs: bool, function: str) -> None:
    """Raise InvalidCallError for a step of other starts."""
    if not belongs:
        raise InvalidCallError(function, ["step: wanted that of these cu_seqlens, got that of others"])


def _load_paged(facts: Facts, backend: str, split: bool) -> Callable[..., Any]:
    arguments, page_size = arguments_of(facts), facts.size("page_size")
    heads, value_dim = facts.size("heads"), facts.size("value_dim")
    owner = (f"flashinfer.{backend}.paged", page_size, *arguments.values())

    whole = functools.partial(PlannedPages, arguments=arguments, page_size=page_size, backend=backend)

    def run(
        query: Tensor,
        *pages: Tensor,
        return_lse: bool = False,
        step: StepMetadata | None = None,
        decodes: int | None = None,
        **_: Any,
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens, cu_seqlens_q = pages
        caches, count = (key_cache, value_cache), decodes or 0
        if step is not None:
            check_belongs(step.cu_seqlens_q is cu_seqlens_q, "paged_attention")
        alone = functools.partial(StepMetadata, block_tables, context_lens, cu_seqlens_q=cu_seqlens_q)
        if not split or count == 0 or count == len(context_lens):
            planned = planned_for(step, alone, owner, query, whole)
            result = planned.run(query, caches, return_lse=return_lse)
            return natural(*result) if return_lse else result
        both = (alone() if step is None else step).slot(
            (owner, count), lambda each: _Split(each, arguments, page_size, backend, count)
        )
        output = query.new_empty((len(query), heads, value_dim))
        parts = (both.decode, slice(count)), (both.prefill, slice(count, None))
        found = [each.run(query[rows], caches, out=output[rows], return_lse=return_lse) for each, rows in parts]
        return natural(output, torch.cat([lse for _, lse in found])) if return_lse else output

    return run


_SHARED: tuple[Limit, ...] = (
    limit.dtype("float16", "bfloat16"),
    limit.positive("scale"),
    limit.Custom("capture: a capturable step", plannable),
)
LEFT_WINDOW = (
    limit.rule(
        "window: (left, 0) or (left, -1), or any with causal",
        lambda facts: facts["window"] is None or facts["causal"] is True or facts["window"][1] in (-1, 0),
        "WINDOW_UNSUPPORTED",
    ),
)


ARCHITECTURES: dict[str, tuple[Limit, ...]] = {
    "fa2": (limit.arch(min=(8, 0)),),
    "fa3": (limit.arch(min=(9, 0), max=(9, 9)), limit.instruction("wgmma")),
}
_RAGGED = (
    *_SHARED,
    TEMPLATE_DIMS,
    limit.last_stride_one("query", "key", "value"),
    limit.aligned(16, "query", "key", "value"),
)
OF_PAGES = (
    *_SHARED,
    limit.dim("head_dim", one_of=(64, 128, 256)),
    limit.equal("value_dim", "head_dim"),
    SAME_STRIDES,
    limit.last_stride_one("query", "key_cache", "value_cache"),
    limit.aligned(16, "query", "key_cache", "value_cache"),
)
STEPPED = (
    limit.rule("step: a StepMetadata, on which both plans are made once", lambda facts: facts["step"] != "none"),
)
_ACCEPTS = ("causal", "scale", "window", "softcap", "return_lse", "step")


def _kernel(backend: str, kind: str, priority: int) -> Kernel:
    paged, split = kind != "ragged", kind == "paged_split"
    load = functools.partial(_load_paged, backend=backend, split=split) if paged else None
    return kernel(
        f"flashinfer.{backend}.{kind}",
        (mixed.MIXED_PAGED if split else mixed.ALL) if paged else ragged.RAGGED,
        load or functools.partial(_load_ragged, backend=backend),
        layout="NHD" if paged else None,
        accepts=(*_ACCEPTS, *(("decodes",) if split else ())),
        limits=(*ARCHITECTURES[backend], *(OF_PAGES if paged else _RAGGED), *LEFT_WINDOW, *(STEPPED if split else ())),
        build_key=batches_key(backend),
        prebuilt=batches_prebuilt(backend),
        workspace_bytes=lambda _: WORKSPACE_BYTES,
        priority=priority,
    )


KERNELS = (
    _kernel("fa3", "ragged", 84),
    _kernel("fa2", "ragged", 74),
    _kernel("fa3", "paged_tokens", 82),
    _kernel("fa2", "paged_tokens", 78),
    _kernel("fa3", "paged_split", 81),
    _kernel("fa2", "paged_split", 77),
)
