"""Where the newest tokens of a step belong: computed on the host where tables and lengths are there, else elsewhere.

An engine that schedules has its tables on the host. A launch costs 20 to 40 us of host time on a slow host (H200,
2026-11-22), whatever its size; the ten that slots take on the device are one copy then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.handle import Handle
from layerzero.core.indices import IN_C
from layerzero.core.system import forking
from layerzero.ops.ragged.starts import is_readable, sequences_of

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
        if slots.shape != self.slots.shape:  # starts on a device, without a copy on the host
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
        owner = sequences_of(starts, tokens.int())
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


def slots_on_host(
    tables: Tensor, lens: Tensor, starts: Tensor | None, tokens: int, page_size: int, pages: int
) -> tuple[Tensor, int] | None:
    """The slot of each new token, how many lie beyond their table or on a page that does not exist.

    None without both extension and numpy; the first call of an operation loads the extension. 4160 tokens of 72
    sequences take the first 4 us, the second 17 (2 CPU cores, 2026-11-23).
    Tokens before a sequence's first have -1 and count for nothing.
    Shapes: tables (B, max_blocks), lens (B,), starts (B + 1,) or None for ``tokens`` of each, all int32 on the CPU
    → (T,) int64 on the CPU, tokens that are lost
    Raises: InvalidCallError for starts that do not begin with 0, or decrease.
    """
    if (fill := IN_C.get("slots")) is not None:
        total = len(lens) * tokens if starts is None else max(int(starts[-1]), 0)
        slots = torch.empty(total, dtype=torch.int64, device="cpu")  # wherever torch makes others
        lost = fill(tables, lens, starts, tokens, page_size, pages, slots)
        if lost is not None and lost >= 0:
            return slots, lost
    np = numpy_here()
    if np is None:  # torch's own launches do without
        return None
    table: Any = tables.numpy()
    ends: Any = lens.numpy().astype(np.int64)  # differences of int32 wrap around
    begins: Any
    if starts is None:
        begins, counts = None if tokens == 1 else np.arange(len(ends) + 1) * tokens, tokens
    else:
        begins = starts.numpy().astype(np.int64)
        counts = begins[1:] - begins[:-1]
        if begins[0] or (len(counts) and counts[counts.argmin()] < 0):
            raise_for_starts(begins.tolist())
    found = slots_of_rows(np, table, ends, begins, counts, page_size, pages)
    made, lost = (found, 0) if found is not None else _with_holes(np, table, ends, begins, counts, page_size, pages)
    return torch.from_numpy(made), lost


def numpy_here() -> Any:
    """The module numpy, or None: torch runs without it."""
    try:
        import numpy as np
    except ImportError:
        return None
    return np


def slots_of_rows(np: Any, table: Any, ends: Any, begins: Any, counts: Any, page_size: int, pages: int) -> Any:
    """The slots where each token has one; None else.

    As one sum: if all tables were one row of pages, each would begin at a page. So sequences say that a token has a
    place, and one look at all pages says that they exist: negative ones are large without a sign.
    """
    capacity = table.shape[1] * page_size
    if not len(ends) or not capacity:
        return None
    first = ends - counts
    if first[first.argmin()] < 0 or ends[ends.argmax()] > capacity:  # a tenth of what min and max take (numpy 2.4)
        return None
    first += np.arange(0, len(ends) * capacity, capacity)
    if begins is None:
        places = first
    else:
        first -= begins[:-1]
        places = np.arange(begins[-1])
        places += np.repeat(first, counts)
    bits = page_size.bit_length() - 1
    whole = page_size == 1 << bits
    if whole:
        entries = places >> bits
        places &= page_size - 1
    else:
        entries, places = np.divmod(places, page_size)
    named = table.reshape(-1).take(entries)
    if len(named):
        numbers = named.view(np.uint32)
        if numbers[numbers.argmax()] >= pages:
            return None
    slots = named.astype(np.int64)
    if whole:
        slots <<= bits
    else:
        slots *= page_size
    slots += places
    return slots


def _with_holes(
    np: Any, table: Any, ends: Any, begins: Any, counts: Any, page_size: int, pages: int
) -> tuple[Any, int]:
    """The slots where some tokens have none, and how many of these are lost."""
    if begins is None:
        rows, places = np.arange(len(ends)), ends - 1
    else:
        rows = np.repeat(np.arange(len(ends)), counts)
        places = np.arange(len(rows)) + np.repeat(ends - begins[1:], counts)
    columns, offsets = np.divmod(places, page_size)
    early = places < 0
    inside = ~(early | (columns >= table.shape[1]))
    named = np.full(len(rows), -1, dtype=np.int64)
    named[inside] = table[rows[inside], columns[inside]]
    none = (named < 0) | (named >= pages)
    slots = named * page_size + offsets
    slots[none] = -1
    return slots, int((none & ~early).sum())


def check_starts(starts: Tensor) -> None:
    """Raise InvalidCallError for starts (B + 1,) on the CPU that do not begin with 0, or decrease."""
    if int(starts[0]) != 0 or bool((starts.long().diff() < 0).any()):
        raise_for_starts(starts.tolist())


def raise_for_starts(starts: list[int]) -> None:
    """Say what starts were wanted."""
    got = f"{str(starts[:8])[:-1]}{', ...' if len(starts) > 8 else ''}]"
    problem = f"cu_seqlens_q: wanted starts that begin with 0 and do not decrease, got {got}"
    raise InvalidCallError("StepMetadata", [problem])


def host_table_problems(tables: object, like: Tensor) -> list[str]:
    """What is wrong with a caller's tables on the host, compared with those on the device."""
    if tables is None:
        return []
    if isinstance(tables, Tensor) and tables.device.type == "cpu" and tables.dtype is torch.int32:
        if tables.shape != like.shape:
            got = f"shape {tuple(tables.shape)}"
        elif tables is like or not is_readable(like) or torch.equal(tables, like):
            return []
        else:
            row, column = (tables != like).nonzero()[0].tolist()
            pages = f"{int(like[row, column])}, got {int(tables[row, column])}"
            return [f"host_tables[{row}, {column}]: wanted the page that it stands for, {pages}"]
    else:
        got = told(tables) if not isinstance(tables, Tensor) else f"{tables.dtype} on {tables.device}"
    return [f"host_tables: wanted an int32 tensor on the CPU of shape {tuple(like.shape)} or None, got {got}"]


