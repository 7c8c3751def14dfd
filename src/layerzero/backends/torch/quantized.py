"""Attention over a cache of float8 or int8 as a torch expression: the pages of a call are gathered, then multiplied.

Only pages that a sequence has are read and widened; what attends then are the expressions for caches of floats.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import CPU_FLASH, FLOATS, kernel
from layerzero.backends.torch.paged import load_cuda, load_each, load_gather
from layerzero.backends.torch.varlen import EACH, FLASH
from layerzero.core import limits as limit
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.operation import Tolerance
from layerzero.ops.attention.declare import TOLERANCE
from layerzero.ops.attention.limits import SdpaEnabled
from layerzero.ops.paged.pages import gathered
from layerzero.ops.paged.quantized import DECODE, PREFILL, dequantized


def _over_gathered(facts: Facts, load: Callable[[Facts], Callable[..., Any]]) -> Callable[..., Any]:
    attend = load(facts)
    page_size = facts.size("page_size")

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *rest: Tensor,
        narrow_query: bool = False,  # allowed, and not done
        **arguments: Any,
    ) -> Any:
        *starts, key_scale, value_scale = rest
        tables = block_tables, context_lens
        codes = gathered(key_cache.view(torch.uint8), value_cache.view(torch.uint8), *tables)
        scales = (key_scale, value_scale) if key_scale.ndim != 3 else gathered(key_scale, value_scale, *tables)
        batch, blocks = len(context_lens), codes[0].shape[1] // page_size
        caches = [
            dequantized(each.view(key_cache.dtype), scale, query.dtype).view(batch * blocks, page_size, *each.shape[2:])
            for each, scale in zip(codes, scales, strict=True)
        ]
        mine = torch.arange(batch * blocks, dtype=torch.int32, device=query.device).view(batch, blocks)
        return attend(query, *caches, mine, context_lens, *starts, **arguments)

    return run


def _gathered_bytes(facts: Facts) -> int:
    """Pages of every sequence as they are, in float32, and in the queries' dtype."""
    tokens = facts.size("batch") * facts.size("max_blocks") * facts.size("page_size")
    width = facts.size("kv_heads") * (facts.size("head_dim") + facts.size("value_dim"))
    return tokens * width * (5 + 3 * facts.tensors["query"].dtype.itemsize)


_ACCEPTS = ("causal", "scale", "window", "return_lse", "narrow_query")
_ROUNDED = {name: Tolerance(3 * each.rtol, 3 * each.atol) for name, each in TOLERANCE.items()}
"""Keys, values and weights are each rounded once more: 2.02 times the operation's own was the farthest of 30,000 random
calls (float16, codes of float8_e5m2 with a scale for each token, 2026-11-24)."""

_COMMON: dict[str, Any] = {
    "tolerance": {dtype_name(dtype): each for dtype, each in _ROUNDED.items()},
    "tolerance_reason": "products of codes and scales are rounded to the queries' dtype before they are attended to",
    "layout": "NHD",
    "workspace_bytes": _gathered_bytes,
}
_CODES = limit.last_stride_one("key_cache", "value_cache")
_GATHER, _EACH, _VARLEN = (functools.partial(_over_gathered, load=load) for load in (load_gather, load_each, load_cuda))

KERNELS = (
    kernel(
        "torch.quantized_gather",
        DECODE.name,
        _GATHER,
        FLOATS,
        limit.positive("scale"),
        SdpaEnabled("math"),
        _CODES,
        accepts=("scale", "window", "narrow_query"),
        deterministic=False,
        priority=20,
        **_COMMON,
    ),
    kernel(
        "torch.quantized_sdpa",
        PREFILL.name,
        _EACH,
        *CPU_FLASH,
        limit.last_stride_one("query"),
        _CODES,
        accepts=_ACCEPTS,
        graph_safe=False,
        priority=20,
        **_COMMON,
    ),
    kernel(
        "torch.quantized_each",
        PREFILL.name,
        _EACH,
        *EACH,
        _CODES,
        accepts=("causal", "scale", "window", "narrow_query"),
        deterministic=False,
        graph_safe=False,
        priority=15,
        **_COMMON,
    ),
    kernel(
        "torch.quantized_varlen",
        PREFILL.name,
        _VARLEN,
        *FLASH,
        limit.last_stride_one("query"),
        limit.aligned(16, "query"),
        limit.contiguous("context_lens", "cu_seqlens_q"),
        _CODES,
        accepts=(*_ACCEPTS, "max_context_len", "max_seqlen_q"),
        deterministic=False,
        priority=20,
        **_COMMON,
    ),
)
