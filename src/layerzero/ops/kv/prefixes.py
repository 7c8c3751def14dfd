"""Full pages that are known by their tokens, so that a prompt that begins alike does not compute them again.

A page is known by the digest of its own tokens and of all before them: two pages of one digest hold the same keys and
values. What makes these depend on more than tokens (an adapter, a picture, a tenant) is a salt of the first page.
A known page that no sequence has is idle; the page that is idle longest is evicted first. Sequences return their last
page first, so that a prefix loses its end before its beginning.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b


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
