"""vLLM's builds of FlashAttention 2 and 3 for sequences of unlike lengths, and their kernels for keys without pages.

Starts, lengths and block tables are read on the device, so nothing is planned on the host; longest lengths only size
the launch. What FlashAttention 3 schedules it computes in the call, in memory of its own. The same calls over pages are
in ``paged_tokens``, of float8 in ``quantized``, of blocks in ``sparse``, of a shared prefix in ``cascade``.
Argument orders are those of vllm_flash_attn/flash_attn_interface.py in vllm 0.20.0.
Library: vllm 0.20, Apache-2.0; FlashAttention, BSD-3-Clause, arXiv:2307.08691 and arXiv:2407.08608.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from layerzero.backends.flash_attn.attention import ALIBI_WITHOUT_LSE
from layerzero.backends.torch.varlen import longest_or, longest_queries
from layerzero.backends.vllm.flash_attn import FITTING_VALUES, OF_SINKS, fitting_values, with_lse_of_sinks
from layerzero.backends.vllm.library import (
    VLLM_FLASH_ATTN_2,
    VLLM_FLASH_ATTN_3,
    driver_cache,
    has_machine_code_of_v2,
    operators,
    variant_of_tokens_v2,
)
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.limit import Limit
from layerzero.ops.ragged import declare as ragged


class Keys(NamedTuple):
    """Keys and values, and how they are divided: by starts, or by lengths and a block table."""

    keys: Tensor
    values: Tensor
    starts: Tensor | None
    lens: Tensor | None
    table: Tensor | None
    longest: int


class Scores(NamedTuple):
    """What acts on the scores."""

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    descales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    """Of queries, keys and values in float8, what their numbers are multiples of: (B, K), read by version 3 alone."""


class Forward(Protocol):
    """Attention of queries (T, H, D), by their starts and the longest sequence: (T, H, D_v) and (H, T)."""

    def __call__(
        self, query: Tensor, starts: Tensor, longest: int, keys: Keys, scores: Scores, out: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


def forward_of_v2() -> Forward:
    """Version 2's call for unlike lengths."""
    operator = operators("vllm_flash_attn/_vllm_fa2_C.abi3.so", "_vllm_fa2_C").varlen_fwd.default

    def forward(
        query: Tensor, starts: Tensor, longest: int, keys: Keys, scores: Scores, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        slopes = None if scores.slopes is None else scores.slopes.float()
        starts_k = starts if keys.starts is None else keys.starts  # read only without lengths
        longest = longest_queries(longest, len(query), len(starts) - 1)
        output, lse, *_ = operator(
            *(query, keys.keys, keys.values, out, starts, starts_k, keys.lens, None, keys.table, slopes),
            *(longest, keys.longest, 0.0, scores.scale, False, scores.causal, *scores.window, scores.softcap),
            *(False, 0, None),
        )
        return output, lse

    return forward


def forward_of_v3() -> Forward:
    """Version 3's; it takes nothing else."""
    operator = operators("vllm_flash_attn/_vllm_fa3_C.abi3.so", "_vllm_fa3_C").fwd.default

    def forward(
        query: Tensor, starts: Tensor, longest: int, keys: Keys, scores: Scores, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        output, lse, *_ = operator(
            *(query, keys.keys, keys.values, None, None, None, out, starts, keys.starts, None, None, keys.lens),
            *(longest, keys.longest, keys.table, None, None),
            *(None, None, None, *scores.descales, scores.scale, scores.causal, *scores.window, scores.softcap),
            *(True, None, 0, None, 0, scores.sinks, 1, 0, None),
        )
        return output, lse

    return forward


def _load_ragged(facts: Facts, library: Callable[[], Forward]) -> Callable[..., Any]:
    forward, default = library(), float(facts.size("head_dim") ** -0.5)

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
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        return_lse: bool = False,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Any:
        keys = Keys(key, value, cu_seqlens_k, None, None, longest_or(max_seqlen_k, len(key)))
        scores = Scores(
            default if scale is None else scale, causal, window or (-1, -1), softcap or 0.0, alibi_slopes, sinks
        )
        longest = longest_or(max_seqlen_q, len(query))
        output, lse = forward(query, cu_seqlens_q, longest, keys, scores, None)
        return with_lse_of_sinks(output, lse, sinks) if return_lse else output

    return run


def shapes(*tensors: str) -> tuple[Limit, ...]:
    """What both versions demand of queries, keys and values."""
    return (
        limit.platform("cuda"),
        limit.dtype("float16", "bfloat16"),
        limit.dim("head_dim", max=256, multiple=8),
        limit.positive("scale"),
        limit.last_stride_one(*tensors),
        limit.aligned(16, *tensors),
    )


_RAGGED = (*shapes("query", "key", "value"), limit.contiguous("cu_seqlens_q", "cu_seqlens_k"))
_HOPPER = (
    limit.arch(min=(9, 0), max=(9, 9)),
    limit.instruction("wgmma"),
    limit.dim("value_dim", max=256, multiple=8),
    limit.Custom(FITTING_VALUES, fitting_values),
)
_AMPERE = (limit.arch(min=(8, 0)), limit.equal("value_dim", "head_dim"))
OF_SLOPES: tuple[Limit, ...] = (limit.last_stride_one("alibi_slopes"), ALIBI_WITHOUT_LSE)
SCORES = ("causal", "scale", "window", "softcap", "return_lse", "max_seqlen_q")
_PAGES_OF_V2 = limit.dim("page_size", multiple=16)
_NARROWEST = limit.dim("head_dim", min=64)  # of narrower heads it left half of a page unread (H200, 2026-11-21)


class Own(NamedTuple):
    """What all kernels of one version have."""

    backend: Backend
    limits: tuple[Limit, ...]
    build_key: Callable[[Facts], Hashable] | None = None
    prebuilt: Callable[[Facts], bool] | None = None
    cache_folder: Callable[[], Path | None] | None = None


OF_V3 = Own(VLLM_FLASH_ATTN_3, (*_HOPPER, _NARROWEST))
OF_V2 = Own(VLLM_FLASH_ATTN_2, (*_AMPERE, _PAGES_OF_V2), variant_of_tokens_v2, has_machine_code_of_v2, driver_cache)
"""Over pages."""


KERNELS = (
    Kernel(
        id="vllm.flash_attn.v3.ragged",
        operations=ragged.RAGGED,
        backend=VLLM_FLASH_ATTN_3,
        load=functools.partial(_load_ragged, library=forward_of_v3),
        accepts=(*SCORES, "max_seqlen_k", "sinks"),
        limits=(*_HOPPER, *_RAGGED, *OF_SINKS),
        priority=90,
    ),
    Kernel(
        id="vllm.flash_attn.v2.ragged",
        operations=ragged.RAGGED,
        backend=VLLM_FLASH_ATTN_2,
        load=functools.partial(_load_ragged, library=forward_of_v2),
        accepts=(*SCORES, "max_seqlen_k", "alibi_slopes"),
        limits=(*_AMPERE, *_RAGGED, *OF_SLOPES),
        build_key=variant_of_tokens_v2,
        prebuilt=has_machine_code_of_v2,
        cache_folder=driver_cache,
        priority=55,
    ),
)
