"""FlashAttention 2, 3 and 4 over sequences of unlike lengths, through their own packages.

Starts, lengths and block tables are read on the device. FlashAttention 2 and 3 follow their interfaces
(flash_attn_varlen_func, and flash_attn_with_kvcache of 3, read 2026-11-22) and were not run: their packages are built
from source; vLLM's builds of both were. FlashAttention 4 compiles for a configuration on its
first call; its own Python, 78 us a call on an H200 host, is called here. Where a page holds a whole tile of keys it
multiplies what lies beyond a sequence by 0, and a NaN there reaches the result (flash_attn/cute/interface.py of
4.0.0b36): larger pages are refused.
Library: flash-attn 2.7, flash-attn-3 3.0, flash-attn-4 4.0.0b36, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from layerzero.backends.compiler_caches import stamps
from layerzero.backends.flash_attn.attention import (
    ALIBI_WITHOUT_LSE,
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    WITH_GRADIENTS,
    cache_folder,
    kept,
)
from layerzero.backends.flash_attn.cute import FLASH_ATTN_4
from layerzero.backends.torch.varlen import longest_or, longest_queries
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.attention.reference import with_lse
from layerzero.ops.paged import mixed
from layerzero.ops.ragged import declare as ragged


def _load_ragged(function: Callable[..., Any]) -> Callable[..., Any]:
    """FlashAttention 2 and 3 differ in what only one of them takes, which the other's kernel does not accept."""

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        return_lse: bool = False,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Any:
        own = {} if alibi_slopes is None else {"alibi_slopes": alibi_slopes.float()}
        result = function(
            *(query, key, value, cu_seqlens_q, cu_seqlens_k),
            *(longest_queries(max_seqlen_q, len(query), len(cu_seqlens_q) - 1), longest_or(max_seqlen_k, len(key))),
            softmax_scale=scale,
            causal=causal,
            window_size=window or (-1, -1),
            softcap=softcap or 0.0,
            return_attn_probs=return_lse,
            **own,
        )
        if return_lse:
            return with_lse(*result[:2])
        return result[0] if isinstance(result, tuple) else result

    return run


def _load_v2(facts: Facts) -> Callable[..., Any]:
    from flash_attn import flash_attn_varlen_func

    return _load_ragged(flash_attn_varlen_func)


def _load_v3(facts: Facts) -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_varlen_func

    return _load_ragged(flash_attn_varlen_func)


def _load_v3_paged(facts: Facts) -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_with_kvcache

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        cu_seqlens_q: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        max_seqlen_q: int | None = None,
    ) -> Any:
        result = flash_attn_with_kvcache(
            query,
            key_cache,
            value_cache,
            cache_seqlens=context_lens,
            page_table=block_tables,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=longest_or(max_seqlen_q, len(query)),
            softmax_scale=scale,
            causal=causal,
            window_size=window or (-1, -1),
            softcap=softcap or 0.0,
            return_softmax_lse=return_lse,
        )
        return with_lse(*result[:2]) if return_lse else result

    return run


def _load_v4(facts: Facts) -> Callable[..., Any]:
    from flash_attn.cute.interface import _flash_attn_fwd

    forward = kept(_flash_attn_fwd)

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **scores: Any,
    ) -> Any:
        output, lse, *_ = forward(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=longest_or(max_seqlen_q, len(query)),
            max_seqlen_k=longest_or(max_seqlen_k, len(key)),
            learnable_sink=sinks,
            return_lse=return_lse,
            **_of_v4(**scores),
        )
        return with_lse(output, lse) if return_lse else output

    return run


def _of_v4(
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
) -> dict[str, Any]:
    """What acts on scores, in the words of FlashAttention 4."""
    left, right = window or (-1, -1)
    return {
        "causal": causal,
        "softmax_scale": scale,
        "softcap": softcap,
        "window_size_left": left if left >= 0 else None,
        "window_size_right": right if right >= 0 else None,
    }


