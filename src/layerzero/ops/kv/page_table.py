"""Which pages each sequence has: a book on the host, which touches no memory of the cache itself.

A page is shared by as many sequences as its count of users says. A sequence that writes into a page that others use
gets a page of its own first, so that what others read never changes. Every change is planned as a whole before any of
it is made. Sequences that begin with the same pages are grouped, for attention that reads these once.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerzero.core.arguments import told
from layerzero.core.reasons import ReasonCode
from layerzero.ops.kv.strategy import KVCacheError


@dataclass(slots=True)
class CachedSequence:
    """One sequence: its pages in order, its tokens, and what was swapped to the host where it is not on the device.

    Pages are an array of int32, as a row of a block table is: a step copies it, whatever its length.

    ``returned`` counts how often it gave tokens back: older tables name pages that may be another's.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    swapped: Any = None
    returned: int = 0


@dataclass(slots=True)
class Growth:
    """What a step adds to one sequence, so that it can be taken back."""

    entry: CachedSequence
    before: int
    added: list[int]
    replaced: int | None = None
    """The shared page that the sequence's last one stands for now; None where it had its own."""


def has_hash(name: object) -> bool:
    """Whether something can be a key: a tuple may be, and is none with a list in it."""
    try:
        hash(name)
    except TypeError:
        return False
    return True


