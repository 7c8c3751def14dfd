"""Pages of a cache as rows of tokens, and tables without padding made padded ones.

FlashInfer and SGLang keep tables without padding; a step has padded ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import refuse
from layerzero.ops.declaration import number_problems
from layerzero.ops.ragged.starts import lengths_of, shape_problems, value_problems

_FUNCTION = "StepMetadata.of_ragged_tables"


def padded_tables(
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, page_size: int, max_blocks: int | None
) -> tuple[Tensor, Tensor]:
    """Block tables (B, max_blocks) and lengths (B,), int32; see :meth:`layerzero.StepMetadata.of_ragged_tables`.

    Raises: InvalidCallError for tensors that are no such tables; numbers are looked at on a CPU, and wherever
        ``max_blocks`` is None, for then they are read.
    """
    problems = shape_problems("kv_indptr", kv_indptr)
    for name, tensor in (("kv_indices", kv_indices), ("kv_last_page_len", kv_last_page_len)):
        problems += number_problems(name, tensor, 1, "of one axis")
        if not problems and tensor.device != kv_indptr.device:
            problems.append(f"{name}: wanted device {kv_indptr.device} as kv_indptr, got {tensor.device}")
    for name, number in (("page_size", page_size), ("max_blocks", 1 if max_blocks is None else max_blocks)):
        if type(number) is not int or not 1 <= number < 2**31:
            problems.append(f"{name}: wanted a number from 1 to {2**31 - 1}, got {told(number)}")
    if not problems and len(kv_last_page_len) != len(kv_indptr) - 1:
        problems.append(f"kv_last_page_len: wanted {len(kv_indptr) - 1} as in kv_indptr, got {len(kv_last_page_len)}")
    if not problems and (kv_indptr.is_cpu or max_blocks is None):
        on_host = kv_indptr.cpu(), kv_last_page_len.cpu()
        problems += _value_problems(*on_host, len(kv_indices), page_size, max_blocks)
        max_blocks = max_blocks or max(int(lengths_of(on_host[0]).max()) if len(on_host[1]) else 0, 1)
    refuse(_FUNCTION, problems)
    assert max_blocks is not None
    counts, columns = lengths_of(kv_indptr), torch.arange(max_blocks, dtype=torch.int32, device=kv_indptr.device)
    there = columns < counts.unsqueeze(1)
    if not len(kv_indices):
        return torch.zeros_like(there, dtype=torch.int32), torch.zeros_like(counts)
    places = (kv_indptr[:-1].unsqueeze(1) + columns).clamp(0, len(kv_indices) - 1)
    tables = kv_indices[places.long()].masked_fill(~there, 0)
    return tables, torch.where(counts > 0, (counts - 1) * page_size + kv_last_page_len, 0)


def _value_problems(starts: Tensor, last: Tensor, pages: int, page_size: int, max_blocks: int | None) -> list[str]:
    end = int(starts[-1])
    problems = value_problems("kv_indptr", starts, end)
    if end != pages:
        problems.append(f"kv_indptr[{len(starts) - 1}]: wanted {pages}, the number of kv_indices, got {end}")
    if problems:
        return problems
    counts = lengths_of(starts)
    if max_blocks is not None and len(counts) and int(counts.max()) > max_blocks:
        problems.append(f"max_blocks: wanted at least {int(counts.max())}, the pages of a sequence, got {max_blocks}")
    lengths = torch.where(counts > 0, (counts.long() - 1) * page_size + last, 0)
    if len(lengths) and int(lengths.max()) >= 2**31:
        problems.append(f"kv_indptr: wanted sequences of less than 2**31 tokens, got one of {int(lengths.max())}")
    wrong = (counts > 0) & ((last < 1) | (last > page_size))
    problems += [
        f"kv_last_page_len[{place}]: wanted 1 to {page_size}, got {int(last[place])}"
        for place in wrong.nonzero().flatten().tolist()[:8]
    ]
    return problems


def blocks_of(block_tables: Tensor, context_lens: Tensor, page_size: int, promised: int | None) -> int:
    """How many columns of a table are followed: on a CPU what the longest sequence needs, as far as the table goes.

    Elsewhere as many as were promised, or all: nothing is read on the host. Nor is it in a transform or a trace, where
    lengths have no numbers, or others later on.
    """
    blocks = block_tables.shape[1]
    if promised is not None:
        blocks = min(blocks, -(-promised // page_size))
    if has_numbers(context_lens) and len(context_lens):
        blocks = min(blocks, -(-max(int(context_lens.max()), 0) // page_size))
    return blocks


def has_numbers(lengths: Tensor) -> bool:
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

    Entries of a table beyond a sequence's last page are not followed: they may hold anything. Behind the last token
    of a sequence stands what its page holds there, on a GPU that token again.
    Shapes: caches (P, N, K, D) and (P, N, K, D_v), block_tables (B, max_blocks), context_lens (B,) →
    (B, blocks * N, K, D) and (B, blocks * N, K, D_v)
    """
    page_size = key_cache.shape[1]
    blocks = blocks_of(block_tables, context_lens, page_size, max_context_len)
    caches = [cache if len(cache) else cache.new_zeros((1, *cache.shape[1:])) for cache in (key_cache, value_cache)]
    if key_cache.is_cpu:
        used = torch.arange(blocks) * page_size < context_lens.unsqueeze(1)
        pages = block_tables[:, :blocks].masked_fill(~used, 0).long()
        keys, values = (cache[pages].flatten(1, 2) for cache in caches)
    else:
        # A virtual cache has no memory behind its last token: a read there ended the context (H200, 2026-11-25)
        tokens = torch.arange(blocks * page_size, device=block_tables.device)
        place = torch.minimum(tokens, context_lens.unsqueeze(1) - 1).clamp(min=0)
        page = block_tables.gather(1, place // page_size).masked_fill(context_lens.unsqueeze(1) == 0, 0)
        keys, values = (taken(cache, page, place % page_size) for cache in caches)
    return keys, values


def taken(cache: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    """The tokens at these places. Shapes: (P, N, ...), (B, L), (B, L) → (B, L, ...).

    ``index_select`` copies rows in pieces of 16 bytes where an index of two axes copies numbers: 426 us against 1,628
    for 64 sequences of 2,048 tokens (H200, torch 2.11, 2026-11-26).
    """
    if cache.stride(0) != cache.stride(1) * cache.shape[1]:
        return cache[page, offset]
    slots = page.long() * cache.shape[1] + offset
    return cache.flatten(0, 1).index_select(0, slots.flatten()).view(*page.shape, *cache.shape[2:])


def tokens_of(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first tokens of a sequence's pages (length, ...); of a single page no token behind them is read."""
    return cache[:, :length][pages].flatten(0, 1)[:length]


def nhd(layout: str, *caches: Tensor) -> tuple[Tensor, ...]:
    """Caches with tokens before heads, which references are written for; views."""
    return caches if layout == "NHD" else tuple(each.transpose(1, 2) for each in caches)
