"""Merging parts of attention as a torch expression, and on a CPU a decode that reads a shared prefix once.

Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FLOATS, always, cpu_attend, kernel
from layerzero.backends.torch.varlen import Slice, attend_each
from layerzero.core import limits as limit
from layerzero.core.errors import refuse
from layerzero.core.facts import Facts
from layerzero.ops.attention.limits import SdpaEnabled
from layerzero.ops.cascade import CASCADE, MERGE_STATES, shared_problems
from layerzero.ops.paged.pages import tokens_of


def merge(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Both parts by the second one's share: (T, H, D) and (H, T)."""
    share = torch.sigmoid(lse_b - lse_a)
    share = share.masked_fill(lse_b == -torch.inf, 0.0).t().unsqueeze(-1)  # both -inf: their difference is NaN
    wide = torch.promote_types(output_a.dtype, torch.float32)
    output = torch.lerp(output_a.to(wide), output_b.to(wide), share.to(wide)).to(output_a.dtype)
    return output, torch.logaddexp(lse_a, lse_b)


def weighted(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> Tensor:
    """The output alone, where every query saw a key of the first part."""
    share = torch.sigmoid(lse_b - lse_a).t().unsqueeze(-1)
    return torch.lerp(output_a.float(), output_b.float(), share).to(output_a.dtype)


def as_decode(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """From (B, H, D) and (H, B) to (B, 1, H, D) and (B, H, 1)."""
    return output.unsqueeze(1), lse.t().unsqueeze(-1)


def _load_cascade(facts: Facts) -> Callable[..., Any]:
    page_size = facts.size("page_size")
    attend = cpu_attend(facts)

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        shared_blocks: int,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        refuse("cascade_attention", shared_problems(block_tables, context_lens, shared_blocks, page_size))
        tokens, caches, shared = query.squeeze(1), (key_cache, value_cache), shared_blocks * page_size

        def prefix() -> Iterator[Slice]:
            keys, values = (cache[block_tables[0, :shared_blocks]].flatten(0, 1) for cache in caches)
            yield tokens, keys, values, None

        def rest() -> Iterator[Slice]:
            for row, length in enumerate(context_lens.tolist()):
                pages = block_tables[row, shared_blocks : -(-length // page_size)]
                keys, values = (tokens_of(cache, pages, length - shared) for cache in caches)
                yield tokens[row : row + 1], keys, values, None

        parts = [attend_each(each, tokens, scale=scale, return_lse=True, attend=attend) for each in (prefix(), rest())]
        output, lse = as_decode(*merge(*parts[0], *parts[1]))
        return (output, lse) if return_lse else output

    return run


KERNELS = (
    kernel("torch.merge_states", MERGE_STATES.name, always(merge), FLOATS, priority=40),
    kernel(
        "torch.cascade_sdpa",
        CASCADE.name,
        _load_cascade,
        limit.platform("cpu"),
        FLOATS,
        limit.equal("value_dim", "head_dim"),
        SdpaEnabled("flash"),
        limit.last_stride_one("query", "key_cache", "value_cache"),
        layout="NHD",
        accepts=("scale", "return_lse", "shared_blocks"),
        graph_safe=False,
        priority=60,
    ),
)
