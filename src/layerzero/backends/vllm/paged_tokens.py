"""vLLM's builds of FlashAttention 2 and 3 over the pages of sequences that have several queries each.

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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.varlen import longest_or
from layerzero.backends.vllm.flash_attn import OF_SINKS, with_lse_of_sinks
from layerzero.backends.vllm.varlen import (
    OF_SLOPES,
    OF_V2,
    OF_V3,
    SCORES,
    Forward,
    Keys,
    Own,
    Scores,
    forward_of_v2,
    forward_of_v3,
    shapes,
)
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel, Trust
from layerzero.core.limit import Limit
from layerzero.ops.paged import mixed


def _into(
    out: Tensor, forward: Forward, query: Tensor, starts: Tensor, longest: int, keys: Keys, scores: Scores
) -> Tensor:
    """Write the output where it belongs; version 2 swaps heads of one query in a copy, which it returns instead."""
    got, lse = forward(query, starts, longest, keys, scores, out)
    if got.data_ptr() != out.data_ptr():
        out.copy_(got.view_as(out))
    return lse


def _load_paged(facts: Facts, library: Callable[[], Forward], split: bool) -> Callable[..., Any]:
    forward, default = library(), float(facts.size("head_dim") ** -0.5)
    heads, value_dim, page_size = facts.size("heads"), facts.size("value_dim"), facts.size("page_size")

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
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        return_lse: bool = False,
        max_context_len: int | None = None,
        max_seqlen_q: int | None = None,
        decodes: int | None = None,
    ) -> Any:
        scores = Scores(
            default if scale is None else scale, causal, window or (-1, -1), softcap or 0.0, alibi_slopes, sinks
        )
        bound = longest_or(max_context_len, block_tables.shape[1] * page_size)
        longest = longest_or(max_seqlen_q, len(query))
        keys = Keys(key_cache, value_cache, None, context_lens, block_tables, bound)
        count = decodes or 0
        if not split or count == 0 or count == len(context_lens):
            output, lse = forward(query, cu_seqlens_q, longest, keys, scores, None)
            return with_lse_of_sinks(output, lse, sinks) if return_lse else output
        output = query.new_empty((len(query), heads, value_dim))
        first = keys._replace(lens=context_lens[:count], table=block_tables[:count])
        rest = keys._replace(lens=context_lens[count:], table=block_tables[count:])
        starts = cu_seqlens_q[count:] - count
        lse = _into(output[:count], forward, query[:count], cu_seqlens_q[: count + 1], 1, first, scores)
        lse_of_rest = _into(output[count:], forward, query[count:], starts, longest, rest, scores)
        return with_lse_of_sinks(output, torch.cat((lse, lse_of_rest), 1), sinks) if return_lse else output

    return run


_PAGED = (
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
    forward = forward_of_v3 if own is OF_V3 else forward_of_v2
    return Kernel(
        id=name,
        operations=mixed.MIXED_PAGED if split else mixed.ALL,
        backend=own.backend,
        load=functools.partial(_load_paged, library=forward, split=split),
        layout="NHD",
        accepts=(*SCORES, "max_context_len", *(("decodes",) if split else ()), *((bias,) if bias else ())),
        limits=(*own.limits, *_PAGED, *((limit.one_of(bias, "float"), *of_bias) if bias else ())),
        build_key=own.build_key,
        prebuilt=own.prebuilt,
        cache_folder=own.cache_folder,
        priority=priority,
        trust=Trust.UNTRIED if bias else Trust.DECLARED,
    )


KERNELS = (
    _over_pages(OF_V3, "vllm.flash_attn.v3.paged_tokens", 85),
    _over_pages(OF_V3, "vllm.flash_attn.v3.paged_split", 84, split=True),
    _over_pages(OF_V2, "vllm.flash_attn.v2.paged_tokens", 55),
    _over_pages(OF_V2, "vllm.flash_attn.v2.paged_split", 54, split=True),
    _over_pages(OF_V3, "vllm.flash_attn.v3.paged_tokens_sinks", 85, bias="sinks", of_bias=OF_SINKS),
    _over_pages(OF_V3, "vllm.flash_attn.v3.paged_split_sinks", 84, split=True, bias="sinks", of_bias=OF_SINKS),
    _over_pages(OF_V2, "vllm.flash_attn.v2.paged_tokens_alibi", 55, bias="alibi_slopes", of_bias=OF_SLOPES),
)
