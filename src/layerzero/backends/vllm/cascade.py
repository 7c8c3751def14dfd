"""vLLM's FlashAttention 2 and 3 behind a shared prefix: one call for the prefix, one for the rest, then a merge.

To the prefix all queries are those of one sequence, so that a tile of queries reads each page once. Both calls are
merged by torch's expression; as an operation of its own there is vLLM's, which takes one launch.
Library: vllm 0.20, Apache-2.0; FlashAttention, BSD-3-Clause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.cascade import as_decode, merge, weighted
from layerzero.backends.vllm.library import VLLM, operators
from layerzero.backends.vllm.varlen import OF_V2, OF_V3, Forward, Keys, Scores, forward_of_v2, forward_of_v3
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.cascade.declare import CASCADE
from layerzero.ops.cascade.merge import MERGE_STATES


def _load_cascade(facts: Facts, library: Callable[[], Forward]) -> Callable[..., Any]:
    forward, default = library(), float(facts.size("head_dim") ** -0.5)
    page_size = facts.size("page_size")

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        shared_blocks: int,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        max_context_len: int | None = None,
    ) -> Any:
        batch, blocks = block_tables.shape
        tokens, shared = query.squeeze(1), shared_blocks * page_size
        scores = Scores(default if scale is None else scale, False, (-1, -1), softcap or 0.0)
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
    limit.platform("cuda"),
    limit.dtype("float16", "bfloat16"),
    limit.dim("head_dim", max=256, multiple=8),
    limit.positive("scale"),
    limit.last_stride_one("query", "key_cache", "value_cache", "block_tables"),
    limit.contiguous("context_lens"),
    limit.aligned(16, "query", "key_cache", "value_cache"),
)


def _cascade(version: int, priority: int) -> Kernel:
    own = OF_V3 if version == 3 else OF_V2
    return Kernel(
        id=f"vllm.flash_attn.v{version}.cascade",
        operations=(CASCADE.name,),
        backend=own.backend,
        load=functools.partial(_load_cascade, library=forward_of_v3 if version == 3 else forward_of_v2),
        layout="NHD",
        accepts=("scale", "softcap", "return_lse", "max_context_len", "shared_blocks"),
        limits=(*own.limits, *_PAGED),
        build_key=own.build_key,
        prebuilt=own.prebuilt,
        cache_folder=own.cache_folder,
        priority=priority,
    )


KERNELS = (
    _cascade(3, 60),  # below those that follow each table: eager, its launches cost more than it saves
    _cascade(2, 50),
    Kernel(
        id="vllm.merge_states",
        operations=(MERGE_STATES.name,),
        backend=VLLM,
        load=_load_merge,
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float32", "float16", "bfloat16"),
            limit.dim("value_dim", multiple=8),
            limit.contiguous(*_STATES),
            limit.aligned(16, "output_a", "output_b"),
        ),
        priority=80,
    ),
)
