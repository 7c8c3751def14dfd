"""FlashInfer's decode over a paged cache, on CUDA cores and on tensor cores.

Both plan on the host: ``plan`` copies the lengths there and splits long sequences. With a StepMetadata that happens
once for all layers, without one in every call. A capturable step plans into fixed buffers, so that a captured graph
replays after ``advance``. Which of the two is faster changes with the group size and the batch (64 sequences of 2048
tokens, 32 heads on 8: 143 us on tensor cores, 199 without; one of 4096: 20 and 18; bfloat16, H200, 2026-11-21).
The cache may have any strides that key and value share. Its log-sum-exp is base 2.
Library: flashinfer-python 0.7.2, Apache-2.0; arXiv:2501.01005.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import kernel
from layerzero.backends.flashinfer.modules import decode_key, decode_prebuilt
from layerzero.backends.flashinfer.plan import Staging
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.handle import CAPTURABLE, Handle
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import forking
from layerzero.ops.attention.reference import lse_of_spoiled_rows
from layerzero.ops.cascade import FLAT
from layerzero.ops.paged.step import StepMetadata

WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer's documentation recommends for partial results of split sequences."""


@functools.cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    """Scratch memory of one stream: calls on it run one after the other. It has to start as zeros."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def workspace(device: torch.device, *, capturable: bool) -> Tensor:
    """Scratch memory for a plan: that of the current stream, or its own, which a graph keeps."""
    if capturable:
        return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspace(device, torch.cuda.current_stream(device).cuda_stream)


def buffers(capturable: bool, device: torch.device, **sizes: int) -> dict[str, Any]:
    """Buffers that a captured graph goes on reading; none where nothing is captured."""
    if not capturable:
        return {}
    made = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    return {"use_cuda_graph": True, **made}


class Planned:
    """One wrapper and its plan, for the values that a step has now."""

    def __init__(self, step: StepMetadata, arguments: dict[str, Any], tensor_cores: bool) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        table = step.block_tables
        device, batch = table.device, table.shape[0]
        fixed = buffers(
            step.capturable,
            device,
            paged_kv_indptr_buffer=batch + 1,
            paged_kv_indices_buffer=max(table.numel(), 1),
            paged_kv_last_page_len_buffer=batch,
        )
        self._arguments = arguments
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace(device, capturable=step.capturable),
            "NHD",
            use_tensor_cores=tensor_cores,
            backend="fa2",  # 0.7.4 would take cuDNN of some heads of 256 on Blackwell
            **fixed,
        )
        self._staging, self.run = Staging(self._wrapper, device), self._wrapper.run
        self.update(step)

    def update(self, step: StepMetadata) -> None:
        page_size = self._arguments["page_size"]
        lens = step.context_lens
        blocks = (lens + (page_size - 1)) // page_size
        columns = torch.arange(step.block_tables.shape[1], device=lens.device)
        indices = step.block_tables[columns < blocks.unsqueeze(1)]
        indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
        torch.cumsum(blocks, 0, dtype=torch.int32, out=indptr[1:])
        last = (lens - (blocks - 1).clamp(min=0) * page_size).int()
        self._staging.plan(indptr, indices, last, non_blocking=True, **self._arguments)


_ALONE: OrderedDict[Hashable, Any] = OrderedDict()
"""Wrappers of calls without a step, each of one thread and stream; two must not plan into one. 16 MiB each."""

_MAX_ALONE = 16
Kept = TypeVar("Kept", bound=Handle)
_ALONE_LOCK = forking.lock()


def planned_for(
    step: Kept | None, alone: Callable[[], Kept], owner: Hashable, tensor: Tensor, make: Callable[[Kept], Any]
) -> Any:
    """What plans for a step; without one what planned for such calls, brought up to date for this one.

    That is one of each thread and stream: two must not plan into one.
    """
    if step is not None:
        return step.slot(owner, make)
    key, step = (owner, threading.get_ident(), torch.cuda.current_stream(tensor.device).cuda_stream), alone()
    with _ALONE_LOCK:
        planned = _ALONE.pop(key, None)
    if planned is None:
        planned = make(step)
    else:
        planned.update(step)
    with _ALONE_LOCK:
        _ALONE[key] = planned
        while len(_ALONE) > _MAX_ALONE:
            _ALONE.popitem(last=False)
    return planned


def natural_of_decode(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Both results of one query a sequence: (B, H, D_v) and, in base 2, (B, H) to (B, 1, H, D_v) and (B, H, 1)."""
    return output.unsqueeze(1), lse_of_spoiled_rows(output, lse * math.log(2)).unsqueeze(-1)


