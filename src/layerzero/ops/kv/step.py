"""A step that writes into a cache: its new tokens have their slots, and it is the only one until it ends.

Its tables, lengths, starts and slots lie in one buffer, which one copy brings to the device.

Sizes of a step come in classes, so that traffic brings no call of a new class: a call is chosen for once for each, 2 to
3 ms on a CPU, a spike in a step of 10 (AMD EPYC, 2026-11-26). What only grows, and what is a promise that may be wider
than need be, has few values therefore.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Hashable, Sequence
from itertools import accumulate
from operator import add
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from layerzero.ops.kv.form import KVCacheError
from layerzero.ops.kv.page_table import Growth
from layerzero.ops.paged.step import StepMetadata

if TYPE_CHECKING:
    from layerzero.ops.kv.sequences import CachedSequences


def columns_for(needed: int) -> int:
    """Columns of tables for so many pages: 16, or the next power of two."""
    return max(16, 1 << (needed - 1).bit_length()) if needed else 0


def bound_for(longest: int) -> int:
    """A bound of the new tokens of a sequence: 16, 64, 256 and so on."""
    bound = 16
    while bound < longest:
        bound *= 4
    return bound


def promise_for(counts: Sequence[int]) -> int | None:
    """How many sequences from the first on have one new token, as a power of 4; None for none."""
    first = next((place for place, count in enumerate(counts) if count != 1), len(counts))
    return 1 << (first.bit_length() - 1 & ~1) if first else None


def numbers_to(most: int) -> list[int]:
    """Numbers up to this one that stand for all others: of each power of two the first, the middle one and the last."""
    found = {most}
    for power in range(most.bit_length()):
        found |= {each for each in (1 << power, 3 << power >> 1, (2 << power) - 1) if each <= most}
    return sorted(found)


def counts_of(batch: int, tokens: int) -> list[list[int]]:
    """New tokens of each sequence of a batch: one each, then one list for each class of sums, bounds and promises."""
    found = [[1] * batch]
    promises = [0, *(1 << power for power in range(0, (batch - 1).bit_length(), 2))]
    for total in numbers_to(tokens):
        for decodes in promises:
            left, others = total - decodes, batch - decodes - 1
            below, bound = 1, 16
            while below < left and others >= 0:
                longest = min(bound, left)
                if left - longest <= others * longest:
                    rest = left - longest
                    spread = [rest // others + (number < rest % others) for number in range(others)] if others else []
                    found.append([*[1] * decodes, longest, *spread])
                below, bound = bound, bound * 4
    return found


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
        sequences: tuple[Hashable, ...],
        counts: tuple[int, ...],
        growth: Growth,
        columns: int,
        bound: int | None,
        *,
        capturable: bool,
    ) -> None:
        self.cache, self.sequences, self.counts, self.entries = cache, sequences, counts, growth.entries
        self._growth, self.is_open, self.is_aborted = growth, True, False
        by_starts = counts.count(1) != len(counts)
        self._packed = PackedStep(
            *(len(sequences), columns, sum(counts), cache.page_size, cache.device),
            by_starts=by_starts,
            staged=cache.device.type != "cpu",
        )
        self._fill()
        starts = self._packed.starts
        tensors = self._packed.tables, self._packed.lens, *([] if starts is None else [starts])
        self._keep(tensors, None, None, bound, cache.pages, capturable=capturable)

    def _fill(self) -> None:
        """Send tables, lengths, starts, slots and positions, and note of when they are."""
        self._numbers = self._packed.fill(self._growth, self.counts)
        self.returned, self.moves = self.cache.returned, self.cache.moves

    has_host = True

    def _copies(self) -> tuple[None, ...]:
        return (None,) * len(self._tensors)  # which torch counts writes in

    def _on_host(self) -> tuple[Tensor, ...]:
        """Lengths, and starts where there are any: copies, which outlive the steps after."""
        return tuple(
            torch.frombuffer(each, dtype=torch.int32) if each else torch.empty(0).int() for each in self._numbers
        )

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
    def max_seqlen_q(self) -> int | None:
        """A bound of the new tokens of a sequence, of a class: 16 or 4 times as many as another; None for one each."""
        return None if self.cu_seqlens_q is None else bound_for(max(self.counts))

    @property
    def decodes(self) -> int | None:
        """So many sequences from the first on have one new token, of a class: a power of 4; None for none, or all."""
        return None if self.cu_seqlens_q is None else promise_for(self.counts)

    @property
    def positions(self) -> Tensor:
        """The place of each new token in its sequence, (T,) int64 on the cache's device."""
        return self._packed.positions

    def begin(self, names: tuple[Hashable, ...], counts: tuple[int, ...], growth: Growth, bound: int) -> None:
        """Take the next tokens of as many sequences, in the same buffers."""
        self.sequences, self.counts, self._growth, self.entries = names, counts, growth, growth.entries
        self._fill()
        self.is_open, self.is_aborted = True, False
        self.advance(host=self._on_host(), max_context_len=None if self.max_context_len is None else max(bound, 1))

    def end(self) -> Growth:
        """Stop; what it had added. Raises: KVCacheError for one that ended before."""
        if not self.is_open:
            raise KVCacheError("wanted a step that is open, got one that ended; writing() begins another")
        self.is_open = False
        return self._growth

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
    """The numbers of a step in one buffer, with views made once; on a GPU two more on the host, filled in turn.

    A launch or a copy costs 20 to 40 us of host time on a slow host (H200, 2026-11-22), whatever its size: so each step
    makes one. A buffer that the device may still read is not written into: its event is waited for, which by the next
    step but one is over. On a CPU numbers are written where they are read.

    Args:
        rows: sequences.
        columns: pages that a table holds.
        tokens: new tokens of all sequences.
        by_starts: whether it says where new tokens begin; without, each sequence has one.
        page_size: tokens of a page.
        device: where the step is used.
        staged: whether numbers are written into memory of the host and copied.
    Attributes:
        tables: (rows, columns) int32 on the device.
        lens: (rows,) int32 on the device.
        starts: (rows + 1,) int32 on the device, or None.
        slots, positions: (tokens,) int64 on the device.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        tokens: int,
        page_size: int,
        device: torch.device,
        *,
        by_starts: bool,
        staged: bool,
    ) -> None:
        self._page_size, self._width, self._by_starts = page_size, 4 * columns, by_starts
        self._places, whole = _places_of(rows, columns, tokens, by_starts=by_starts)
        self._hosts: list[Tensor] = []
        self._views: list[Any] = [] if staged else [bytearray(whole)]
        self._turn = 0
        if torch.is_inference_mode_enabled():  # what is made there cannot be written into elsewhere
            with torch.inference_mode(mode=False):
                self._make(rows, columns, whole, device)
        else:
            self._make(rows, columns, whole, device)  # to leave what is off takes 3 us
        self._events = [torch.cuda.Event() for _ in self._hosts if device.type == "cuda"]  # type: ignore[no-untyped-call]

    def _make(self, rows: int, columns: int, whole: int, device: torch.device) -> None:
        if not self._views:
            pinned = device.type == "cuda"
            self._hosts = [torch.zeros(whole, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
            self._views = [_memory_of(each) for each in self._hosts]
            self._device = torch.empty(whole, dtype=torch.uint8, device=device)
        self.slots, self.positions = self._part(0, torch.int64), self._part(1, torch.int64)
        self.lens, self.tables = self._part(2, torch.int32), self._part(4, torch.int32).view(rows, columns)
        self.starts = self._part(3, torch.int32) if self._by_starts else None

    def _part(self, number: int, dtype: torch.dtype) -> Tensor:
        place = self._places[number]
        if self._hosts:
            return self._device[place].view(dtype)
        if not (count := (place.stop - place.start) // dtype.itemsize):
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._views[0], dtype=dtype, count=count, offset=place.start)

    def fill(self, growth: Growth, counts: Sequence[int]) -> tuple[array[int], ...]:
        """Write the numbers of a step and send them; lengths, and starts where there are any.

        Those are in pageable memory: a copy of them without waiting is staged before it returns.
        """
        turn = self._turn = (self._turn + 1) % len(self._views)
        if self._events:
            self._events[turn].synchronize()
        width, size, entries, before = self._width, self._page_size, growth.entries, growth.before
        rows = [entry.row for entry in entries]
        if rows and {width} != set(map(len, rows)):
            rows = [entry.row if len(entry.row) == width else entry.padded(width, size) for entry in entries]
        lens = array("i", growth.after)
        starts = array("i", [0, *accumulate(counts)] if self._by_starts else ())
        if self._by_starts:
            positions, slots = array("q"), array("q")
            for entry, first, end in zip(entries, before, growth.after, strict=True):
                positions.extend(range(first, end))
                for number in range(first // size, -(-end // size)):
                    slot = (entry.pages[number] - number) * size  # of the sequence's first token, were all pages alike
                    slots.extend(range(slot + max(first, number * size), slot + min(end, (number + 1) * size)))
        else:
            positions = array("q", before)
            slots = array("q", list(map(add, [entry.offset for entry in entries], before)))
        view = self._views[turn]
        for place, part in zip(self._places, (slots, positions, lens, starts, b"".join(rows)), strict=True):
            view[place] = bytes(part) if self._hosts else part
        if self._hosts:
            self._device.copy_(self._hosts[turn], non_blocking=True)
        if self._events:
            self._events[turn].record(torch.cuda.current_stream(self._device.device))
        return (lens, starts) if self._by_starts else (lens,)


@functools.lru_cache(4096)
def _places_of(rows: int, columns: int, tokens: int, *, by_starts: bool) -> tuple[tuple[slice, ...], int]:
    """Where slots, positions, lengths, starts and tables lie in a buffer, in bytes, and how long it is."""
    sizes = 8 * tokens, 8 * tokens, 4 * rows, 4 * (rows + 1) if by_starts else 0, 4 * rows * columns
    begins = [0, *accumulate([-(-size // _APART) * _APART for size in sizes])]
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)), begins[-1]


def _memory_of(tensor: Tensor) -> memoryview:
    raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else bytearray()
    return memoryview(raw).cast("B")


_APART = 256
"""Bytes: each part begins where an allocation of its own would."""
