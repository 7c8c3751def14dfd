"""Which pages each sequence has: a book on the host, which touches no memory of the cache itself.

A page is shared by as many sequences as its count of users says. A sequence that writes into a page that others use
gets a page of its own first, so that what others read never changes. A page whose tokens are known to the prefixes has
these as one more user. Sequences that begin with the same pages are grouped, for attention that reads these once.

A full page is known by the digest of its own tokens and of all before them: two pages of one digest hold the same keys
and values, so that a prompt that begins alike does not compute them again. What makes these depend on more than tokens
(an adapter, a picture, a tenant) is a salt of the first page. A known page that no sequence has is idle; the page that
is idle longest is evicted first. Sequences return their last page first, so that a prefix loses its end before its
beginning.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from layerzero.core.arguments import has_hash, told
from layerzero.core.reasons import ReasonCode
from layerzero.ops.kv.form import KVCacheError


class Prefixes:
    """The known pages of a cache. It counts no users: the book does, and says when a page is idle.

    Attributes:
        idle: known pages that no sequence has, the one that is idle longest first.
        evictions: pages that were taken for other tokens.
        found: tokens that prompts did not compute again.
    """

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self.idle: dict[int, None] = {}
        self.evictions = self.found = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._digests

    def _digests_of(self, tokens: Sequence[int], salt: bytes) -> Iterator[bytes]:
        """The digest of each full page, by 16 bytes of BLAKE2: two of 2^32 pages are alike once in 2^64 times."""
        packed, width, digest = memoryview(array("q", tokens)).cast("B"), 8 * self._size, salt
        for end in range(width, len(packed) + 1, width):
            digest = blake2b(digest + packed[end - width : end], digest_size=16).digest()
            yield digest

    def find(self, tokens: Sequence[int], salt: bytes) -> list[int]:
        """The known pages that these tokens begin with, idle no more."""
        found: list[int] = []
        for digest in self._digests_of(tokens, salt):
            page = self._pages.get(digest)
            if page is None:
                break
            found.append(page)
            self.idle.pop(page, None)
        self.found += len(found) * self._size
        return found

    def publish(self, pages: Sequence[int], tokens: Sequence[int], salt: bytes) -> list[int]:
        """Know full pages by their tokens; those that are new. Tokens that another page is known by stay with it."""
        fresh = []
        for page, digest in zip(pages, self._digests_of(tokens, salt), strict=False):
            if page not in self._digests and digest not in self._pages:
                self._pages[digest], self._digests[page] = page, digest
                fresh.append(page)
        return fresh

    def rest(self, page: int) -> None:
        """Note that no sequence has a page, if it is known."""
        if page in self._digests:
            self.idle[page] = None

    def forget(self, page: int) -> None:
        """Know a page no more."""
        self.idle.pop(page, None)
        del self._pages[self._digests.pop(page)]

    def evict(self) -> int:
        """The page that is idle longest, known no more. Raises: StopIteration where none is idle."""
        page = next(iter(self.idle))
        self.forget(page)
        self.evictions += 1
        return page

    def move(self, places: Mapping[int, int]) -> None:
        """Number known pages anew: those that move, by where they go."""
        self._digests = {places.get(page, page): digest for page, digest in self._digests.items()}
        self._pages = {digest: page for page, digest in self._digests.items()}


@dataclass(slots=True)
class CachedSequence:
    """One sequence: its pages in order, its tokens, and what was swapped to the host where it is not on the device.

    ``returned`` is what the book counted when it last gave tokens back: a table from before that may name pages that
    are another's. ``row`` holds the
    pages as bytes of a row of a block table, so that a step copies it as it is; empty once pages change. ``offset`` is
    what the slot of a place in its last page is above that place. Up to ``limit`` tokens its last page is its own and
    has room; 0 where that has to be looked at.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    swapped: Any = None
    returned: int = 0
    row: bytes = b""
    offset: int = 0
    limit: int = 0

    def padded(self, width: int, size: int) -> bytes:
        """The pages as a row of so many bytes, zeros behind them; pages are of ``size`` tokens."""
        self.offset = (self.pages[-1] - len(self.pages) + 1) * size if self.pages else 0
        self.row = self.pages.tobytes().ljust(width, b"\0")
        return self.row


