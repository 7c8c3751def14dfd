"""What a cache has, uses and wastes, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """A cache at one moment.

    Attributes:
        strategy: how its memory is laid out.
        pages, free_pages, shared_pages: all pages, those that nobody has, those that several sequences have.
        page_size: tokens of a page.
        tokens: tokens of all sequences on the device, a shared one once.
        sequences, swapped: sequences on the device, and on the host.
        reserved_bytes: address space, or memory where that is the same.
        committed_bytes: memory that is really there, of all layers.
        needed_bytes: what the tokens take.
        host_bytes: what is swapped to the host.
        growths: how often memory was added since the cache was made, and ``growth_us`` how long that took, in all.
        waited_growths: those of them that a step had to wait for.
    """

    strategy: str
    pages: int
    free_pages: int
    shared_pages: int
    page_size: int
    tokens: int
    sequences: int
    swapped: int
    largest_free_run: int
    reserved_bytes: int
    committed_bytes: int
    needed_bytes: int
    host_bytes: int
    growths: int
    waited_growths: int
    growth_us: float

    @property
    def used_pages(self) -> int:
        """Pages that somebody has."""
        return self.pages - self.free_pages

    @property
    def fragmentation(self) -> float:
        """The part of the free pages that does not lie in their longest row, 0 to 1."""
        return 1.0 - self.largest_free_run / self.free_pages if self.free_pages else 0.0

    @property
    def waste(self) -> float:
        """The part of the pages in use that holds no token, 0 to 1."""
        room = self.used_pages * self.page_size
        return 1.0 - self.tokens / room if room else 0.0


def longest_run(numbers: list[int]) -> int:
    """The most numbers of a sorted list that follow each other."""
    longest = run = 0
    before = None
    for number in numbers:
        run = run + 1 if before is not None and number == before + 1 else 1
        longest, before = max(longest, run), number
    return longest
