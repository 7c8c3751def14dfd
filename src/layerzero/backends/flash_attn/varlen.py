"""FlashAttention 2, 3 and 4 over sequences of unlike lengths and over paged caches, through their own packages.

Starts, lengths and block tables are read on the device. FlashAttention 2 and 3 follow their interfaces
(flash_attn_varlen_func, flash_attn_with_kvcache, read 2026-11-21) and were not run: their packages are built
from source; vLLM's builds of both were (backends/vllm/paged.py). FlashAttention 4 compiles for a configuration on its
first call; its own Python, 78 us a call on an H200 host, is called here, since block tables move and what it derives of
them was not compared. For one query a sequence it was right in 43 checks there, of pages of up to 64 tokens
(2026-11-23); its caches of float8 want a GPU of compute capability 10.
Library: flash-attn 2.7, flash-attn-3 3.0, flash-attn-4 4.0.0b36, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from layerzero.backends.flash_attn import attention
from layerzero.backends.flash_attn.cute import FLASH_ATTN_4, OF_SINKS, of_v4
from layerzero.backends.shape_cache import stamps
from layerzero.backends.torch.varlen import longest_of_v2, longest_or, longest_queries
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import Limit
from layerzero.ops.attention.reference import with_lse
from layerzero.ops.cascade import FLAT
from layerzero.ops.paged import mixed
from layerzero.ops.ragged import declare as ragged


def _load_ragged(function: Callable[..., Any]) -> Callable[..., Any]:
    """FlashAttention 2 and 3 differ in what only one of them takes, which the other's kernel does not accept."""

    def run(
        *tensors: Tensor,
        alibi_slopes: Tensor | None = None,
        return_lse: bool = False,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **scores: Any,
    ) -> Any:
        query, key, value, starts_q, starts_k = tensors
        own = {} if alibi_slopes is None else {"alibi_slopes": alibi_slopes.float()}
        longest = longest_queries(max_seqlen_q, len(query), len(starts_q) - 1), longest_or(max_seqlen_k, len(key))
        acting = bool(scores.get("causal")), scores.get("window")
        result = function(
            *(query, key, value, starts_q, starts_k, longest[0], longest_of_v2(*longest, *acting)),
            return_attn_probs=return_lse,
            **own,
            **attention.in_its_words(**scores),
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


def _over_pages(function: Callable[..., Any], table: str) -> Callable[..., Any]:
    """FlashAttention 2 and 3 over pages, for one query a sequence or, by their starts, for several.

    They differ in the name of the block table.
    """

    def run(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lens: Tensor,
        *starts: Tensor,
        return_lse: bool = False,
        max_seqlen_q: int | None = None,
        **scores: Any,
    ) -> Any:
        own: dict[str, Any] = {"cache_seqlens": lens, table: tables, "return_softmax_lse": return_lse}
        if starts:
            own |= {"cu_seqlens_q": starts[0], "max_seqlen_q": longest_or(max_seqlen_q, len(query))}
        result = function(query, keys, values, **own, **attention.in_its_words(**scores))
        return with_lse(*result[:2]) if return_lse else result

    return run


def _load_v2_paged(facts: Facts) -> Callable[..., Any]:
    from flash_attn import flash_attn_with_kvcache

    return _over_pages(flash_attn_with_kvcache, "block_table")


def _load_v3_paged(facts: Facts) -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_with_kvcache

    return _over_pages(flash_attn_with_kvcache, "page_table")


def _load_v4(facts: Facts) -> Callable[..., Any]:
    from flash_attn.cute.interface import _flash_attn_fwd

    forward = attention.kept(_flash_attn_fwd)

    def run(
        *tensors: Tensor,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **scores: Any,
    ) -> Any:
        query, key, value, starts_q, starts_k = tensors
        own = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "learnable_sink": sinks, "return_lse": return_lse}
        longest = {
            "max_seqlen_q": longest_or(max_seqlen_q, len(query)),
            "max_seqlen_k": longest_or(max_seqlen_k, len(key)),
        }
        output, lse, *_ = forward(query, key, value, **own, **longest, **of_v4(**scores))
        return with_lse(output, lse, sinks) if return_lse else output

    return run


def _load_v4_paged(facts: Facts) -> Callable[..., Any]:
    from flash_attn.cute.interface import _flash_attn_fwd

    forward = attention.kept(_flash_attn_fwd)
    capacity = facts.size("max_blocks") * facts.size("page_size")

    def run(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lens: Tensor,
        *starts: Tensor,
        return_lse: bool = False,
        max_seqlen_q: int | None = None,
        max_context_len: int | None = None,
        **scores: Any,
    ) -> Any:
        own: dict[str, Any] = {"seqused_k": lens, "page_table": tables, "return_lse": return_lse}
        own["max_seqlen_k"] = longest_or(max_context_len, capacity)
        if starts:
            own |= {"cu_seqlens_q": starts[0], "max_seqlen_q": longest_or(max_seqlen_q, len(query))}
        output, lse, *_ = forward(query, keys, values, **own, **of_v4(**scores))
        return with_lse(output, lse) if return_lse else output

    return run


