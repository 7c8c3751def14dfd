"""vLLM's kernels for a cache of float8: FlashAttention 3 over its pages, and the append that divides by a scale.

FlashAttention 3 multiplies float8 by float8: queries are rounded to float8 here, by a scale for each key head (in a
decode each sequence's own), and probabilities in the kernel. So it is legal only where the caller allows it. Scales of
queries, keys and values go in as (B, K), which may be views of one number. Only e4m3 was compiled, and its output is
bfloat16. The append writes e4m3 and e5m2 by one scale a tensor. Attention was right in 187 checks on an H200, the
append in 3 (2026-11-23).
Argument orders are those of vllm_flash_attn/flash_attn_interface.py in vllm 0.20.0 and of csrc/cache_kernels.cu.
Library: vllm 0.20, Apache-2.0; FlashAttention, BSD-3-Clause, arXiv:2407.08608.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flash_attn.attention import BELOW_TILES
from layerzero.backends.torch.varlen import longest_or
from layerzero.backends.vllm.library import VLLM, VLLM_FLASH_ATTN_3, operators
from layerzero.backends.vllm.paged import STARTS, WRITES, starts_key
from layerzero.backends.vllm.varlen import Keys, acting, forward_of_v3
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import Limit
from layerzero.core.operation import Tolerance
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention.reference import with_lse
from layerzero.ops.paged.quantized import DECODE, PREFILL, SCALES_OF_HEADS, by_key_head, of_heads, scales_of_heads

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max


def in_float8(query: Tensor, kv_heads: int, *, each: bool) -> tuple[Tensor, Tensor]:
    """Queries (T, H, D) in e4m3 and what they are multiples of, for the queries of a key head: (T, K), or (K,) of all.

    A NaN stays one, and an infinity becomes one; neither makes a scale.
    """
    heads = by_key_head(query, kv_heads).float()
    largest = heads.abs().nan_to_num(0.0, 0.0, 0.0).amax((2, 3) if each else (0, 2, 3))
    scale = (largest / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    codes = heads / scale.unsqueeze(-1).unsqueeze(-1)
    return codes.masked_fill(codes.isinf(), float("nan")).to(_E4M3).flatten(1, 2), scale


def _load(facts: Facts) -> Callable[..., Any]:
    forward, single = forward_of_v3(), facts["operation"] == DECODE.name
    kv_heads, page_size = facts.size("kv_heads"), facts.size("page_size")
    own = STARTS.get(*starts_key(facts), capturing=bool(facts["capturing"])) if single else None
    scored = acting(facts)

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *rest: Tensor,
        causal: bool = True,
        return_lse: bool = False,
        max_context_len: int | None = None,
        max_seqlen_q: int | None = None,
        **acting_too: Any,
    ) -> Any:
        *given, key_scale, value_scale = rest
        starts, longest = (own, 1) if own is not None else (given[0], longest_or(max_seqlen_q, len(query)))
        codes, query_scale = in_float8(query.squeeze(1) if single else query, kv_heads, each=single)
        shape = len(context_lens), kv_heads
        of_keys, of_values = of_heads(key_scale, kv_heads), of_heads(value_scale, kv_heads)
        scales = query_scale.expand(shape), of_keys.expand(shape), of_values.expand(shape)
        bound = longest_or(max_context_len, block_tables.shape[1] * page_size)
        keys = Keys(key_cache, value_cache, None, context_lens, block_tables, bound)
        scores = scored(causal=causal and not single, **acting_too)._replace(descales=scales)
        output, lse = forward(codes, starts, longest, keys, scores, None)
        output = output.to(query.dtype)
        if not return_lse:
            return output.unsqueeze(1) if single else output
        output, lse = with_lse(output, lse)
        return (output.unsqueeze(1), lse.t().unsqueeze(-1)) if single else (output, lse)

    return run


def load_append_codes(facts: Facts) -> Callable[..., None]:
    """Its write of new tokens into slots, divided by one scale for keys and one for values."""
    operator = operators("_C.abi3.so", "_C_cache_ops", "_C").reshape_and_cache_flash.default
    form = {"float8_e4m3": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}[str(facts["cache_dtype"])]

    def append(key: Tensor, value: Tensor, *pages: Tensor) -> None:
        key_cache, value_cache, slot_mapping, key_scale, value_scale = pages
        caches = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        operator(key, value, *caches, slot_mapping, form, key_scale.view(1), value_scale.view(1))  # one shape for both

    return append


def _one_scale(facts: Facts) -> Reason | None:
    for name in ("key_scale", "value_scale"):
        shape = facts.tensors[name].shape
        if shape not in ((), (1,)):
            return Reason(ReasonCode.CONSTRAINT_FAILED, name, "one number", f"shape {shape}")
    return None


OF_CODES: tuple[Limit, ...] = (
    limit.one_of("cache_dtype", "float8_e4m3", "float8_e5m2"),
    limit.Custom("scales: one number", _one_scale),
)
"""What the write demands of cache and scales."""

_ROUNDED = Tolerance(0.125, 0.25)
_LIMITS = (
    limit.arch(min=(9, 0), max=(9, 9)),
    limit.instruction("wgmma"),
    limit.dtype("float16", "bfloat16"),
    limit.one_of("narrow_query", True),
    limit.one_of("cache_dtype", "float8_e4m3"),
    limit.Custom(SCALES_OF_HEADS, scales_of_heads),
    limit.dim("head_dim", min=64, max=256, multiple=16),
    limit.equal("value_dim", "head_dim"),
    limit.positive("scale"),
    limit.last_stride_one("key_cache", "value_cache", "block_tables"),
    limit.aligned(16, "key_cache", "value_cache"),
)
_ACCEPTS = ("scale", "window", "softcap", "return_lse", "max_context_len")
_OF_V3: dict[str, Any] = {
    "layout": "NHD",
    "implies": ("narrow_query",),
    "tolerance": {"float16": _ROUNDED, "bfloat16": _ROUNDED},
    "tolerance_reason": "queries and probabilities are rounded to three bits of mantissa, which the caller allows",
}

KERNELS = (
    VLLM_FLASH_ATTN_3.kernel(
        "vllm.flash_attn.v3.quantized",
        DECODE.name,
        _load,
        accepts=_ACCEPTS,
        limits=(*_LIMITS, limit.contiguous("context_lens"), STARTS.before_capture("its tensor of starts", starts_key)),
        priority=75,
        **_OF_V3,
    ),
    VLLM_FLASH_ATTN_3.kernel(
        "vllm.flash_attn.v3.quantized_tokens",
        PREFILL.name,
        _load,
        accepts=("causal", *_ACCEPTS, "max_seqlen_q"),
        limits=(*_LIMITS, *BELOW_TILES, limit.contiguous("context_lens", "cu_seqlens_q")),
        priority=75,
        **_OF_V3,
    ),
    VLLM.kernel(
        "vllm.append_codes",
        "kv.append.quantized",
        load_append_codes,
        limit.dtype("float32", "float16", "bfloat16"),
        *OF_CODES,
        *WRITES,
        limit.aligned(16, "key", "value", "key_cache", "value_cache"),
        layout="NHD",
        priority=80,
    ),
)
