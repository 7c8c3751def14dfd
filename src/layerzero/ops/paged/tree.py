"""Drafts that branch: which of its sequence's new tokens each query sees, where they are a tree and no chain.

A speculative step verifies several continuations at once. Each new token sees what was cached before, its ancestors
among the new ones, and itself. Sequences with more new tokens than the mask has columns are chains: plain causal.
Source: SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from layerzero.core import values
from layerzero.core.errors import refuse
from layerzero.core.values import Check
from layerzero.ops.ragged.starts import lengths_of, sequences_of, to_the_right

_MAX_TOLD = 4
_COLUMNS_TOLD = 8
_MANY = 4096
"""Numbers of a mask from which on eight are compared at once: 2**18 in 14 us, else in 160 (2 CPU cores, 2026-11-24)."""


def shape_problems(mask: object, tokens: int, *, causal: object) -> list[str]:
    """What is wrong with a tree mask as a tensor, and with ``causal``."""
    if mask is None:
        return []
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.ndim != 2 or mask.shape[0] != tokens:
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        return [f"tree_mask: wanted a bool tensor ({tokens}, columns), a row for each query, got {got}"]
    return [] if causal is True else ["causal: wanted True with tree_mask, whose tokens see nothing newer, got False"]


def checks(mask: Tensor, starts: Tensor) -> list[Check]:
    """Rows that belong to no tree: each is its parent's row and the token itself. Nothing is read on the host.

    A parent is the newest earlier token that is seen; a token that sees none begins a tree of its own. With starts that
    do not fit the mask it means nothing, and is not reported.
    """
    tokens, columns = mask.shape
    if not tokens or not columns or len(starts) < 2:
        return []
    numbers = torch.arange(max(mask.shape) + 1, dtype=torch.int32, device=mask.device)
    token, column = numbers[:tokens], numbers[:columns]
    sequence = sequences_of(starts, token)
    first = starts[sequence]
    place, count = (token - first).unsqueeze(1), (starts[1:][sequence] - first).unsqueeze(1)
    parent = ((mask & (column < place)) * numbers[1 : columns + 1]).amax(1)  # counted from 1, 0 is none
    wanted = mask[(first + parent - 1).clamp_(0, tokens - 1)]
    wanted &= (parent > 0).unsqueeze(1)
    wanted |= column == place
    own = (column < count) & (count <= columns)  # beyond a sequence's own columns, and of a chain, it may be anything

    def newest(rows: Tensor) -> Tensor:
        """The last columns that rows were to see and that they see, the newest first, counted from 1."""
        seen = torch.stack((wanted[rows], mask[rows]), 1) & own[rows].unsqueeze(1)
        return (seen * numbers[1 : columns + 1]).topk(min(_COLUMNS_TOLD, columns)).values.flatten(1)

    return [Check(((mask != wanted) & own).any(1), newest, _told, _MAX_TOLD, alone=True)]


def _told(place: tuple[int, ...], columns: tuple[int, ...]) -> str:
    half = len(columns) // 2
    told, got = ([each - 1 for each in reversed(of) if each] for of in (columns[:half], columns[half:]))
    return f"tree_mask[{place[0]}]: wanted the token itself and what its parent sees, columns {told}, got {got}"


def value_problems(mask: Tensor, starts: Tensor) -> list[str]:
    """What is wrong with the rows of a mask on the host: :func:`checks`."""
    return values.problems_on_host(checks(mask, starts))


class _Seen(NamedTuple):
    """A mask that is one, its starts, and what both were then: how often written into, or a copy."""

    mask: weakref.ref[Tensor]
    starts: weakref.ref[Tensor]
    kept: tuple[int | Tensor, int | Tensor]

    def holds(self, *tensors: Tensor) -> bool:
        return all(_is_still(each, kept) for each, kept in zip(tensors, self.kept, strict=True))


_TREES: dict[int, _Seen] = {}
"""Masks that were looked at, by identity, while they live: the layers of a step share one."""


def check(function: str, mask: Tensor, starts: Tensor) -> None:
    """Look at a mask on the host, once until it or its starts are written into.

    Torch counts writes, but not those past it, by numpy say, which are not seen. It counts none of tensors of inference
    mode: a copy is compared. Raises: InvalidCallError.
    """
    seen = _TREES.get(id(mask))
    if seen is not None and seen.mask() is mask and seen.starts() is starts and seen.holds(mask, starts):
        return
    refuse(function, value_problems(mask, starts))
    key = id(mask)
    known = weakref.ref(mask, lambda _: _TREES.pop(key, None))
    _TREES[key] = _Seen(known, weakref.ref(starts), (_state_of(mask), _state_of(starts)))


def _state_of(tensor: Tensor) -> int | Tensor:
    return tensor.clone() if tensor.is_inference() else tensor._version


def _is_still(tensor: Tensor, kept: int | Tensor) -> bool:
    if not isinstance(kept, Tensor):
        return tensor._version == kept
    count = tensor.numel()
    large = tensor.dtype is torch.bool and count >= _MANY and tensor.is_contiguous()
    if large and count % 8 == 0 and tensor.storage_offset() % 8 == 0:
        tensor, kept = (each.view(-1).view(torch.int64) for each in (tensor, kept))
    return torch.equal(tensor, kept)


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


def scored(
    mask: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    rows: int,
    keys: int,
    window: tuple[int, int] | None,
    slopes: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """:func:`of_keys` with what a window and slopes add, which count depths: a node's is that of its row's tokens.

    Shapes: as there, slopes (H,) or (B, H) → (B, 1 or H, rows, keys), bool, or ``dtype`` with slopes.
    """
    seen = of_keys(mask, cu_seqlens_q, context_lens, rows, keys)
    if slopes is None and (window is None or window[0] < 0):
        return seen
    counts, columns = lengths_of(cu_seqlens_q).unsqueeze(1), mask.shape[1]
    numbers = torch.arange(max(rows, keys, columns), device=mask.device)
    own = to_the_right(mask, cu_seqlens_q, rows) & (numbers[:columns] < counts.unsqueeze(1))
    depth = torch.where(counts > columns, numbers[:rows] - rows + counts, own.sum(2) - 1)
    new = numbers[:keys] - context_lens.unsqueeze(1) + counts  # which new token a key is
    of_key = depth.gather(1, (new + rows - counts).clamp(0, max(rows - 1, 0))) if rows else new
    far = (depth.unsqueeze(2) - torch.where(new < 0, new, of_key).unsqueeze(1)).unsqueeze(1)
    if window is not None and window[0] >= 0:
        seen = seen & (far <= window[0])
    if slopes is None:
        return seen
    return (-slopes.to(dtype).view(-1, slopes.shape[-1], 1, 1) * far).masked_fill(~seen, -torch.inf)


def of_sequence(mask: Tensor | None, first: int, last: int, length: int) -> Tensor | None:
    """The mask (queries, keys) of one sequence; None where it is a chain."""
    count = last - first
    if mask is None or count > mask.shape[1]:
        return None
    own = mask[first:last, max(count - length, 0) : count]
    return torch.cat((own.new_ones((count, length - own.shape[1])), own), 1)
