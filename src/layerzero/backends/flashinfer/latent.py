"""FlashInfer's latent decode over pages: FlashAttention 2 and 3 templates that read both planes through two pointers.

It plans on the host, from lengths there: once a step for all layers, in every call without one. A capturable step plans
into fixed buffers. A plan takes the scale and whether a log-sum-exp is wanted, so both are in its name. Where head
counts do not fill a tile it refuses some lengths of several causal queries, hence the limit.
Read: mla/_batch_mla of flashinfer-python 0.7.2.post1, BatchMLAPagedAttentionWrapper.
Library: flashinfer-python 0.7.2, Apache-2.0; arXiv:2501.01005.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import kernel
from layerzero.backends.flashinfer.modules import SHORT, is_built
from layerzero.backends.flashinfer.paged import WORKSPACE_BYTES, buffers, plannable, planned_for, workspace
from layerzero.backends.flashinfer.plan import Staging
from layerzero.backends.flashinfer.varlen import ARCHITECTURES, pages_of
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.attention.reference import lse_of_spoiled_rows
from layerzero.ops.latent import NAME, WIDTHS
from layerzero.ops.paged.step import StepMetadata


class _Planned:
    """One wrapper and its plan, for the values that a step has now."""

    def __init__(self, step: StepMetadata, arguments: dict[str, Any], queries: int, backend: str) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        device, (batch, _) = step.block_tables.device, step.block_tables.shape
        pages = max(step.block_tables.numel(), 1)
        fixed = buffers(
            step.capturable, device, qo_indptr=batch + 1, kv_indptr=batch + 1, kv_indices=pages, kv_len_arr=batch
        )
        self._arguments, self._queries = arguments, queries
        scratch = workspace(device, capturable=step.capturable)
        self._wrapper = BatchMLAPagedAttentionWrapper(scratch, backend=backend, **fixed)
        self._staging, self.run = Staging(self._wrapper, device), self._wrapper.run
        self.update(step)

    def update(self, step: StepMetadata) -> None:
        from flashinfer.mla import MLAPlanMetadata

        lens = step.host[0]
        indptr, indices, _ = pages_of(step, self._arguments["page_size"])
        starts = torch.arange(len(lens) + 1, dtype=torch.int32) * self._queries
        self._staging.plan(metadata=MLAPlanMetadata.csr(starts, indptr, indices, lens), **self._arguments)


def _load(facts: Facts, backend: str) -> Callable[..., Any]:
    dtype, queries, page_size = facts.tensors["q_nope"].dtype, facts.size("seq_q"), facts.size("page_size")
    shape: dict[str, Any] = {
        "num_heads": facts.size("heads"),
        "head_dim_ckv": facts.size("latent_dim"),
        "head_dim_kpe": facts.size("rope_dim"),
        "page_size": page_size,
        "causal": queries > 1,
        "q_data_type": dtype,
        "kv_data_type": dtype,
        "query_layout": "split",
        "kv_cache_layout": "split",
    }
    name = f"flashinfer.{backend}.mla"

    def run(
        q_nope: Tensor, *rest: Tensor, scale: float, return_lse: bool = False, step: StepMetadata | None = None
    ) -> Any:
        q_pe, ckv_cache, kpe_cache, block_tables, context_lens = rest
        arguments = shape | {"sm_scale": float(scale), "lse_mode": "basee" if return_lse else "none"}
        owner = (name, queries, *arguments.values())

        def make(each: StepMetadata) -> _Planned:
            return _Planned(each, arguments, queries, backend)

        planned = planned_for(step, lambda: StepMetadata(block_tables, context_lens), owner, q_nope, make)
        tokens = q_nope.flatten(0, 1), q_pe.flatten(0, 1)
        result = planned.run(
            query=tokens, kv_cache=(ckv_cache, kpe_cache), return_lse=return_lse, return_lse_base_on_e=return_lse
        )
        if not return_lse:
            return result.view(q_nope.shape)
        lse = lse_of_spoiled_rows(*result).view(q_nope.shape[:3])
        return result[0].view(q_nope.shape), lse.transpose(1, 2).contiguous()

    return run


def _built(facts: Facts, backend: str) -> bool:
    """Whether the module is there: one for each dtype, with the widths of the limits."""
    short = SHORT.get(facts.tensors["q_nope"].dtype)
    suffix = "_sm90" if backend == "fa3" else ""
    dtypes = f"dtype_q_{short}_dtype_kv_{short}_dtype_o_{short}_dtype_idx_i32"
    widths = "head_dim_ckv_512_head_dim_kpe_64"
    return short is not None and is_built(
        f"batch_mla_attention_{dtypes}_{widths}_profiler_False_planabi2{suffix}", facts
    )


_TENSORS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")


def _kernel(backend: str, priority: int) -> Kernel:
    return kernel(
        f"flashinfer.{backend}.mla",
        NAME,
        functools.partial(_load, backend=backend),
        *ARCHITECTURES[backend],
        limit.dtype("float16", "bfloat16"),
        *WIDTHS,
        limit.positive("scale"),
        # several causal queries: a tile of 64 or 128 rows holds whole queries
        limit.rule(
            "seq_q: 1, or heads that divide 64, or 128 heads",
            lambda facts: facts["seq_q"] == 1 or 64 % facts["heads"] == 0 or facts["heads"] == 128,
        ),
        limit.Custom("capture: a capturable step", plannable),
        limit.last_stride_one(*_TENSORS),
        limit.aligned(16, *_TENSORS),
        accepts=("scale", "return_lse", "step"),
        build_key=lambda facts: ("mla", backend, facts.device.sm, facts["dtype"]),
        prebuilt=functools.partial(_built, backend=backend),
        workspace_bytes=lambda _: WORKSPACE_BYTES,
        priority=priority,
    )


KERNELS = (_kernel("fa3", 80), _kernel("fa2", 60))
