"""Pages of a cache as rows of tokens, for definitions that know no pages."""

from __future__ import annotations

import torch
from torch import Tensor


def blocks_of(block_tables: Tensor, context_lens: Tensor, page_size: int, promised: int | None) -> int:
    """How many columns of a table are followed: on a CPU what the longest sequence needs, as far as the table goes.

    Elsewhere as many as were promised, or all: nothing is read on the host. Nor is it in a transform or a trace, where
    lengths have no numbers, or others later on.
    """
    blocks = block_tables.shape[1]
    if promised is not None:
        blocks = min(blocks, -(-promised // page_size))
    if _has_numbers(context_lens) and len(context_lens):
        blocks = min(blocks, -(-max(int(context_lens.max()), 0) // page_size))
    return blocks


def _has_numbers(lengths: Tensor) -> bool:
    """Whether numbers may be read of a tensor at no cost, and hold for what is computed with them."""
    return lengths.is_cpu and not (torch._C._is_tracing() or torch._C._functorch.is_functorch_wrapped_tensor(lengths))


def gathered(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values of each sequence, as long as its table or the promised bound, on a CPU as the longest sequence.

    Entries of a table beyond a sequence's last page are not followed: they may hold anything.
    Shapes: caches (P, N, K, D) and (P, N, K, D_v), block_tables (B, max_blocks), context_lens (B,) →
    (B, blocks * N, K, D) and (B, blocks * N, K, D_v)
    """
    page_size = key_cache.shape[1]
    blocks = blocks_of(block_tables, context_lens, page_size, max_context_len)
    first = torch.arange(blocks, device=block_tables.device) * page_size
    used = first < context_lens.unsqueeze(1)
    pages = block_tables[:, :blocks].masked_fill(~used, 0).long()
    caches = [cache if len(cache) else cache.new_zeros((1, *cache.shape[1:])) for cache in (key_cache, value_cache)]
    keys, values = (cache[pages].flatten(1, 2) for cache in caches)
    return keys, values
