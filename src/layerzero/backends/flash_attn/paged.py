"""FlashAttention 2, 3 and 4 over a paged cache, through their own packages.

All follow the block table in the kernel and read lengths on the device. FlashAttention 2 and 3 follow their
interfaces (flash_attn_with_kvcache, read 2026-11-21) and were not run: their packages are built from source; vLLM's
builds of both were (backends/vllm/paged.py). FlashAttention 4 compiles for a configuration on its first call; its own
Python, 78 us a call on an H200 host, is called here, since block tables move and what it derives of them was not
compared. It was right in 43 checks there (2026-11-23). Its caches of float8 want a GPU of compute capability 10.
Library: flash-attn 2.7, flash-attn-3 3.0, flash-attn-4 4.0.0b36, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from layerzero.backends.compiler_caches import stamps
from layerzero.backends.flash_attn.attention import FLASH_ATTN_2, FLASH_ATTN_3, cache_folder, kept
from layerzero.backends.flash_attn.cute import FLASH_ATTN_4
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.attention.reference import lse_of_hidden_rows
from layerzero.ops.cascade import FLAT


def _with_lse(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return output, lse_of_hidden_rows(output.transpose(1, 2), lse)


def _load_with_cache(facts: Facts, function: Callable[..., Any], table: str) -> Callable[..., Any]:
    """FlashAttention 2 and 3 differ in the name of the block table."""

    def attend(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        result = function(
            query,
            key_cache,
            value_cache,
            cache_seqlens=context_lens,
            softmax_scale=scale,
            causal=False,
            window_size=window or (-1, -1),
            softcap=softcap or 0.0,
            return_softmax_lse=return_lse,
            **{table: block_tables},
        )
        return _with_lse(*result[:2]) if return_lse else result

    return attend


def _load_v2(facts: Facts) -> Callable[..., Any]:
    from flash_attn import flash_attn_with_kvcache

    return _load_with_cache(facts, flash_attn_with_kvcache, "block_table")


def _load_v3(facts: Facts) -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_with_kvcache

    return _load_with_cache(facts, flash_attn_with_kvcache, "page_table")


def _load_v4(facts: Facts) -> Callable[..., Any]:
    from flash_attn.cute.interface import _flash_attn_fwd

    forward = kept(_flash_attn_fwd)
    longest = facts.size("max_blocks") * facts.size("page_size")

    def v4(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        max_context_len: int | None = None,
    ) -> Any:
        left, right = window or (-1, -1)
        output, lse, *_ = forward(
            query,
            key_cache,
            value_cache,
            seqused_k=context_lens,
            max_seqlen_k=longest if max_context_len is None else min(max_context_len, longest),
            page_table=block_tables,
            softmax_scale=scale,
            causal=False,
            softcap=softcap,
            window_size_left=left if left >= 0 else None,
            window_size_right=right if right >= 0 else None,
            return_lse=return_lse,
        )
        return _with_lse(output, lse) if return_lse else output

    return v4


def _build_key(facts: Facts) -> Hashable:
    """What FlashAttention 4's compile key reads of a paged decode."""
    sizes = tuple(facts.size(name) for name in ("head_dim", "value_dim", "page_size", "group"))
    flags = facts["window"] is not None, facts["softcap"], facts["return_lse"]
    return facts.device.sm, facts["dtype"], *sizes, *flags, stamps()


_SHAPES = (
    limit.platform("cuda"),
    limit.dtype("float16", "bfloat16"),
    limit.dim("head_dim", min=16, max=256, multiple=8),
    limit.equal("value_dim", "head_dim"),
    limit.positive("scale"),
    limit.last_stride_one("query", "key_cache", "value_cache"),
    limit.last_stride_one("block_tables"),
    limit.contiguous("context_lens"),
    limit.aligned(16, "query", "key_cache", "value_cache"),
)
_ACCEPTS = ("scale", "window", "softcap", "return_lse")
_HOPPER = (limit.arch(min=(9, 0), max=(9, 9)), limit.instruction("wgmma"))

KERNELS = (
    FLASH_ATTN_3.kernel(
        "flash_attn.v3.paged", FLAT, _load_v3, layout="NHD", accepts=_ACCEPTS, limits=(*_HOPPER, *_SHAPES), priority=84
    ),
    FLASH_ATTN_2.kernel(
        "flash_attn.v2.paged",
        FLAT,
        _load_v2,
        layout="NHD",
        accepts=_ACCEPTS,
        limits=(limit.arch(min=(8, 0)), limit.dim("page_size", multiple=256), *_SHAPES),
        priority=69,
    ),
    FLASH_ATTN_4.kernel(
        "flash_attn.v4.paged",
        FLAT,
        _load_v4,
        layout="NHD",
        accepts=(*_ACCEPTS, "max_context_len"),
        limits=(*_HOPPER, *_SHAPES),
        jit=True,
        build_key=_build_key,
        cache_folder=cache_folder,
        priority=40,
    ),
)
