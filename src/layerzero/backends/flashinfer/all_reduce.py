"""FlashInfer's all-reduce of a few tokens, alone and with a residual and a norm in the same launch (TensorRT-LLM's).

Each rank pushes its numbers into all buffers and waits until its own holds no mark of an unwritten number (-0.0), so
that no barrier is needed. All ranks add in the order of the ranks, in float32, and round once: they have the same bits.
Buffers are torch's symmetric memory, without NVLink's multicast. They are made at a group's first call, where all ranks
come together, and kept as long as the group; launches that share them come one after the other.

Read: flashinfer-python 0.7.2, comm/trtllm_ar.py and include/flashinfer/comm/trtllm_allreduce_fusion.cuh: dense rows of
whole vectors of 16 bytes; up to 8 blocks of 1,024 threads a row, in steps of a power of two. One module, for sm 9.0 and
newer, which nvcc compiles for minutes. On two H200 it ran as nvcc made it elsewhere, of the same sources cut down to
bfloat16 and two ranks (torch 2.11, 2026-11-27). Library: flashinfer-python 0.7.2, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import FLASHINFER
from layerzero.backends.flashinfer.modules import of_modules
from layerzero.backends.torch.collectives import ONE_SHOT, ONE_SHOT_ELEMENTS, ONE_SHOT_OF_TWO, dense, of_group
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.comm.ranks import Ranks, ranks_of

_SUM, _SUM_ADD_NORM = 0, 1  # AllReduceFusionPattern
_ROW = 1024
"""Numbers of a block's row of a sum without a norm."""

_WORKSPACES: WeakKeyDictionary[Any, dict[int, Tensor]] = WeakKeyDictionary()


def _workspace(ranks: Ranks, like: Tensor) -> Tensor:
    """Addresses of the group's buffers. Raises: InvalidCallError in a capture that lacks them."""

    def make() -> Tensor:
        from flashinfer.comm import trtllm_ar

        most = 1 + (ONE_SHOT_OF_TWO if ranks.size == 2 else ONE_SHOT_ELEMENTS)
        create: Any = trtllm_ar.trtllm_create_ipc_workspace_for_all_reduce_fusion
        create = create.__wrapped__  # without the wrapper that warns of another name for it
        buffers, addresses = create(ranks.rank, ranks.size, 1, most, group=ranks.group)
        finalize(ranks.group, trtllm_ar.trtllm_destroy_ipc_workspace_for_all_reduce_fusion, buffers)
        found: Tensor = addresses
        return found

    return of_group(_WORKSPACES, ranks, like, make)


def _operator() -> Callable[..., None]:
    from flashinfer.comm.trtllm_ar import get_trtllm_comm_module

    operator: Callable[..., None] = get_trtllm_comm_module().trtllm_allreduce_fusion
    return operator


def _load_all_reduce(_facts: Facts) -> Callable[..., Any]:
    operator = _operator()

    def run(input: Tensor, *, group: Any = None) -> Tensor:
        ranks, local = ranks_of(group), dense(input)
        output, rows = torch.empty_like(local), local.numel() // _ROW
        given = local, ranks.size, ranks.rank, rows, _ROW, _workspace(ranks, local), True, True, True, True
        operator(*given, _SUM, output, *[None] * 11)
        return output

    return run


def _load_all_reduce_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator, hidden = _operator(), facts.size("hidden")

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float, group: Any = None) -> tuple[Tensor, Tensor]:
        ranks, local = ranks_of(group), dense(input)
        output, total, rows = torch.empty_like(local), torch.empty_like(local), local.numel() // hidden
        given = local, ranks.size, ranks.rank, rows, hidden, _workspace(ranks, local), True, True, True, True
        normed = None, dense(residual), total, output, None, None, dense(weight), eps
        operator(*given, _SUM_ADD_NORM, *normed, *[None] * 4)
        return output, total

    return run


_LIMITS = (
    limit.arch(min=(9, 0)),
    limit.dtype("bfloat16"),
    *ONE_SHOT,
    limit.dim("rank_count", max=2),  # more ranks never ran it
)

KERNELS = (
    FLASHINFER.kernel(
        "flashinfer.all_reduce",
        "comm.all_reduce",
        _load_all_reduce,
        *_LIMITS,
        limit.dim("payload", multiple=_ROW),
        accepts=("group",),
        **of_modules("trtllm_comm"),
        priority=70,
    ),
    FLASHINFER.kernel(
        "flashinfer.all_reduce_add_rms_norm",
        "comm.all_reduce_add_rms_norm",
        _load_all_reduce_add_rms_norm,
        *_LIMITS,
        limit.dim("hidden", max=16384, multiple=64),
        accepts=("eps", "group"),
        **of_modules("trtllm_comm"),
        priority=70,
    ),
)