def _load_v4_paged(facts: Facts) -> Callable[..., Any]:
    from flash_attn.cute.interface import _flash_attn_fwd

    forward = kept(_flash_attn_fwd)
    capacity = facts.size("max_blocks") * facts.size("page_size")

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        cu_seqlens_q: Tensor,
        *,
        return_lse: bool = False,
        max_seqlen_q: int | None = None,
        max_context_len: int | None = None,
        **scores: Any,
    ) -> Any:
        output, lse, *_ = forward(
            query,
            key_cache,
            value_cache,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=context_lens,
            max_seqlen_q=longest_or(max_seqlen_q, len(query)),
            max_seqlen_k=longest_or(max_context_len, capacity),
            page_table=block_tables,
            return_lse=return_lse,
            **_of_v4(**scores),
        )
        return with_lse(output, lse) if return_lse else output

    return run


def _build_key(facts: Facts) -> Hashable:
    """What FlashAttention 4's compile key reads of such a call."""
    paged = facts.size("page_size") if "block_tables" in facts.tensors else 0
    sizes = *(facts.size(name) for name in ("head_dim", "value_dim", "group")), paged
    window: tuple[int, int] = facts["window"] or (-1, -1)  # type: ignore[assignment]
    sides = tuple(side >= 0 for side in window)
    sinks = facts.tensors.get("sinks")
    flags = facts["causal"], sides, facts["softcap"], facts["return_lse"], None if sinks is None else sinks.dtype
    return facts.device.sm, facts["dtype"], *sizes, *flags, stamps()


_SHAPES = (
    limit.platform("cuda"),
    limit.dtype("float16", "bfloat16"),
    limit.dim("head_dim", min=16, max=256, multiple=8),
    limit.equal("value_dim", "head_dim"),
    limit.positive("scale"),
)
_RAGGED = (
    *_SHAPES,
    limit.last_stride_one("query", "key", "value"),
    limit.aligned(16, "query", "key", "value"),
    limit.contiguous("cu_seqlens_q", "cu_seqlens_k"),
)
_PAGED = (
    *_SHAPES,
    limit.last_stride_one("query", "key_cache", "value_cache"),
    limit.last_stride_one("block_tables"),
    limit.contiguous("context_lens", "cu_seqlens_q"),
    limit.aligned(16, "query", "key_cache", "value_cache"),
)
_SCORES = ("causal", "scale", "window", "softcap", "return_lse", "max_seqlen_q")
_HOPPER = (limit.arch(min=(9, 0), max=(9, 9)), limit.instruction("wgmma"))

KERNELS = (
    FLASH_ATTN_3.kernel(
        "flash_attn.v3.ragged",
        ragged.RAGGED,
        _load_v3,
        accepts=(*_SCORES, "max_seqlen_k"),
        limits=(*_HOPPER, *_RAGGED, *WITH_GRADIENTS),
        grad=True,
        priority=91,
    ),
    FLASH_ATTN_2.kernel(
        "flash_attn.v2.ragged",
        ragged.RAGGED,
        _load_v2,
        accepts=(*_SCORES, "max_seqlen_k", "alibi_slopes"),
        limits=(limit.arch(min=(8, 0)), *_RAGGED, ALIBI_WITHOUT_LSE, *WITH_GRADIENTS),
        grad=True,
        priority=70,
        priority_since={(9, 0): 54, (12, 0): 70},  # as for dense calls
    ),
    FLASH_ATTN_4.kernel(
        "flash_attn.v4.ragged",
        ragged.RAGGED,
        _load_v4,
        accepts=(*_SCORES, "max_seqlen_k", "sinks"),
        limits=(*_HOPPER, *_RAGGED, limit.contiguous("sinks")),
        jit=True,
        build_key=_build_key,
        cache_folder=cache_folder,
        priority=50,
    ),
    FLASH_ATTN_3.kernel(
        "flash_attn.v3.paged_tokens",
        mixed.ALL,
        _load_v3_paged,
        layout="NHD",
        accepts=_SCORES,
        limits=(*_HOPPER, *_PAGED),
        priority=84,
    ),
    FLASH_ATTN_4.kernel(
        "flash_attn.v4.paged_tokens",
        mixed.ALL,
        _load_v4_paged,
        layout="NHD",
        accepts=(*_SCORES, "max_context_len"),
        limits=(*_HOPPER, limit.dim("page_size", max=64), *_PAGED),
        jit=True,
        build_key=_build_key,
        cache_folder=cache_folder,
        priority=40,
    ),
)
