"""A step that writes into a cache: its new tokens have their slots, and it is the only one until it ends.

Its tables, lengths, starts and slots lie in one buffer, which one copy brings to the device.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Hashable, Sequence
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from layerzero.ops.kv.page_table import CachedSequence, Growth
from layerzero.ops.kv.strategy import KVCacheError
from layerzero.ops.paged.slots import numpy_here, slots_of_rows
from layerzero.ops.paged.step import StepMetadata

if TYPE_CHECKING:
    from layerzero.ops.kv.sequences import CachedSequences


class CacheStep(StepMetadata):
    """What :meth:`layerzero.KVCache.writing` gives: the step metadata of its sequences, new tokens included.

        with cache.writing(names, counts) as step:
            for layer in cache.layers:
                lz.append_paged_kv_(key, value, layer, slot_mapping=step.slots)
                output = lz.paged_attention(query, layer, step=step)

    Where the block raises, the sequences are as they were before.

    Attributes:
        sequences: their names.
        counts: new tokens of each.
    """

    def __init__(
        self,
        cache: CachedSequences,
        sequences: Sequence[Hashable],
        counts: Sequence[int],
        entries: Sequence[CachedSequence],
        growths: list[Growth],
        *,
        blocks: int | None,
        capturable: bool,
    ) -> None:
        self.cache, self.sequences, self.counts = cache, tuple(sequences), tuple(counts)
        self._growths, self.is_open, self.is_aborted = growths, True, False
        self._packed = PackedStep(
            len(entries),
            max([len(entry.pages) for entry in entries], default=0) if blocks is None else blocks,
            sum(counts),
            by_starts=self.counts.count(1) != len(self.counts),
            page_size=cache.page_size,
            device=torch.device(cache.device),
        )
        self.moves = cache.moves
        host = self._fill(entries, counts)
        super().__init__(
            self._packed.tables,
            self._packed.lens,
            cu_seqlens_q=self._packed.starts,
            host=host,
            capturable=capturable,
            pages=cache.pages,
        )

    def _fill(self, entries: Sequence[CachedSequence], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Send tables, lengths, starts and slots, and note whose they are."""
        host = self._packed.fill([entry.pages for entry in entries], [entry.length for entry in entries], counts)
        self.returned, self.known = self.cache.returned, [(entry, entry.returned) for entry in entries]
        return host

    @property
    def slots(self) -> Tensor:
        """Where the new tokens belong, (T,) int64. Raises: KVCacheError where another sequence may have that place."""
        self.cache.check_moved(self)
        if self.is_stale:
            return self.slot_mapping(self.cache.page_size)  # which says so
        return self._packed.slots

    def kind_for(self, *tensors: Tensor | None) -> str:
        """As of any step. Raises: KVCacheError where its pages may be another sequence's by now."""
        self.cache.check_moved(self)
        return super().kind_for(*tensors)

    @property
    def positions(self) -> Tensor:
        """The place of each new token in its sequence, (T,) int64 on the cache's device."""
        lens, starts = self.host
        counts = (starts[1:] - starts[:-1]).long()
        first = torch.repeat_interleave(lens.long() - starts[1:], counts)
        return (first + torch.arange(int(starts[-1]))).to(self.cache.device)

    def begin(self, counts: Sequence[int], entries: Sequence[CachedSequence], growths: list[Growth]) -> None:
        """Take the next tokens of the same sequences, in the same buffers."""
        host = self._fill(entries, counts)
        self.counts, self._growths, self.moves, self.is_open = tuple(counts), growths, self.cache.moves, True
        self.is_aborted = False
        self.advance(host=host)

    def end(self) -> list[Growth]:
        """Stop; what it had added. Raises: KVCacheError for one that ended before."""
        if not self.is_open:
            raise KVCacheError("wanted a step that is open, got one that ended; writing() begins another")
        self.is_open = False
        growths, self._growths = self._growths, []
        return growths

    def commit(self) -> None:
        """Keep the new tokens."""
        self.cache.commit(self)

    def abort(self) -> None:
        """Take the new tokens back: lengths and pages are as before."""
        self.cache.abort(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_open:
            self.cache.abort(self) if kind is not None else self.cache.commit(self)


class PackedStep:
    """Two buffers on the host, filled by plain numbers in turn, and one on the device, with views made once.

    A launch or a copy costs 20 to 40 us of host time on a slow host (H200, 2026-11-22), whatever its size: so each step
    makes one. A buffer that the device may still read is not written into: its event is waited for, which by the next
    step but one is over.

    Args:
        rows: sequences.
        columns: pages that a table holds.
        tokens: new tokens of all sequences.
        by_starts: whether it says where new tokens begin; without, each sequence has one.
        page_size: tokens of a page.
        device: where the step is used.
    Attributes:
        tables: (rows, columns) int32 on the device.
        lens: (rows,) int32 on the device.
        starts: (rows + 1,) int32 on the device, or None.
        slots: (tokens,) int64 on the device.
    """

    def __init__(
        self, rows: int, columns: int, tokens: int, *, by_starts: bool, page_size: int, device: torch.device
    ) -> None:
        self._page_size, self._turn = page_size, 0
        pinned = device.type == "cuda"
        sizes = (2 * tokens, rows, rows + 1 if by_starts else 0, rows * columns)
        padded = [-(-size // _APART) * _APART for size in sizes]
        begins = [0, *accumulate(padded)]
        with torch.inference_mode(mode=False):  # what is made there cannot be written into elsewhere
            self._hosts = [torch.zeros(begins[-1], dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
            self._device = torch.empty(begins[-1], dtype=torch.int32, device=device)
            parts = [self._device.narrow(0, *each) for each in zip(begins, sizes, strict=False)]
            self.lens, self.tables = parts[1], parts[3].view(rows, columns)
            self.slots, self.starts = parts[0].view(torch.int64), parts[2] if by_starts else None
        self._events = [torch.cuda.Event() for _ in range(2)] if pinned else []  # type: ignore[no-untyped-call]
        self._columns, ends = columns, [begin + size for begin, size in zip(begins, sizes, strict=False)]
        self._rows, self._tokens = [[0] * rows for _ in range(2)], tokens  # pages of each row that a buffer holds
        self._views: list[list[memoryview]] = []
        for host in self._hosts:
            raw = (ctypes.c_char * host.nbytes).from_address(host.data_ptr()) if host.nbytes else bytearray()
            whole = memoryview(raw).cast("B")
            each = [whole[4 * begin : 4 * end] for begin, end in zip(begins, ends, strict=False)]
            self._views.append([each[0].cast("q"), *(part.cast("i") for part in each[1:])])

    def fill(self, pages: Sequence[array[int]], lens: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Write the numbers of a step and send them; lengths, and starts where there are any, as tensors on the host.

        Those are copies in pageable memory: a copy without waiting is staged before it returns.
        """
        turn = self._turn = 1 - self._turn
        if self._events:
            self._events[turn].synchronize()
        views, held, columns = self._views[turn], self._rows[turn], self._columns
        table, first = views[3], 0
        for row, mine in enumerate(pages):
            number = len(mine)
            table[first : first + number] = mine
            if number < held[row]:
                table[first + number : first + held[row]] = array("i", bytes(4 * (held[row] - number)))
            held[row] = number
            first += columns
        said = [array("i", lens)]
        views[1][:] = said[0]
        if self.starts is not None:
            said.append(array("i", [0, *accumulate(counts)]))
            views[2][:] = said[1]
        views[0][:] = self._slots(views, pages, lens, counts)
        self._device.copy_(self._hosts[turn], non_blocking=True)
        if self._events:
            self._events[turn].record(torch.cuda.current_stream(self._device.device))
        return tuple(torch.frombuffer(each, dtype=torch.int32) if each else torch.empty(0).int() for each in said)

    def _slots(
        self, views: list[memoryview], pages: Sequence[array[int]], lens: Sequence[int], counts: Sequence[int]
    ) -> Any:
        """Slots of the new tokens, int64: by numpy where there are so many that it is the quicker way."""
        size = self._page_size
        if self._tokens >= _MANY and (np := numpy_here()) is not None:
            table, ends = np.asarray(views[3]).reshape(len(pages), self._columns), np.array(lens, dtype=np.int64)
            begins, added = None, 1
            if self.starts is not None:
                begins = np.asarray(views[2]).astype(np.int64)
                added = begins[1:] - begins[:-1]
            return slots_of_rows(np, table, ends, begins, added, size, _PAGES).view(np.longlong)  # as the view says
        slots = array("q")
        for mine, end, count in zip(pages, lens, counts, strict=True):
            slots.extend([mine[place // size] * size + place % size for place in range(end - count, end)])
        return slots


_MANY = 32
"""New tokens from which numpy's 10 us are less than what plain Python takes (2 CPU cores, 2026-11-23)."""

_PAGES = 2**31

_APART = 64
"""Each part begins where an allocation of its own would, at 256 bytes."""