class LateCount:
    """How many values were wrong so far, wherever they were counted.

    A count on a GPU is copied behind the work that made it; the host knows it once it has arrived. Each stream has a
    count of its own: a sum of two streams' counts read memory that was not written yet (H200, 2026-11-28).

    Attributes:
        is_late: whether something was counted on a GPU, so that a later query may report it.
    """

    def __init__(self) -> None:
        self._on_host = 0
        self._streams: dict[Any, _StreamCount] = {}
        self._lock = forking.lock()

    def __reduce__(self) -> tuple[type[LateCount], tuple[()]]:
        """A copy has counted nothing yet: the event of a copy on its way is this process's."""
        return LateCount, ()

    def add(self, wrong: Tensor | int) -> None:
        """Count what is wrong: a number, or a tensor of bool where it lies."""
        if not isinstance(wrong, int) and wrong.is_cuda:
            stream, count = torch.cuda.current_stream(wrong.device), wrong.sum()
            with self._lock:
                if stream not in self._streams:
                    self._streams[stream] = _StreamCount()
                self._streams[stream].add(count, stream)
            return
        with self._lock:
            self._on_host += int(wrong if isinstance(wrong, int) else wrong.sum())

    @property
    def is_late(self) -> bool:
        return bool(self._streams)

    def untold(self) -> int:
        """How many were counted since the last question, as far as the host knows by now."""
        with self._lock:
            count, self._on_host = self._on_host, 0
            for stream, counted in self._streams.items():
                count += counted.untold(stream)
        return count


class _StreamCount:
    """What was counted on one stream. One copy is on its way at a time: newer ones in a row would never arrive."""

    def __init__(self) -> None:
        self._counted: Tensor | None = None
        self._told = 0
        self._is_sent = self._is_newer = False
        self._seen = torch.zeros((), dtype=torch.int64, pin_memory=True)
        self._arrived: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def add(self, count: Tensor, stream: torch.cuda.Stream) -> None:
        self._counted = count if self._counted is None else self._counted + count
        self._is_newer = True
        if not self._is_sent:
            self._send(stream)

    def _send(self, stream: torch.cuda.Stream) -> None:
        """Copy the count; only where ``stream`` is the current one, behind whose work the copy belongs."""
        if self._counted is not None and torch.cuda.current_stream(self._counted.device) == stream:
            self._seen.copy_(self._counted, non_blocking=True)
            self._arrived.record(stream)
            self._is_sent, self._is_newer = True, False

    def untold(self, stream: torch.cuda.Stream) -> int:
        count = 0
        if self._is_sent and self._arrived.query():  # type: ignore[no-untyped-call]
            total = int(self._seen)
            count, self._told, self._is_sent = total - self._told, total, False
        if self._is_newer and not self._is_sent:  # of a question on another stream, too
            self._send(stream)
        return count
