"""FlashAttention 2 and 3 as vLLM ships them, called as torch operators without importing vLLM.

The operators lie in two shared libraries in the ``vllm`` package. Their argument order is that of
vllm_flash_attn/flash_attn_interface.py in vllm 0.20.0 and of the schemas in the libraries; limits are the checks in
hopper/flash_api.cpp and csrc/flash_attn/flash_api.cpp of vllm-project/flash-attention (read 2026-11-21).

FlashAttention 3 is built for variable lengths only. Dense tensors go in as they are, with a constant tensor of lengths
(``seqused_k``), which is such a call; nothing is reshaped. These are rows of one table for many lengths: decoding meets
a new one at every step, and neither makes a tensor nor another plan for it. The number of splits is left to the
library, as vLLM does. What it splits gives 0 where a query or a key is NaN (H200, 2026-12-01). It writes the schedule
of a call into memory that it allocates itself: metadata made once would hold a counter that two streams must not share.
FlashAttention 2 has no plain forward in this build, but its cache operator is one when nothing is appended; it splits
keys for decode as well, and reads device lengths. Neither build has dropout or a backward pass.
Library: vllm 0.20, Apache-2.0; FlashAttention, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flash_attn.attention import OF_SLOPES, WINDOW_WITHOUT_CAUSAL
from layerzero.backends.shape_cache import Prepared, driver_cache
from layerzero.backends.vllm.library import (
    VLLM_FLASH_ATTN_2,
    VLLM_FLASH_ATTN_3,
    has_machine_code_of_v2,
    operators,
    variant_of_v2,
)
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.reference import with_lse

_NUMBERS = 2**14
"""In one table of lengths: 64 KB, 16,384 lengths of one sequence, 256 of 64."""


def _rows(batch: int) -> int:
    return max(1, _NUMBERS // max(1, batch))


def _table(where: str, batch: int, number: int) -> Tensor:
    """The lengths (rows, batch) from ``number`` times so many on, each ``batch`` times."""
    rows = _rows(batch)
    lengths = torch.arange(number * rows, (number + 1) * rows, dtype=torch.int32, device=where)
    return lengths.unsqueeze(1).expand(rows, batch).contiguous()


TABLES = Prepared(_table, 1024)


def _of_call(where: str, batch: int, seq_k: int) -> tuple[str, int, int]:
    return where, batch, seq_k // _rows(batch)


def _table_of(facts: Facts) -> tuple[str, int, int]:
    return _of_call(f"cuda:{facts.device.index}", facts.size("batch"), facts.size("seq_k"))


def lengths(where: str, batch: int, seq_k: int, *, capturing: bool) -> Tensor:
    """``seq_k``, ``batch`` times: int32, a row of a table that is kept."""
    table: Tensor = TABLES.get(*_of_call(where, batch, seq_k), capturing=capturing)
    return table[seq_k % _rows(batch)]


OF_LENGTHS = TABLES.before_capture("its table of lengths", _table_of)


def _load_v3(facts: Facts) -> Callable[..., Any]:
    operator = operators("vllm_flash_attn/_vllm_fa3_C.abi3.so", "_vllm_fa3_C").fwd.default
    where, capturing = f"cuda:{facts.device.index}", bool(facts["capturing"])
    last: tuple[int, int, Tensor | None] = (-1, -1, None)  # the layers of a step ask for the same
    default_scale = facts.size("head_dim") ** -0.5
    nothing = (None,) * 6  # max_seqlen_q and _k, page table, its batch index, left padding, rotary cosine
    unscaled = (None,) * 5  # rotary sine and lengths, scales of q, k and v

    def v3(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        nonlocal last
        left, right = window or (-1, -1)
        batch, seq_k = key.shape[0], key.shape[1]
        known = last  # once: another thread may write it
        if known[0] != batch or known[1] != seq_k:
            last = known = batch, seq_k, lengths(where, batch, seq_k, capturing=capturing)
        output, lse, *_ = operator(
            *(query, key, value, *(None,) * 8),  # new keys and values, q_v, out, three cumulative lengths, seqused_q
            *(known[2], *nothing, *unscaled, default_scale if scale is None else scale, causal, left, right),
            *(softcap or 0.0, True, None),  # rotary_interleaved, without rotary; scheduler_metadata
            *(0, None, 0),  # num_splits and pack_gqa: the library's choice; sm_margin
            *(sinks, 1, 0, None),  # context parallel world size and rank, and its lengths
        )
        return with_lse(output, lse, sinks) if return_lse else output

    return v3


def _load_v2(facts: Facts) -> Callable[..., Any]:
    operator = operators("vllm_flash_attn/_vllm_fa2_C.abi3.so", "_vllm_fa2_C").fwd_kvcache.default
    default_scale = facts.size("head_dim") ** -0.5

    def v2(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        kv_lens: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        left, right = window or (-1, -1)
        output, lse = operator(
            *(query, key, value, None, None),  # new keys and values
            None if kv_lens is None else kv_lens.to(torch.int32),
            *(None,) * 5,  # rotary cosine and sine, batch index, left padding, block table
            *(None if alibi_slopes is None else alibi_slopes.float(), None),  # out
            *(default_scale if scale is None else scale, causal, left, right, softcap or 0.0),
            *(False, 0),  # rotary_interleaved; num_splits: the library's choice
        )
        return with_lse(output, lse) if return_lse else output

    return v2


FITTING_VALUES = limit.rule(
    "value_dim: like head_dim, or 97 to 128 with a head_dim of 129 to 192, or any with one of at most 64",
    lambda facts: (
        facts["head_dim"] == facts["value_dim"]
        or facts["head_dim"] <= 64
        or (128 < facts["head_dim"] <= 192 and 96 < facts["value_dim"] <= 128)
    ),
    "HEAD_DIM_INVALID",
)
"""The widths for which FlashAttention 3 has kernels where values are not as wide as keys."""


def fitting_sinks(facts: Facts) -> Reason | None:
    """Sinks: bfloat16 only, at most 64 heads, values as wide as keys."""
    sinks = facts.tensors.get("sinks")
    if sinks is None:
        return None
    if sinks.dtype != torch.bfloat16:
        return Reason(ReasonCode.CONSTRAINT_FAILED, "sinks.dtype", "bfloat16", str(sinks.dtype).removeprefix("torch."))
    if facts.size("heads") > 64:
        return Reason(ReasonCode.CONSTRAINT_FAILED, "heads", "at most 64 with sinks", facts.size("heads"))
    if facts["head_dim"] != facts["value_dim"]:
        return Reason(ReasonCode.HEAD_DIM_INVALID, "value_dim", "like head_dim with sinks", facts["value_dim"])
    return None


OF_SINKS = (limit.Custom("sinks: bfloat16, at most 64 heads", fitting_sinks), limit.contiguous("sinks"))

_TENSORS = ("query", "key", "value")
_SHAPES = (
    limit.dtype("float16", "bfloat16"),
    limit.dim("head_dim", max=256, multiple=8),
    limit.positive("scale"),  # the maximum is taken before scaling
    limit.last_stride_one(*_TENSORS),
    limit.aligned(16, *_TENSORS),
)

KERNELS = (
    VLLM_FLASH_ATTN_3.kernel(
        "vllm.flash_attn.v3",
        attention.ALL,
        _load_v3,
        limit.arch(min=(9, 0), max=(9, 9)),
        limit.instruction("wgmma"),
        *_SHAPES,
        limit.dim("value_dim", max=256, multiple=8),
        FITTING_VALUES,
        *OF_SINKS,
        OF_LENGTHS,
        layout="BSHD",
        accepts=("causal", "scale", "window", "softcap", "sinks", "return_lse"),
        priority=98,
    ),
    VLLM_FLASH_ATTN_2.kernel(
        "vllm.flash_attn.v2",
        attention.ALL,
        _load_v2,
        *_SHAPES,
        limit.equal("value_dim", "head_dim"),
        limit.contiguous("kv_lens"),
        *OF_SLOPES,
        WINDOW_WITHOUT_CAUSAL,
        layout="BSHD",
        accepts=("causal", "scale", "window", "softcap", "alibi_slopes", "kv_lens", "return_lse"),
        build_key=variant_of_v2,
        prebuilt=has_machine_code_of_v2,
        cache_folder=driver_cache,
        priority=55,  # an H200 takes 1.5 times what torch's cuDNN takes, and about what torch's flash does
    ),
)