def _build_key(facts: Facts) -> Hashable:
    paged = facts.size("page_size") if "block_tables" in facts.tensors else 0
    sizes = *(facts.size(name) for name in ("head_dim", "value_dim", "group")), paged
    window: tuple[int, int] = facts["window"] or (-1, -1)  # type: ignore[assignment]
    sides = tuple(side >= 0 for side in window)
    sinks = facts.tensors.get("sinks")
    flags = facts.get("causal"), sides, facts["softcap"], facts["return_lse"], None if sinks is None else sinks.dtype
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


def _paged(*lens: str) -> tuple[Limit, ...]:
    return (
        *_SHAPES,
        limit.last_stride_one("query", "key_cache", "value_cache", "block_tables"),
        limit.contiguous(*lens),
        limit.aligned(16, "query", "key_cache", "value_cache"),
    )


_PAGED, _ONE_EACH = _paged("context_lens", "cu_seqlens_q"), _paged("context_lens")
_SCORES = ("causal", "scale", "window", "softcap", "return_lse", "max_seqlen_q")
_ACTING = ("scale", "window", "softcap", "return_lse")
_HOPPER = (limit.arch(min=(9, 0), max=(9, 9)), limit.instruction("wgmma"))
_COMPILED: dict[str, Any] = {"jit": True, "build_key": _build_key, "cache_folder": attention.cache_folder}

KERNELS = (
    attention.FLASH_ATTN_3.kernel(
        "flash_attn.v3.ragged",
        ragged.RAGGED,
        _load_v3,
        accepts=(*_SCORES, "max_seqlen_k"),
        limits=(*_HOPPER, *_RAGGED, *attention.WITH_GRADIENTS),
        grad=True,
        priority=91,
    ),
    attention.FLASH_ATTN_2.kernel(
        "flash_attn.v2.ragged",
        ragged.RAGGED,
        _load_v2,
        accepts=(*_SCORES, "max_seqlen_k", "alibi_slopes"),
        limits=(limit.arch(min=(8, 0)), *_RAGGED, *attention.OF_SLOPES, *attention.WITH_GRADIENTS),
        grad=True,
        priority=70,
        priority_since={(9, 0): 54, (12, 0): 70},  # as for dense calls
    ),
    FLASH_ATTN_4.kernel(
        "flash_attn.v4.ragged",
        ragged.RAGGED,
        _load_v4,
        accepts=(*_SCORES, "max_seqlen_k", "sinks"),
        limits=(*_HOPPER, *_RAGGED, *OF_SINKS),
        **_COMPILED,
        priority=50,
    ),
    attention.FLASH_ATTN_3.kernel(
        "flash_attn.v3.paged_tokens",
        mixed.ALL,
        _load_v3_paged,
        layout="NHD",
        accepts=_SCORES,
        limits=(*_HOPPER, *attention.BELOW_TILES, *_PAGED),
        priority=84,
    ),
    FLASH_ATTN_4.kernel(
        "flash_attn.v4.paged_tokens",
        mixed.ALL,
        _load_v4_paged,
        layout="NHD",
        accepts=(*_SCORES, "max_context_len"),
        limits=(*_HOPPER, *attention.BELOW_TILES, *_PAGED),
        **_COMPILED,
        priority=40,
    ),
    attention.FLASH_ATTN_3.kernel(
        "flash_attn.v3.paged",
        FLAT,
        _load_v3_paged,
        layout="NHD",
        accepts=_ACTING,
        limits=(*_HOPPER, *_ONE_EACH),
        priority=84,
    ),
    attention.FLASH_ATTN_2.kernel(
        "flash_attn.v2.paged",
        FLAT,
        _load_v2_paged,
        layout="NHD",
        accepts=_ACTING,
        limits=(limit.arch(min=(8, 0)), limit.dim("page_size", multiple=256), *_ONE_EACH),
        priority=69,
    ),
    FLASH_ATTN_4.kernel(
        "flash_attn.v4.paged",
        FLAT,
        _load_v4_paged,
        layout="NHD",
        accepts=(*_ACTING, "max_context_len"),
        limits=(*_HOPPER, *attention.BELOW_TILES, *_ONE_EACH),
        **_COMPILED,
        priority=40,
    ),
)
