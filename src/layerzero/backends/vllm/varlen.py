"""vLLM's builds of FlashAttention 2 and 3 for sequences of unlike lengths, and their kernels for keys without pages.

Starts, lengths and block tables are read on the device, so nothing is planned on the host; longest lengths only size
the launch. What FlashAttention 3 schedules it computes in the call, in memory of its own. Calls over pages of float8
are in ``quantized``, of blocks and behind a shared prefix in ``paged``.
Argument orders are those of vllm_flash_attn/flash_attn_interface.py in vllm 0.20.0.

vLLM's builds of FlashAttention 2 and 3 over the pages of sequences that have several queries each.

A mixed batch may run as it is, or as a decode call of the first sequences and a prefill call of the rest: kernels for
one query a sequence split long contexts and pack the heads of a group, which a call with longer ones does not.

Sinks (GPT-OSS) and slopes (MPT, BLOOM) have kernels of their own, which take no call without them: they were written
after the libraries' sources where no GPU was, and prove themselves on a machine before they run there. Version 3 adds a
sink to the sum of the first part of a context that it splits, in bfloat16, for at most 64 heads. Version 2 adds slopes
in the kernel that follows tables, and splits no context then, so that taking decodes apart would gain nothing.
Sources: hopper/flash_api.cpp, hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp and csrc/flash_attn/flash_api.cpp of
vllm-project/flash-attention (6bf4ce25, read 2026-11-24).
Library: vllm 0.20, Apache-2.0; FlashAttention, BSD-3-Clause, arXiv:2307.08691 and arXiv:2407.08608; ALiBi,
arXiv:2108.12409; sinks, arXiv:2309.17453.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from layerzero.backends.flash_attn.attention import BELOW_TILES, OF_SLOPES
from layerzero.backends.shape_cache import driver_cache
from layerzero.backends.torch.varlen import longest_of_v2, longest_or, longest_queries
from layerzero.backends.vllm.flash_attn import FITTING_VALUES, OF_SINKS
from layerzero.backends.vllm.library import (
    VLLM_FLASH_ATTN_2,
    VLLM_FLASH_ATTN_3,
    has_machine_code_of_v2,
    operators,
    variant_of_tokens_v2,
)
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel, Trust
from layerzero.core.limit_kinds import Limit
from layerzero.ops.attention.reference import with_lse
from layerzero.ops.paged import mixed
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


def forward_of_v2(splits: int = 0) -> Forward:
    """Version 2's call for unlike lengths; ``splits`` of the keys, 0 as many as the library thinks best."""
    operator = operators("vllm_flash_attn/_vllm_fa2_C.abi3.so", "_vllm_fa2_C").varlen_fwd.default

    def forward(
        query: Tensor, starts: Tensor, longest: int, keys: Keys, scores: Scores, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        slopes = None if scores.slopes is None else scores.slopes.float()
        starts_k = starts if keys.starts is None else keys.starts  # read only without lengths
        longest = longest_queries(longest, len(query), len(starts) - 1)
        longest_k = longest_of_v2(longest, keys.longest, scores.causal, scores.window)
        output, lse, *_ = operator(
            *(query, keys.keys, keys.values, out, starts, starts_k, keys.lens, None, keys.table, slopes),
            *(longest, longest_k, 0.0, scores.scale, False, scores.causal, *scores.window, scores.softcap),
            *(False, splits, None),
        )
        return output, lse

    return forward


def forward_of_v3(splits: int = 0) -> Forward:
    """Version 3's; it takes nothing else."""
    operator = operators("vllm_flash_attn/_vllm_fa3_C.abi3.so", "_vllm_fa3_C").fwd.default

    def forward(
        query: Tensor, starts: Tensor, longest: int, keys: Keys, scores: Scores, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        output, lse, *_ = operator(
            *(query, keys.keys, keys.values, None, None, None, out, starts, keys.starts, None, None, keys.lens),
            *(longest, keys.longest, keys.table, None, None),
            *(None, None, None, *scores.descales, scores.scale, scores.causal, *scores.window, scores.softcap),
            *(True, None, splits, None, 0, scores.sinks, 1, 0, None),
        )
        return output, lse

    return forward


def acting(facts: Facts) -> Callable[..., Scores]:
    """Makes the scores of a call of its arguments; the scale is that of the head dim where none is given."""
    default = float(facts.size("head_dim") ** -0.5)

    def made(
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Scores:
        scale = default if scale is None else scale
        return Scores(scale, causal, window or (-1, -1), softcap or 0.0, alibi_slopes, sinks)

    return made


def load_ragged(facts: Facts, library: Callable[[], Forward]) -> Callable[..., Any]:
    """Sequences of unlike lengths, one after the other."""
    forward, scored = library(), acting(facts)

    def run(
        *tensors: Tensor,
        return_lse: bool = False,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **given: Any,
    ) -> Any:
        query, key, value, starts_q, starts_k = tensors
        keys = Keys(key, value, starts_k, None, None, longest_or(max_seqlen_k, len(key)))
        scores = scored(**given)
        output, lse = forward(query, starts_q, longest_or(max_seqlen_q, len(query)), keys, scores, None)
        return with_lse(output, lse, scores.sinks) if return_lse else output

    return run


HEADS = (limit.dtype("float16", "bfloat16"), limit.dim("head_dim", max=256, multiple=8), limit.positive("scale"))


def shapes(*tensors: str) -> tuple[Limit, ...]:
    """What both versions demand of queries, keys and values."""
    return (*HEADS, limit.last_stride_one(*tensors), limit.aligned(16, *tensors))


_RAGGED = (*shapes("query", "key", "value"), limit.contiguous("cu_seqlens_q", "cu_seqlens_k"))
HOPPER = (
    limit.arch(min=(9, 0), max=(9, 9)),
    limit.instruction("wgmma"),
    limit.dim("value_dim", max=256, multiple=8),
    FITTING_VALUES,
)
AMPERE = limit.equal("value_dim", "head_dim")
SCORES = ("causal", "scale", "window", "softcap", "return_lse", "max_seqlen_q")
_PAGES_OF_V2 = limit.dim("page_size", multiple=16)
_NARROWEST = limit.dim("head_dim", min=64)  # of narrower heads it left half of a page unread (H200, 2026-11-21)


class Own(NamedTuple):
    """What all kernels of one version have over pages; ``fields`` are those of ``Kernel``."""

    backend: Backend
    forward: Callable[..., Forward]
    limits: tuple[Limit, ...]
    fields: Mapping[str, Any]


COMPILED_V2: dict[str, Any] = {
    "build_key": variant_of_tokens_v2,
    "prebuilt": has_machine_code_of_v2,
    "cache_folder": driver_cache,
}
OF_V3 = Own(VLLM_FLASH_ATTN_3, forward_of_v3, (*HOPPER, _NARROWEST), {})
OF_V2 = Own(VLLM_FLASH_ATTN_2, forward_of_v2, (AMPERE, _PAGES_OF_V2), COMPILED_V2)


def _into(
    out: Tensor, forward: Forward, query: Tensor, starts: Tensor, longest: int, keys: Keys, scores: Scores
) -> Tensor:
    """Write the output where it belongs; version 2 swaps heads of one query in a copy, which it returns instead."""
    got, lse = forward(query, starts, longest, keys, scores, out)
    if got.data_ptr() != out.data_ptr():
        out.copy_(got.view_as(out))
    return lse


def load_paged(facts: Facts, library: Callable[[], Forward], split: bool) -> Callable[..., Any]:
    """Sequences over pages; decodes in a call of their own where ``split``."""
    forward, scored = library(), acting(facts)
    heads, value_dim, page_size = facts.size("heads"), facts.size("value_dim"), facts.size("page_size")

    def run(
        query: Tensor,
        *pages: Tensor,
        return_lse: bool = False,
        max_context_len: int | None = None,
        max_seqlen_q: int | None = None,
        decodes: int | None = None,
        **given: Any,
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens, cu_seqlens_q = pages
        scores = scored(**given)
        bound = longest_or(max_context_len, block_tables.shape[1] * page_size)
        longest = longest_or(max_seqlen_q, len(query))
        keys = Keys(key_cache, value_cache, None, context_lens, block_tables, bound)
        count = decodes or 0
        if not split or count == 0 or count == len(context_lens):
            output, lse = forward(query, cu_seqlens_q, longest, keys, scores, None)
            return with_lse(output, lse, scores.sinks) if return_lse else output
        output = query.new_empty((len(query), heads, value_dim))
        first = keys._replace(lens=context_lens[:count], table=block_tables[:count])
        rest = keys._replace(lens=context_lens[count:], table=block_tables[count:])
        starts = cu_seqlens_q[count:] - count
        lse = _into(output[:count], forward, query[:count], cu_seqlens_q[: count + 1], 1, first, scores)
        lse_of_rest = _into(output[count:], forward, query[count:], starts, longest, rest, scores)
        return with_lse(output, torch.cat((lse, lse_of_rest), 1), scores.sinks) if return_lse else output

    return run


PAGED = (
    *shapes("query", "key_cache", "value_cache"),
    limit.last_stride_one("block_tables"),
    limit.contiguous("context_lens", "cu_seqlens_q"),
)


def _over_pages(
    own: Own, name: str, priority: int, *, split: bool = False, bias: str = "", of_bias: tuple[Limit, ...] = ()
) -> Kernel:
    """A kernel for calls without biases, or for those alone that have this one.

    Slopes may be each sequence's own, which nothing here divides among two calls: no kernel that splits takes them.
    """
    return own.backend.kernel(
        name,
        mixed.MIXED_PAGED if split else mixed.ALL,
        functools.partial(load_paged, library=own.forward, split=split),
        layout="NHD",
        accepts=(*SCORES, "max_context_len", *(("decodes",) if split else ()), *((bias,) if bias else ())),
        limits=(
            *own.limits,
            *(BELOW_TILES if own is OF_V3 else ()),
            *PAGED,
            *((limit.one_of(bias, "float"), *of_bias) if bias else ()),
        ),
        **own.fields,
        priority=priority,
        trust=Trust.UNTRIED if bias else Trust.DECLARED,
    )


KERNELS = (
    VLLM_FLASH_ATTN_3.kernel(
        "vllm.flash_attn.v3.ragged",
        ragged.RAGGED,
        functools.partial(load_ragged, library=forward_of_v3),
        accepts=(*SCORES, "max_seqlen_k", "sinks"),
        limits=(*HOPPER, *_RAGGED, *OF_SINKS),
        priority=90,
    ),
    VLLM_FLASH_ATTN_2.kernel(
        "vllm.flash_attn.v2.ragged",
        ragged.RAGGED,
        functools.partial(load_ragged, library=forward_of_v2),
        accepts=(*SCORES, "max_seqlen_k", "alibi_slopes"),
        limits=(AMPERE, *_RAGGED, *OF_SLOPES),
        **COMPILED_V2,
        priority=55,
    ),
    _over_pages(OF_V3, "vllm.flash_attn.v3.paged_tokens", 85),
    _over_pages(OF_V3, "vllm.flash_attn.v3.paged_split", 84, split=True),
    _over_pages(OF_V2, "vllm.flash_attn.v2.paged_tokens", 55),
    _over_pages(OF_V2, "vllm.flash_attn.v2.paged_split", 54, split=True),
    _over_pages(OF_V3, "vllm.flash_attn.v3.paged_tokens_sinks", 85, bias="sinks", of_bias=OF_SINKS),
    _over_pages(OF_V3, "vllm.flash_attn.v3.paged_split_sinks", 84, split=True, bias="sinks", of_bias=OF_SINKS),
    _over_pages(OF_V2, "vllm.flash_attn.v2.paged_tokens_alibi", 55, bias="alibi_slopes", of_bias=OF_SLOPES),
)