class Book:
    """The pages of a cache and the sequences that have them."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.users = [0] * pages
        self.entries: dict[Hashable, CachedSequence] = {}
        self._free = list(range(pages))
        self._names = 0
        self.returned = 0
        """How often any sequence gave tokens back: as long as that stays, they need no look one by one."""

    @property
    def free(self) -> list[int]:
        """Numbers of the free pages, in order."""
        return sorted(self._free)

    @property
    def free_count(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def add(self, name: Hashable | None) -> Hashable:
        """Write an empty sequence into the book. Raises: KVCacheError for a name that is taken, or can be none."""
        if name is None:
            while self._names in self.entries:
                self._names += 1
            name = self._names
            self._names += 1
        if not has_hash(name):
            raise KVCacheError(f"wanted a name with a hash, such as a number or a string, got {told(name)}")
        if name in self.entries:
            raise KVCacheError(f"wanted a name that no sequence has, got {told(name)}; free that one first")
        self.entries[name] = CachedSequence()
        return name

    def entry(self, name: Hashable) -> CachedSequence:
        """A sequence that is on the device. Raises: KVCacheError for one that is unknown or swapped to the host."""
        found = self.known(name)
        if found.swapped is not None:
            raise KVCacheError(f"wanted a sequence on the device, got {told(name)} on the host; swap_in() first")
        return found

    def known(self, name: Hashable) -> CachedSequence:
        """A sequence, wherever it is. Raises: KVCacheError for one that is unknown."""
        try:
            return self.entries[name]
        except (KeyError, TypeError):
            names = ", ".join(map(told, list(self.entries)[:6])) or "none"
            raise KVCacheError(f"wanted a sequence that was allocated ({names}), got {told(name)}") from None

    def grow(self, entries: Sequence[CachedSequence], counts: Sequence[int]) -> list[Growth]:
        """Make room for new tokens of several sequences, for all or for none.

        Raises: KVCacheError with KV_CACHE_EXHAUSTED where there are too few pages; nothing is changed then.
        """
        size, users = self.page_size, self.users
        left: dict[int, int] = {}  # users of a shared page without those of this step that leave it
        plans, needed = [], 0
        for entry, count in zip(entries, counts, strict=True):
            length, pages, is_shared = entry.length, entry.pages, False
            if count and length % size and users[pages[-1]] > 1:
                last = pages[-1]
                remaining = left.get(last, users[last])
                is_shared = remaining > 1
                left[last] = remaining - is_shared
            more = -(-(length + count) // size) - len(pages)
            needed += more + is_shared
            plans.append((entry, count, more, is_shared))
        self._demand(needed, sum(counts))
        made = []
        for entry, count, more, is_shared in plans:
            growth = Growth(entry, entry.length, [])
            if is_shared:
                growth.replaced = entry.pages[-1]
                users[growth.replaced] -= 1
                entry.pages[-1] = self.take()
            if more:
                growth.added = [self.take() for _ in range(more)]
                entry.pages.extend(growth.added)
            entry.length += count
            made.append(growth)
        return made

    def undo(self, growths: Iterable[Growth]) -> None:
        """Take back what a step added, the last sequence first."""
        for growth in reversed(list(growths)):
            entry = growth.entry
            for _ in growth.added:
                self.give(entry.pages.pop())
            if growth.replaced is not None:
                self.give(entry.pages[-1])
                entry.pages[-1] = growth.replaced
                self.users[growth.replaced] += 1
            entry.length = growth.before

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _demand(self, needed: int, tokens: int) -> None:
        if needed > len(self._free):
            swapped = "free or swap_out a sequence, or make the cache larger"
            got = f"{len(self._free)} of {self.pages}"
            problem = f"wanted {needed} free pages for {tokens} new tokens, got {got}; nothing was written: {swapped}"
            raise KVCacheError(problem, ReasonCode.KV_CACHE_EXHAUSTED)

    def take(self) -> int:
        """The lowest free page, for one user."""
        page = heapq.heappop(self._free)
        self.users[page] = 1
        return page

    def take_all(self, count: int, tokens: int) -> list[int]:
        """So many pages or none. Raises: KVCacheError with KV_CACHE_EXHAUSTED."""
        self._demand(count, tokens)
        return [self.take() for _ in range(count)]

    def give(self, page: int) -> bool:
        """One user less; whether the page is free now."""
        self.users[page] -= 1
        if self.users[page]:
            return False
        heapq.heappush(self._free, page)
        return True

    def fork(self, name: Hashable, new: Hashable | None, tokens: int) -> Hashable:
        """A sequence that begins with the first tokens of another one, on the same pages."""
        entry = self.entry(name)
        made = self.add(new)
        copy = self.entries[made]
        copy.pages, copy.length = entry.pages[: self._blocks(tokens)], tokens
        for page in copy.pages:
            self.users[page] += 1
        return made

    def shrink(self, entry: CachedSequence, tokens: int) -> list[int]:
        """Forget the tokens behind the first so many; the pages that are free now."""
        keep = self._blocks(tokens)
        gone, entry.pages = entry.pages[keep:], entry.pages[:keep]
        entry.returned += tokens < entry.length
        self.returned += tokens < entry.length
        entry.length = tokens
        return [page for page in gone if self.give(page)]

    def remove(self, name: Hashable) -> list[int]:
        """Take a sequence out of the book; the pages that are free now."""
        entry = self.known(name)
        gone = self.shrink(entry, 0)
        del self.entries[name]
        return gone

    def move(self, places: Mapping[int, int]) -> None:
        """Number pages anew: those that move, by where they go. Each place is free, or left by another one."""
        users = [self.users[page] for page in places]
        for page in places:
            self.users[page] = 0
        for page, count in zip(places.values(), users, strict=True):
            self.users[page] = count
        for entry in self.entries.values():
            entry.pages = array("i", [places.get(page, page) for page in entry.pages])
        self._free = [page for page, count in enumerate(self.users) if not count]

    def held(self) -> dict[int, int]:
        """By each page that somebody has, how many of its tokens are used."""
        found: dict[int, int] = {}
        for entry in self.entries.values():
            for number, page in enumerate(entry.pages):
                used = min(entry.length - number * self.page_size, self.page_size)
                found[page] = max(found.get(page, 0), used)
        return found


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences whose tables begin alike.

    Attributes:
        sequences: their names, in the order of the query.
        rows: their places in the query.
        shared_blocks: how many first pages all of them share, each full; 0 for a sequence that shares none.
    """

    sequences: tuple[Hashable, ...]
    rows: tuple[int, ...]
    shared_blocks: int


def groups_of(names: Sequence[Hashable], tables: Sequence[Sequence[int]], full: Sequence[int]) -> list[PrefixGroup]:
    """Group sequences by their first page; each group shares what all of its members share.

    Args:
        tables: the pages of each sequence, in order.
        full: how many of them each sequence has filled.
    """
    by_first: dict[object, list[int]] = {}
    for row, table in enumerate(tables):
        first: object = table[0] if full[row] else ("alone", row)
        by_first.setdefault(first, []).append(row)
    return [
        PrefixGroup(
            tuple(names[row] for row in rows),
            tuple(rows),
            _common([tables[row][: full[row]] for row in rows]) if len(rows) > 1 else 0,
        )
        for rows in by_first.values()
    ]


def _common(tables: Sequence[Sequence[int]]) -> int:
    first, shortest = tables[0], min(map(len, tables))
    for place in range(shortest):
        if any(table[place] != first[place] for table in tables):
            return place
    return shortest
