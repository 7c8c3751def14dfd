"""FlashInfer behind a shared prefix: a plan for the prefix, one for the rest, and its merge of both in place.

The same that its MultiLevelCascadeAttentionWrapper does, which returns no log-sum-exp. Both plans live on a step. Its
merge takes log-sum-exps in base 2 as (tokens, heads), and says NaN where neither part saw a key: there they are finite.
Read: cascade.py of flashinfer-python 0.7.2.post1.

FlashInfer's prefill on decode (POD): decodes and prefills of a mixed step in one launch, each on its own plan.

Decodes wait for memory and prefills for arithmetic, so that both on one multiprocessor take less than one after the
other. Both plans live on an eager step; the wrapper has no buffers that a graph could go on reading. A step that turns
out to be all decodes, or to have none, takes the plan of the whole batch. Log-sum-exps come in base 2 as (T, H), as
``((prefill, decode), (prefill's, decode's))``, whatever the docstring of the wrapper says.
Read: BatchPODWithPagedKVCacheWrapper of flashinfer-python 0.7.2.post1; POD-Attention, arXiv:2410.18038.
Library: flashinfer-python 0.7.2, Apache-2.0; arXiv:2501.01005.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer import varlen
from layerzero.backends.flashinfer.attention import kernel
from layerzero.backends.flashinfer.modules import batches_key, batches_prebuilt, is_built, pod_prebuilt
from layerzero.backends.flashinfer.paged import WORKSPACE_BYTES, natural_of_decode, workspace
from layerzero.backends.flashinfer.plan import Staging
from layerzero.backends.norm_limits import ElementsBelow
from layerzero.core import limits as limit
from layerzero.core.errors import refuse
from layerzero.core.facts import Facts
from layerzero.ops.cascade import CASCADE, MERGE_STATES
from layerzero.ops.paged import mixed
from layerzero.ops.paged.step import StepMetadata

_LOG2_E = math.log2(math.e)
_NOTHING = -1e30
"""What stands for -inf in its merge: next to it any other part has all the weight."""


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
        self.prefix = varlen.PlannedPages(prefix, arguments, page_size, "fa2")
        self.rest = varlen.PlannedPages(self._rest, arguments, page_size, "fa2")

    def _lens_on_host(self, step: StepMetadata) -> Tensor:
        lens = step.host[0] - self._shared
        if bool((lens < 0).any()):  # its plan has a negative size, or pages of another sequence
            wanted = f"context_lens: wanted at least the {self._shared} tokens of the shared pages"
            refuse("cascade_attention", [f"{wanted}, got {int(step.host[0].min())}"])
        return lens

    def update(self, step: StepMetadata) -> None:
        self._lens.copy_(step.context_lens - self._shared)
        self._prefix.advance(host=self._prefix.host)
        self._rest.advance(host=(self._lens_on_host(step), self._apart))
        self.prefix.update(self._prefix)
        self.rest.update(self._rest)


def _load_cascade(facts: Facts) -> Callable[..., Any]:
    from flashinfer import merge_state_in_place

    arguments, page_size = varlen.arguments_of(facts) | {"causal": False}, facts.size("page_size")
    owner = ("flashinfer.cascade", page_size, *arguments.values())

    def run(
        query: Tensor, *pages: Tensor, shared_blocks: int, return_lse: bool = False, step: StepMetadata, **_: Any
    ) -> Any:
        key_cache, value_cache, block_tables, _lens = pages
        both = step.slot((owner, shared_blocks), lambda each: _Cascade(each, arguments, page_size, shared_blocks))
        tokens, caches = query.squeeze(1), (key_cache, value_cache)
        output, lse = both.prefix.run(tokens, caches, return_lse=True)
        if shared_blocks < block_tables.shape[1]:
            merge_state_in_place(output, lse, *both.rest.run(tokens, caches, return_lse=True))
        return natural_of_decode(output, lse) if return_lse else output.unsqueeze(1)

    return run


def _load_merge(facts: Facts) -> Callable[..., Any]:
    from flashinfer import merge_state

    def run(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        sums = [(lse.t() * _LOG2_E).clamp(min=_NOTHING).contiguous() for lse in (lse_a, lse_b)]
        # its own sum leaves NaN out; the output is NaN there, whatever the share
        return merge_state(output_a, sums[0], output_b, sums[1])[0], torch.logaddexp(lse_a, lse_b)

    return run


def _merge_built(facts: Facts) -> bool:
    return is_built("cascade", facts)


_MERGED_HEADS = limit.rule(
    "heads: at most 8192 / value_dim", lambda facts: facts["heads"] <= 8 * 1024 // facts["value_dim"]
)
"""A block of its merge has 1024 threads, one for 8 numbers of a head: "invalid argument" beyond (H200, 2026-11-22)."""


class _Pod:
    """One wrapper and both plans, for the values that a mixed step has now."""

    def __init__(self, step: StepMetadata, arguments: dict[str, Any], page_size: int, decodes: int) -> None:
        from flashinfer import BatchPODWithPagedKVCacheWrapper

        self._parts, self._causal = varlen.Parts(step, decodes), arguments["causal"]
        self._arguments = varlen.of_decode(arguments, page_size)
        del self._arguments["logits_soft_cap"]  # it has none, which the limits say
        device = step.block_tables.device
        self._wrapper = BatchPODWithPagedKVCacheWrapper(workspace(device, capturable=False), "NHD")
        self._staging = Staging(self._wrapper, device)
        self._plan()

    def update(self, step: StepMetadata) -> None:
        self._parts.update(step)
        self._plan()

    def _plan(self) -> None:
        decode, prefill = self._parts.steps
        told = [(each.host[1], *varlen.pages_of(each, self._arguments["page_size"])) for each in (prefill, decode)]
        self._staging.plan(*told[0], *told[1], **self._arguments)

    def run(self, prefills: Tensor, decodes: Tensor, caches: tuple[Tensor, Tensor], *, return_lse: bool) -> Any:
        """Outputs of prefills and decodes; with ``return_lse`` a pair of those and one of their log-sum-exps."""
        return self._wrapper.run(prefills, caches, decodes, caches, causal_p=self._causal, return_lse=return_lse)


def _load(facts: Facts) -> Callable[..., Any]:
    arguments, page_size = varlen.arguments_of(facts), facts.size("page_size")
    owner = ("flashinfer.pod", page_size, *arguments.values())

    def run(query: Tensor, *pages: Tensor, decodes: int, step: StepMetadata, return_lse: bool = False, **_: Any) -> Any:
        key_cache, value_cache, _tables, context_lens, cu_seqlens_q = pages
        varlen.check_belongs(step.cu_seqlens_q is cu_seqlens_q, "paged_attention")
        caches = key_cache, value_cache
        if decodes in (0, len(context_lens)):
            whole = step.slot((owner, "whole"), lambda each: varlen.PlannedPages(each, arguments, page_size, "fa2"))
            result = whole.run(query, caches, return_lse=return_lse)
            return varlen.natural(*result) if return_lse else result
        both = step.slot((owner, decodes), lambda each: _Pod(each, arguments, page_size, decodes))
        result = both.run(query[decodes:], query[:decodes], caches, return_lse=return_lse)
        outputs, sums = result if return_lse else (result, None)
        output = torch.cat(outputs[::-1])  # decodes come first in the batch
        return output if sums is None else varlen.natural(output, torch.cat(sums[::-1]))

    return run


KERNELS = (
    kernel(
        "flashinfer.cascade",
        CASCADE.name,
        _load_cascade,
        layout="NHD",
        accepts=("scale", "softcap", "return_lse", "step", "shared_blocks"),
        limits=(*varlen.OF_PAGES, *varlen.STEPPED, _MERGED_HEADS),
        build_key=lambda facts: ("cascade", batches_key("fa2")(facts)),
        prebuilt=lambda facts: batches_prebuilt("fa2")(facts) and _merge_built(facts),
        workspace_bytes=lambda _: WORKSPACE_BYTES,
        priority=58,  # 636 us against 454 of a flat decode, 64 sequences behind 8192 tokens, eager (H200, 2026-11-22)
    ),
    kernel(
        "flashinfer.merge_states",
        MERGE_STATES.name,
        _load_merge,
        limit.dtype("float16", "bfloat16"),
        limit.dim("value_dim", one_of=(64, 128, 256)),
        _MERGED_HEADS,
        limit.contiguous("output_a", "output_b"),
        limit.aligned(16, "output_a", "output_b"),
        ElementsBelow(2**32, ("tokens", "heads", "value_dim")),  # of 32 bits is where a head starts (cascade.cuh)
        deterministic=True,
        build_key=lambda facts: ("merge", facts.device.sm),
        prebuilt=_merge_built,
        priority=60,
    ),
    kernel(
        "flashinfer.pod.paged",
        mixed.MIXED_PAGED,
        _load,
        layout="NHD",
        accepts=("causal", "scale", "window", "return_lse", "step", "decodes"),
        limits=(*varlen.OF_PAGES, *varlen.LEFT_WINDOW, *varlen.STEPPED, limit.one_of("step", "eager")),
        build_key=lambda facts: ("pod", batches_key("fa2")(facts)),
        prebuilt=pod_prebuilt,
        workspace_bytes=lambda _: 2 * WORKSPACE_BYTES,
        graph_safe=False,
        priority=60,
    ),
)
