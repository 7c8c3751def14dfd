"""Drafts that branch: which of its sequence's new tokens each query sees, where they are a tree and no chain.

A speculative step verifies several continuations at once. Each new token sees what was cached before, its ancestors
among the new ones, and itself. Sequences with more new tokens than the mask has columns are chains: plain causal.
Source: SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops.ragged.starts import lengths_of, to_the_right

_MAX_TOLD = 4


def shape_problems(mask: object, tokens: int, *, causal: object) -> list[str]:
    """What is wrong with a tree mask as a tensor, and beside ``causal``."""
    if mask is None:
        return []
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.ndim != 2 or mask.shape[0] != tokens:
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        return [f"tree_mask: wanted a bool tensor ({tokens}, columns), a row for each query, got {got}"]
    return [] if causal is True else ["causal: wanted True beside tree_mask, whose tokens see nothing newer, got False"]


def value_problems(mask: Tensor, starts: Tensor) -> list[str]:
    """Rows that belong to no tree: each is its parent's row and the token itself; reads the mask on the host.

    A parent is the newest earlier token that is seen; who sees none begins a tree of its own. ``starts`` fit the mask.
    """
    mask, starts = mask.cpu(), starts.cpu()
    counts, here = lengths_of(starts), mask.device
    counts = counts.masked_fill(counts > mask.shape[1], 0)  # chains
    longest = int(counts.max()) if len(counts) else 0
    if longest == 0:
        return []
    ends = counts.cumsum(0)
    place = torch.arange(int(ends[-1]), device=here)
    sequence = torch.searchsorted(ends, place, right=True)  # of each token that has a row in a tree
    place -= (ends - counts)[sequence]
    first, mask = starts[:-1][sequence], mask[:, :longest]
    below = torch.ones((longest + 1, longest), dtype=torch.bool, device=here).tril(-1)  # row n is True up to n - 1
    rows, columns = mask[first + place], torch.arange(1, longest + 1, dtype=torch.int32, device=here)
    parent = ((rows & below[place]) * columns).amax(-1) - 1
    wanted = mask[first + parent.clamp(min=0)]
    wanted[parent < 0] = False
    wanted.scatter_(1, place.unsqueeze(1), True)
    unlike = (rows != wanted) & below[counts[sequence]]
    if not unlike.any():
        return []
    wrong: list[int] = unlike.any(-1).nonzero().flatten()[:_MAX_TOLD].tolist()
    return [_told(at, rows, wanted, int(first[at] + place[at]), int(counts[sequence[at]])) for at in wrong]


def _told(at: int, rows: Tensor, wanted: Tensor, token: int, count: int) -> str:
    told, got = (each[at, :count].nonzero().flatten().tolist()[-8:] for each in (wanted, rows))
    return f"tree_mask[{token}]: wanted the token itself and what its parent sees, columns {told}, got {got}"


def of_keys(mask: Tensor, cu_seqlens_q: Tensor, context_lens: Tensor, rows: int, keys: int) -> Tensor:
    """The mask of all keys, for queries at the right end of their rows and keys from the left of theirs.

    Shapes: mask (T, columns), cu_seqlens_q (B + 1,), context_lens (B,) → (B, 1, rows, keys) bool; nothing is read on
    the host.
    """
    counts = lengths_of(cu_seqlens_q)
    new = torch.arange(keys, device=mask.device) - (context_lens - counts).unsqueeze(1)  # which new token a key is
    columns = mask.shape[1]
    if columns == 0:
        return torch.ones((len(counts), 1, rows, keys), dtype=torch.bool, device=mask.device)
    padded = to_the_right(mask, cu_seqlens_q, rows)
    places = new.clamp(0, columns - 1).unsqueeze(1).expand(-1, rows, -1)
    seen = padded.gather(2, places) | (new < 0).unsqueeze(1)
    return (seen | (counts > columns).view(-1, 1, 1)).unsqueeze(1)


def of_sequence(mask: Tensor | None, first: int, last: int, length: int) -> Tensor | None:
    """The mask (queries, keys) of one sequence; None where it is a chain."""
    count = last - first
    if mask is None or count > mask.shape[1]:
        return None
    own = mask[first:last, max(count - length, 0) : count]
    return torch.cat((own.new_ones((count, length - own.shape[1])), own), 1)
