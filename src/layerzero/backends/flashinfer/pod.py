"""FlashInfer's prefill on decode (POD): decodes and prefills of a mixed step in one launch, each on its own plan.

Decodes wait for memory and prefills for arithmetic, so that both on one multiprocessor take less than one after the
other. Both plans live on an eager step; the wrapper has no buffers that a graph could go on reading. A step that turns
out to be all decodes, or to have none, takes the plan of the whole batch. Log-sum-exps come in base 2 as (T, H), as
``((prefill, decode), (prefill's, decode's))``, whatever the docstring of the wrapper says.
Read: BatchPODWithPagedKVCacheWrapper of flashinfer-python 0.7.2.post1; POD-Attention, arXiv:2410.18038.
Library: flashinfer-python 0.7.2, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import FLASHINFER
from layerzero.backends.flashinfer.modules import batches_key, pod_prebuilt
from layerzero.backends.flashinfer.paged import WORKSPACE_BYTES, workspace
from layerzero.backends.flashinfer.staging import Staging
from layerzero.backends.flashinfer.varlen import (
    LEFT_WINDOW,
    OF_PAGES,
    STEPPED,
    Parts,
    PlannedPages,
    arguments_of,
    check_belongs,
    natural,
    of_decode,
    pages_of,
)
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.paged import mixed
from layerzero.ops.paged.step import StepMetadata


class _Pod:
    """One wrapper and both plans, for the values that a mixed step has now."""

    def __init__(self, step: StepMetadata, arguments: dict[str, Any], page_size: int, decodes: int) -> None:
        from flashinfer import BatchPODWithPagedKVCacheWrapper

        self._parts, self._causal = Parts(step, decodes), arguments["causal"]
        self._arguments = of_decode(arguments, page_size)
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
        told = [(each.host[1], *pages_of(each, self._arguments["page_size"])) for each in (prefill, decode)]
        self._staging.plan(*told[0], *told[1], **self._arguments)

    def run(self, prefills: Tensor, decodes: Tensor, caches: tuple[Tensor, Tensor], *, return_lse: bool) -> Any:
        """Outputs of prefills and decodes; with ``return_lse`` a pair of those and one of their log-sum-exps."""
        return self._wrapper.run(prefills, caches, decodes, caches, causal_p=self._causal, return_lse=return_lse)


def _load(facts: Facts) -> Callable[..., Any]:
    arguments, page_size = arguments_of(facts), facts.size("page_size")
    owner = ("flashinfer.pod", page_size, *arguments.values())

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        cu_seqlens_q: Tensor,
        *,
        decodes: int,
        step: StepMetadata,
        return_lse: bool = False,
        **_: Any,
    ) -> Any:
        check_belongs(step.cu_seqlens_q is cu_seqlens_q, "paged_attention")
        caches = key_cache, value_cache
        if decodes in (0, len(context_lens)):
            whole = step.slot((owner, "whole"), lambda each: PlannedPages(each, arguments, page_size, "fa2"))
            result = whole.run(query, caches, return_lse=return_lse)
            return (result[0], natural(result[1])) if return_lse else result
        both = step.slot((owner, decodes), lambda each: _Pod(each, arguments, page_size, decodes))
        result = both.run(query[decodes:], query[:decodes], caches, return_lse=return_lse)
        outputs, sums = result if return_lse else (result, None)
        output = torch.cat(outputs[::-1])  # decodes come first in the batch
        return output if sums is None else (output, natural(torch.cat(sums[::-1])))

    return run


KERNELS = (
    Kernel(
        id="flashinfer.pod.paged",
        operations=mixed.MIXED_PAGED,
        backend=FLASHINFER,
        load=_load,
        layout="NHD",
        accepts=("causal", "scale", "window", "return_lse", "step", "decodes"),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            *OF_PAGES,
            *LEFT_WINDOW,
            *STEPPED,
            limit.one_of("step", "eager"),
        ),
        build_key=lambda facts: ("pod", batches_key("fa2")(facts)),
        prebuilt=pod_prebuilt,
        workspace_bytes=lambda _: 2 * WORKSPACE_BYTES,
        graph_safe=False,
        priority=60,
    ),
)