@dataclass(slots=True)
class Growth:
    """What a step adds to its sequences, so that it can be taken back.

    Attributes:
        entries: the sequences.
        before, after: tokens that each had, and has.
        added: pages that sequences got, in order.
        replaced: sequences, the shared page that each left, its own in place of it, and whether the step still counts
            as a user of the former: of a known page, which nothing may evict before the step ends.
    """

    entries: Sequence[CachedSequence]
    before: list[int]
    after: list[int]
    added: list[tuple[CachedSequence, int]] = field(default_factory=list)
    replaced: list[tuple[CachedSequence, int, int, bool]] = field(default_factory=list)


class Book:
    """The pages of a cache and the sequences that have them."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.users = [0] * pages
        self.entries: dict[Hashable, CachedSequence] = {}
        self.prefixes = Prefixes(page_size)
        self._free = list(range(pages))
        self._names = 0
        self.swapped = 0
        """Sequences that are on the host."""
        self.returned = 0
        """How often any sequence gave tokens back: as long as that stays, they need no look one by one."""

    @property
    def free(self) -> list[int]:
        """Numbers of the free pages, in order; known ones that no sequence has are free, too."""
        return sorted([*self._free, *self.prefixes.idle])

    @property
    def free_count(self) -> int:
        """How many pages are free."""
        return len(self._free) + len(self.prefixes.idle)

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

    def grow(self, growth: Growth, counts: Sequence[int]) -> None:
        """Make room for the new tokens of a step, for all or for none.

        Raises: KVCacheError with KV_CACHE_EXHAUSTED where there are too few pages; nothing is changed then.
        """
        ends = zip(growth.entries, growth.after, strict=True)
        short = [(entry, end - entry.length) for entry, end in ends if end > entry.limit]
        if short and sum(self._blocks(count) + 1 for _, count in short) > self.free_count:  # it may not be enough
            self._demand(self._needed(short), sum(counts))
        for entry, count in short:
            self._make_room(entry, count, growth)
        for entry, length in zip(growth.entries, growth.after, strict=True):
            entry.length = length

    def _needed(self, short: Iterable[tuple[CachedSequence, int]]) -> int:
        """Pages that sequences need for new tokens, those included that replace shared ones."""
        left: dict[int, int] = {}  # users of a shared page without those of this step that leave it
        needed = 0
        for entry, count in [each for each in short if each[1]]:
            needed += self._blocks(entry.length + count) - len(entry.pages)
            if entry.length % self.page_size:
                last = entry.pages[-1]
                remaining = left.get(last, self.users[last])
                needed += remaining > 1
                left[last] = remaining - (remaining > 1)
        return needed

    def _make_room(self, entry: CachedSequence, count: int, growth: Growth) -> None:
        if not count:
            return
        pages, entry.row = entry.pages, b""
        if entry.length % self.page_size and self.users[pages[-1]] > 1:
            shared, pages[-1] = pages[-1], self.take()
            held = shared in self.prefixes
            self.users[shared] -= not held
            growth.replaced.append((entry, shared, pages[-1], held))
        for _ in range(self._blocks(entry.length + count) - len(pages)):
            pages.append(self.take())
            growth.added.append((entry, pages[-1]))
        entry.limit = len(pages) * self.page_size

    def keep(self, growth: Growth) -> None:
        """Keep what a step added: known pages that it left may be evicted from now on."""
        for _, shared, _, held in growth.replaced:
            if held:
                self.give(shared)

    def undo(self, growth: Growth) -> None:
        """Take back what a step added, the last sequence first."""
        for entry, page in reversed(growth.added):
            entry.pages.pop()
            self.give(page)
            entry.row, entry.limit = b"", 0
        for entry, shared, page, held in reversed(growth.replaced):
            self.give(page)
            entry.pages[-1], entry.row, entry.limit = shared, b"", 0
            self.users[shared] += not held
        for entry, before in zip(growth.entries, growth.before, strict=True):
            entry.length, entry.limit = before, 0  # a page that it was left alone with is shared again

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _demand(self, needed: int, tokens: int) -> None:
        if needed > self.free_count:
            swapped = "free or swap_out a sequence, or make the cache larger"
            got = f"{self.free_count} of {self.pages}"
            problem = f"wanted {needed} free pages for {tokens} new tokens, got {got}; nothing was written: {swapped}"
            raise KVCacheError(problem, ReasonCode.KV_CACHE_EXHAUSTED)

    def take(self) -> int:
        """The lowest free page, for one user; where there is none, the known one that lay idle longest."""
        page = heapq.heappop(self._free) if self._free else self.prefixes.evict()
        self.users[page] = 1
        return page

    def take_all(self, count: int, tokens: int) -> list[int]:
        """So many pages or none. Raises: KVCacheError with KV_CACHE_EXHAUSTED."""
        self._demand(count, tokens)
        return [self.take() for _ in range(count)]

    def give(self, page: int) -> bool:
        """One user less; whether the page is free now, so that nothing in it counts."""
        self.users[page] -= 1
        if self.users[page]:
            if self.users[page] == 1:  # the prefixes, if it is known
                self.prefixes.rest(page)
            return False
        heapq.heappush(self._free, page)
        return True

    def find(self, new: Hashable | None, tokens: Sequence[int], salt: bytes) -> Hashable:
        """A sequence that begins with the known pages of these tokens, all but the last token at most."""
        made = self.add(new)  # first, since pages that were found are idle no more
        found = self.prefixes.find(tokens[: len(tokens) - 1], salt)
        self.entries[made].pages, self.entries[made].length = array("i", found), len(found) * self.page_size
        for page in found:
            self.users[page] += 1
        return made

    def publish(self, entry: CachedSequence, tokens: Sequence[int], salt: bytes) -> int:
        """Make the full pages of a sequence known by its first tokens; how many became so."""
        fresh = self.prefixes.publish(entry.pages, tokens, salt)
        for page in fresh:
            self.users[page] += 1
        return len(fresh)

    def fork(self, name: Hashable, new: Hashable | None, tokens: int) -> Hashable:
        """A sequence that begins with the first tokens of another one, on the same pages."""
        entry = self.entry(name)
        made = self.add(new)
        copy = self.entries[made]
        entry.limit = 0
        copy.pages, copy.length = entry.pages[: self._blocks(tokens)], tokens
        for page in copy.pages:
            self.users[page] += 1
        return made

    def shrink(self, entry: CachedSequence, tokens: int) -> list[int]:
        """Forget the tokens behind the first so many; the pages that are free now."""
        keep = self._blocks(tokens)
        gone, entry.pages, entry.row, entry.limit = entry.pages[keep:], entry.pages[:keep], b"", 0
        if tokens < entry.length:
            self.returned += 1
            entry.length, entry.returned = tokens, self.returned
        return [page for page in reversed(gone) if self.give(page)]  # of known ones the last is evicted first

    def remove(self, name: Hashable) -> list[int]:
        """Take a sequence out of the book; the pages that are free now."""
        entry = self.known(name)
        gone = self.shrink(entry, 0)
        self.swapped -= entry.swapped is not None
        del self.entries[name]
        return gone

    def move(self, places: Mapping[int, int]) -> None:
        """Number pages anew: those that move, by where they go. Each place is free, or left by another one."""
        for page in self.prefixes.idle.keys() & set(places.values()):  # they hold nothing but what may be evicted
            self.users[page] = 0
            self.prefixes.forget(page)
            self.prefixes.evictions += 1
        self.prefixes.move(places)
        users = [self.users[page] for page in places]
        for page in places:
            self.users[page] = 0
        for page, count in zip(places.values(), users, strict=True):
            self.users[page] = count
        for entry in self.entries.values():
            entry.pages, entry.row = array("i", [places.get(page, page) for page in entry.pages]), b""
        self._free = [page for page, count in enumerate(self.users) if not count]

    def held(self) -> dict[int, int]:
        """By each page that a sequence has, how many of its tokens are used."""
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
    return len([*itertools.takewhile(lambda pages: len(set(pages)) == 1, zip(*tables, strict=False))])