def _load(facts: Facts, tensor_cores: bool) -> Callable[..., Any]:
    kernel = "flashinfer.paged_decode_tensor_cores" if tensor_cores else "flashinfer.paged_decode"
    dtype = facts.tensors["query"].dtype
    window, softcap, scale = facts["window"], facts["softcap"], facts["scale"]
    arguments: dict[str, Any] = {
        "num_qo_heads": facts.size("heads"),
        "num_kv_heads": facts.size("kv_heads"),
        "head_dim": facts.size("head_dim"),
        "page_size": facts.size("page_size"),
        "window_left": window[0] if isinstance(window, tuple) else -1,
        "logits_soft_cap": softcap,
        "sm_scale": scale,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }
    owner = (kernel, *arguments.values())

    make = functools.partial(Planned, arguments=arguments, tensor_cores=tensor_cores)

    def decode(  # the plan has what acts on the scores
        query: Tensor, *pages: Tensor, return_lse: bool = False, step: StepMetadata | None = None, **_: Any
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens = pages
        planned = planned_for(step, lambda: StepMetadata(block_tables, context_lens), owner, query, make)
        result = planned.run(query.squeeze(1), (key_cache, value_cache), return_lse=return_lse)
        return natural_of_decode(*result) if return_lse else result.unsqueeze(1)

    return decode


def plannable(facts: Facts) -> Reason | None:
    """A plan reads lengths on the host, which a capture does not allow; a capturable step made it before."""
    if not facts["capturing"] or facts["step"] == CAPTURABLE:
        return None
    return Reason(
        ReasonCode.CUDA_GRAPH_UNSAFE,
        "step",
        "planned before the capture",
        "planned in the call" if facts["step"] == "none" else "planned into memory that moves",
        "Pass step=lz.StepMetadata(..., capturable=True) and use it once before the capture",
    )


SAME_STRIDES = limit.rule(
    "value_cache: strides like key_cache",
    lambda facts: facts.tensors["value_cache"].strides == facts.tensors["key_cache"].strides,
    "NOT_CONTIGUOUS",
    got=lambda facts: f"strides {facts.tensors['value_cache'].strides}",
)
"""It steps through values with the strides of the keys."""


_LIMITS = (
    limit.dtype("float16", "bfloat16"),
    limit.dim("head_dim", one_of=(64, 128, 256)),
    limit.equal("value_dim", "head_dim"),
    limit.positive("scale"),
    SAME_STRIDES,
    limit.Custom("capture: a capturable step", plannable),
    limit.last_stride_one("query", "key_cache", "value_cache"),
    limit.aligned(16, "query", "key_cache", "value_cache"),
)


def _kernel(kernel_id: str, tensor_cores: bool, priority: int, *more: limit.Limit) -> Kernel:
    return kernel(
        kernel_id,
        FLAT,
        functools.partial(_load, tensor_cores=tensor_cores),
        layout="NHD",
        accepts=("scale", "window", "softcap", "return_lse", "step"),
        limits=(*_LIMITS, *more),
        build_key=decode_key(tensor_cores),
        prebuilt=decode_prebuilt(tensor_cores),
        workspace_bytes=lambda _facts: WORKSPACE_BYTES,
        device_guard=False,
        priority=priority,
    )


KERNELS = (
    _kernel("flashinfer.paged_decode_tensor_cores", True, 80),
    _kernel("flashinfer.paged_decode", False, 75, limit.dim("group", one_of=(1, 2, 3, 4, 6, 8, 16))),
)
