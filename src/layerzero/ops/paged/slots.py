"""Where the newest tokens of a step belong: computed on the host where tables and lengths are there, else elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.handle import Handle
from layerzero.ops.paged.host_slots import check_starts, slots_on_host
from layerzero.ops.paged.late_count import LateCount

if TYPE_CHECKING:
    from layerzero.ops.paged.step import StepMetadata


class SlotMapping:
    """The slots of the newest tokens; those that have no place are counted, on a GPU there."""

    def __init__(self, step: StepMetadata, page_size: int, tokens: int | None) -> None:
        by_starts = tokens is None and step.cu_seqlens_q is not None
        self._page_size, self._tokens = page_size, None if by_starts else tokens or 1
        self._lost = LateCount()
        self.slots = self._compute(step).to(step.context_lens.device, non_blocking=True)  # staged before it returns
        self.tell("StepMetadata.slot_mapping")

    def update(self, handle: Handle) -> None:
        slots = self._compute(cast("StepMetadata", handle))
        if slots.shape != self.slots.shape:  # starts on a device, which nobody gave on the host
            raise InvalidCallError("StepMetadata.advance", [self.other_total(len(slots))])
        self.slots.copy_(slots, non_blocking=True)

    def other_total(self, tokens: int) -> str:
        """What is wrong with so many new tokens; empty where as many belong to these slots."""
        if tokens == len(self.slots):
            return ""
        wanted = f"cu_seqlens_q: wanted {len(self.slots)} new tokens, as its slots have"
        return f"{wanted}, got {tokens}; make a new StepMetadata"

    @property
    def by_starts(self) -> bool:
        """Whether starts say how many tokens there are."""
        return self._tokens is None

    def _places(self, step: StepMetadata) -> tuple[Tensor, Tensor]:
        """The sequence of each new token, and its position there."""
        lens = step.context_lens
        if self._tokens is not None:
            positions = lens.long().unsqueeze(1) + torch.arange(-self._tokens, 0, device=lens.device)
            return torch.arange(len(lens), device=lens.device).repeat_interleave(self._tokens), positions.flatten()
        starts, on_host = cast(Tensor, step.cu_seqlens_q), step.host[1]
        tokens = torch.arange(int(on_host[-1]), device=lens.device)
        owner = torch.searchsorted(starts[1:].contiguous(), tokens.int(), right=True).clamp(max=max(len(lens) - 1, 0))
        return owner, tokens + (lens - starts[1:])[owner]

    def _compute(self, step: StepMetadata) -> Tensor:
        tables, page_size = step.block_tables, self._page_size
        capacity = tables.shape[1] * page_size
        if step.host_tables is not None and step.has_host:
            starts = None if self._tokens is not None else step.host[1]
            pages_there = step.pages or _MOST_PAGES
            lens = step.host_lens
            made = slots_on_host(step.host_tables, lens, starts, self._tokens or 1, page_size, pages_there)
            if made is not None:
                self._lost.add(made[1])
                return made[0]
        if self._tokens is None:
            check_starts(step.host[1])
        placed = self._placed_on_host(step, capacity)
        if placed is not None:
            rows, offsets = placed.to(tables.device, non_blocking=True)
            pages = tables.reshape(-1).index_select(0, rows)
            lost = pages < 0
            if step.pages is not None and step.pages < _MOST_PAGES:
                lost |= pages >= step.pages
            return self._within(torch.add(offsets, pages, alpha=page_size), lost, None)
        owner, positions = self._places(step)
        early, late = positions < 0, positions >= capacity
        if capacity == 0:
            return self._within(torch.full_like(positions, -1), late, early)
        pages = tables[owner, (positions // page_size).masked_fill(early | late, 0)].long()
        late = late | (~early & ((pages < 0) | (pages >= (step.pages or _MOST_PAGES))))
        return self._within(pages * page_size + positions % page_size, late, early)

    def _placed_on_host(self, step: StepMetadata, capacity: int) -> Tensor | None:
        """The entry of all tables and the place in its page of each token; None where lengths say that one has none.

        Computed on the host, as one sum: if all tables were one row of pages, each would begin at a page. A GPU gets
        both in one copy: each launch costs 4 us of host time and more (H200, 2026-11-22).
        Shapes: → (2, T) int64 on the CPU
        """
        if capacity == 0 or not step.has_host or len(step.context_lens) == 0:
            return None
        lens, starts = step.host
        if self._tokens is not None:
            starts = numbers_on_host(0, (len(lens) + 1) * self._tokens, self._tokens)
        counts = starts[1:] - starts[:-1]
        before = lens.long() - counts  # tokens that were in the cache already; differences of int32 wrap around
        if int(before.min()) < 0 or int(lens.max()) > capacity:
            return None
        places = before + numbers_on_host(0, len(lens) * capacity, capacity)
        if self._tokens != 1:
            total = int(starts[-1])
            places = torch.repeat_interleave(places - starts[:-1], counts, output_size=total) + numbers_on_host(
                0, total
            )
        bits = self._page_size.bit_length() - 1
        if self._page_size == 1 << bits:
            return torch.stack((places >> bits, places & (self._page_size - 1)))
        return torch.stack((places // self._page_size, places % self._page_size))

    def _within(self, slots: Tensor, late: Tensor, early: Tensor | None) -> Tensor:
        """The slots, -1 where there is none, after those that are lost were counted."""
        slots = slots.masked_fill(late if early is None else early | late, -1)
        self._lost.add(late)
        return slots

    def tell(self, function: str) -> None:
        """Raise for tokens without a place, once for each; on a GPU for those that it has counted by now."""
        count = self._lost.untold()
        if count:
            when = ", now or in an earlier step; they were lost" if self._lost.is_late else ""
            problem = (
                f"context_lens and block_tables: wanted a page of the cache for each new token, got {count} tokens "
                f"beyond their table or on a page that does not exist{when}"
            )
            raise InvalidCallError(function, [problem])


_MOST_PAGES = 2**31


def numbers_on_host(first: int, end: int, step: int = 1) -> Tensor:
    """Numbers on the host, wherever torch makes tensors by default."""
    return torch.arange(first, end, step, device="cpu")
