"""vLLM's FlashAttention 2 and 3 behind a shared prefix: one call for the prefix, one for the rest, then a merge.

To the prefix all queries are those of one sequence, so that a tile of queries reads each page once. Both calls are
merged by torch's expression; as an operation of its own there is vLLM's, which takes one launch.
Library: vllm 0.20, Apache-2.0; FlashAttention, BSD-3-Clause, arXiv:2307.08691 and arXiv:2407.08608.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.latent_cascade import as_decode, merge, weighted
from layerzero.backends.vllm.library import VLLM, operators
from layerzero.backends.vllm.varlen import HEADS, OF_V2, OF_V3, Forward, Keys, Own, acting
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.cascade import CASCADE, MERGE_STATES


def _load_cascade(facts: Facts, library: Callable[[], Forward]) -> Callable[..., Any]:
    forward, scored = library(), acting(facts)
    page_size = facts.size("page_size")

    def run(
        query: Tensor,
        *pages: Tensor,
        shared_blocks: int,
        return_lse: bool = False,
        max_context_len: int | None = None,
        **given: Any,
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens = pages
        batch, blocks = block_tables.shape
        tokens, shared = query.squeeze(1), shared_blocks * page_size
        scores = scored(**given)
        numbers = functools.partial(torch.arange, dtype=torch.int32, device=query.device)
        lens = torch.full((1,), shared, dtype=torch.int32, device=query.device)
        prefix = Keys(key_cache, value_cache, None, lens, block_tables[:1, :shared_blocks], shared)
        first = forward(tokens, numbers(0, 2 * batch, batch), batch, prefix, scores, None)
        if shared_blocks < blocks:
            longest = blocks * page_size if max_context_len is None else min(max_context_len, blocks * page_size)
            table = block_tables[:, shared_blocks:]
            rest = Keys(key_cache, value_cache, None, context_lens - shared, table, max(longest - shared, 1))
            second, lse_of_rest = forward(tokens, numbers(batch + 1), 1, rest, scores, None)
            lse_of_rest = lse_of_rest.masked_fill(lse_of_rest == torch.inf, -torch.inf)  # of a sequence without a rest
            if not return_lse:
                return weighted(*first, second, lse_of_rest).unsqueeze(1)
            first = merge(*first, second, lse_of_rest)
        output, lse = as_decode(*first)
        return (output, lse) if return_lse else output

    return run


def _load_merge(facts: Facts) -> Callable[..., Any]:
    operator = operators("_C.abi3.so", "_C").merge_attn_states.default

    def run(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = torch.empty_like(output_a), torch.empty_like(lse_a)
        operator(output, lse, output_a, lse_a, output_b, lse_b, None, None)
        return output, lse

    return run


_STATES = ("output_a", "lse_a", "output_b", "lse_b")
_PAGED = (
    *HEADS,
    limit.last_stride_one("query", "key_cache", "value_cache", "block_tables"),
    limit.contiguous("context_lens"),
    limit.aligned(16, "query", "key_cache", "value_cache"),
)


def _cascade(own: Own, version: int, priority: int) -> Kernel:
    return own.backend.kernel(
        f"vllm.flash_attn.v{version}.cascade",
        CASCADE.name,
        functools.partial(_load_cascade, library=own.forward),
        layout="NHD",
        accepts=("scale", "softcap", "return_lse", "max_context_len", "shared_blocks"),
        limits=(*own.limits, *_PAGED),
        **own.fields,
        priority=priority,
    )


KERNELS = (
    _cascade(OF_V3, 3, 60),  # below those that follow each table: eager, its launches cost more than it saves
    _cascade(OF_V2, 2, 50),
    VLLM.kernel(
        "vllm.merge_states",
        MERGE_STATES.name,
        _load_merge,
        limit.dtype("float32", "float16", "bfloat16"),
        limit.dim("value_dim", multiple=8),
        limit.contiguous(*_STATES),
        limit.aligned(16, "output_a", "output_b"),
        priority=80,
    ),
)
