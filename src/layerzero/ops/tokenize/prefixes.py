"""Encoded texts, kept: whole texts that come again, and the beginnings that long prompts share.

A text is cut where the ids of both parts, one behind the other, are those of the whole text. A text is cut at a space
that follows another character, for tokenizers that say nothing over such a place:

    byte-level BPE  whose split patterns are known (:data:`~layerzero.ops.tokenize.identity.SCHEMES`): no piece of
                    them has a space behind another character, none of them looks back, and the first part ends in no
                    space, which is all that they look ahead over. NFC does not compose over a space.
    WordPiece       behind BERT's normalizer and splitter: words are what lies between spaces, and each is on its own.
    SentencePiece   BPE with the identity for a normalizer, whose pieces have the mark of a space in front only: no
                    merge reaches over such a place, so merges on both sides of it know nothing of each other. Where
                    the model puts a mark before every text, that one stands for the space of the second part. A
                    Unigram model adds up scores from the start of a text, and rounds: that is not cut.

Added tokens with a space, or with flags, leave no cut.

The key is the text itself, compared as a whole, under the whole hash of the tokenizer: nothing is shortened, so two
texts never meet. A text is looked up by its first 64 characters, which costs 0.1 us. Of a beginning that comes for the
first time only a hash of these is noted, without a lock; when it comes again, the text is kept to compare the next one
with. What is kept never exceeds a number of bytes; what was used longest ago goes first.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from layerzero.core.system import forking, log
from layerzero.ops.tokenize.identity import fields_of, number_of
from layerzero.ops.tokenize.tokenizer import Tokenizer, known, when_forgotten

MARK = "\u2581"
"""What SentencePiece writes for a space."""

SEPARATORS = "\x1c\x1d\x1e\x1f\x85\u180e\u200b\ufeff" + MARK
"""Characters that some implementations count as spaces and others do not."""

_USER_DEFINED = 4
"""The type of a SentencePiece that its author defined, and that is found before any merge."""


class Cut(NamedTuple):
    """How texts of a tokenizer are cut; ``drops``: the second part begins behind the space, not with it."""

    drops: bool = False

    def at(self, text: str, place: int) -> bool:
        if text[place] != " " or text[place - 1].isspace() or text[place - 1] in SEPARATORS:
            return False
        return not self.drops or place + 1 < len(text)

    def before(self, text: str, end: int, least: int) -> int:
        """The last place at or before ``end`` where a text may be cut; 0 where there is none behind ``least``."""
        while True:
            place = text.rfind(" ", least, end + 1)
            if place <= least:
                return 0
            if self.at(text, place):
                return place
            end = place - 1

    def rest(self, text: str, place: int) -> str:
        return text[place + self.drops :]


def cut_of(tokenizer: Tokenizer) -> Cut | None:
    """How texts of a tokenizer may be cut; None where no place is known to be exact."""
    found: Cut | None = tokenizer.engine("cut", lambda: _cut(tokenizer))
    return found


def _cut(tokenizer: Tokenizer) -> Cut | None:
    parts = tokenizer.identity
    if parts.format == "sentencepiece":
        return _of_pieces(tokenizer.native.serialized_model_proto())
    if parts.added_tokens == "flagged" or any(" " in each for each in tokenizer.specials):
        return None
    if parts.model == "WordPiece":
        fits = parts.pretokenizer == "BertPreTokenizer" and parts.normalizer in ("none", "BertNormalizer")
    else:
        fits = bool(parts.scheme) and parts.normalizer in ("none", "NFC")
    return Cut() if fits else None


def _of_pieces(model: bytes) -> Cut | None:
    """The same of a SentencePiece model file; numbers are those of the fields in its protobuf."""
    found = list(fields_of(model))
    trainer, normalizer = (b"".join(value for number, value in found if number == kind) for kind in (2, 3))
    rules = b"".join(value for number, value in fields_of(normalizer) if number in (2, 6))  # what it replaces
    is_bpe, as_suffix, falls_back = number_of(trainer, 3, 1) == 2, number_of(trainer, 24, 0), number_of(trainer, 35, 0)
    if not is_bpe or as_suffix or not falls_back or rules:
        return None
    if number_of(normalizer, 4, 1) or not number_of(normalizer, 5, 1):  # spaces are taken away, or not marked
        return None
    pieces = [value for number, value in found if number == 1]
    texts = [next((value for number, value in fields_of(each) if number == 1), b"").decode() for each in pieces]
    if MARK not in texts or any(re.search(f"[^{MARK} ][{MARK} ]", each) for each in texts):
        return None
    defined = zip(texts, pieces, strict=True)
    if any((MARK in text or " " in text) and number_of(each, 3, 1) == _USER_DEFINED for text, each in defined):
        return None
    return Cut(drops=bool(number_of(normalizer, 3, 1)))


HEAD = 64
"""Characters by which a text is looked up."""

LEAST = 1024
"""Shorter texts are encoded: that costs what looking them up would (2 CPU cores, 2026-11-22)."""

LEAST_SHARED = 512
"""Two texts share a beginning that is worth keeping from so many characters on."""

MARKS = 1024
"""Hashes of beginnings that came once: 40 KB of a tokenizer, whatever it reads, besides the bytes of texts."""

_UNMARKED = -1
"""What no text has: Python's hashes are never -1, and that of an empty text is 0."""

PER_HEAD = 4
"""Beginnings that are kept of one head."""

ID_BYTES = 8 + 32
"""An id takes a place in a tuple, and an integer of its own beyond those that Python shares."""

Run = Callable[[str], list[int]]


@dataclass(slots=True)
class TokenizerCacheConfig:
    """How encoded texts are kept.

    Attributes:
        max_bytes: all that is kept takes no more; 0 keeps nothing.
        enable_namespace_isolation: whether tokenizers that are equal but have other names share nothing.
        validation_rate_initial: share of a namespace's first 100 hits that are encoded again and compared.
        validation_rate_warmup: the same of the next 1000.
        validation_rate_stable: and of all later ones.
    """

    max_bytes: int = 64 * 2**20
    enable_namespace_isolation: bool = True
    validation_rate_initial: float = 0.10
    validation_rate_warmup: float = 0.01
    validation_rate_stable: float = 0.001

    def rate(self, hits: int) -> float:
        """The share of hits that are validated, after so many."""
        if hits < 100:
            return self.validation_rate_initial
        return self.validation_rate_warmup if hits < 1100 else self.validation_rate_stable


@dataclass(slots=True)
class TokenizerCacheStats:
    """What the cache did: texts that were found whole, beginnings that were found, texts that were not."""

    hits: int = 0
    prefix_hits: int = 0
    misses: int = 0
    validations: int = 0
    mismatches: int = 0
    evicted: int = 0
    bytes: int = 0
    entries: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that found something."""
        found = self.hits + self.prefix_hits
        return found / max(found + self.misses, 1)


@dataclass(slots=True)
class _Head:
    """What is known of texts with one beginning: the text that was seen last, and what was kept of such texts."""

    last: str
    kept: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    bytes: int = 0


def shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class EncodedTexts:
    """The cache of a process, shared by its threads."""

    def __init__(self, config: TokenizerCacheConfig | None = None) -> None:
        self.config = config or TokenizerCacheConfig()
        self._lock = forking.lock()
        self._heads: OrderedDict[tuple[Any, ...], _Head] = OrderedDict()
        self._stats: dict[str, TokenizerCacheStats] = {}
        self._marks: dict[tuple[Any, ...], list[int]] = {}
        self._bytes = 0
        forking.when_torn(self.clear)
        when_forgotten(self.clear)

    def __reduce__(self) -> str:
        return "TEXTS"  # each process has one

    def namespace(self, tokenizer: Tokenizer) -> str:
        """``name:hash`` of a tokenizer; the hash alone where namespaces are not kept apart."""
        name = f"{tokenizer.name}:" if self.config.enable_namespace_isolation else ""
        return f"{name}{tokenizer.tokenizer_hash}"

    def reader(self, tokenizer: Tokenizer, flags: tuple[Any, ...]) -> Callable[[str, Run], list[int]]:
        """What encodes a text of this tokenizer, with what was kept of it."""
        space, cut = self.namespace(tokenizer), None if any(flags[:1]) else cut_of(tokenizer)
        stats = self._stats.setdefault(space, TokenizerCacheStats())
        heads, place = self._heads, (space, flags)
        marks = self._marks.setdefault(place, [_UNMARKED] * MARKS)

        def encode(text: str, run: Run) -> list[int]:
            start = text[:HEAD]
            head = heads.get((place, start))
            if head is None:
                stats.misses += 1
                mark = hash(start)
                if marks[mark % MARKS] == mark:  # twice: now it is worth a lock; that cost 2 us for every new text
                    self._see(place, text)
                else:
                    marks[mark % MARKS] = mark
                return run(text)
            for start, ids in head.kept:
                if text.startswith(start):
                    if len(start) == len(text):
                        stats.hits += 1
                        return self._checked(place, text, ids, (), run, stats)
                    if cut is not None and cut.at(text, len(start)):
                        stats.prefix_hits += 1
                        return self._checked(place, text, ids, run(cut.rest(text, len(start))), run, stats)
            stats.misses += 1
            return self._learn(place, head, text, run, cut)

        return encode

    def _see(self, place: tuple[Any, ...], text: str) -> None:
        """Remember a text whose beginning is not kept, to compare the next one with it."""
        with self._lock:
            key = (place, text[:HEAD])
            if key not in self._heads:
                self._add(key, _Head(text, bytes=sys.getsizeof(text) + 4 * HEAD + 400))

    def _learn(self, place: tuple[Any, ...], head: _Head, text: str, run: Run, cut: Cut | None) -> list[int]:
        """Encode a text that begins like another one; keep the whole of what came twice, or what both begin with."""
        same = shared(text, head.last)
        if same == len(text) == len(head.last):
            ids = run(text)
            self._keep(place, head, text, text, tuple(ids))
            return ids
        end = 0
        if cut is not None and same > LEAST_SHARED:
            end = cut.before(text, min(same, len(text) - 1), LEAST_SHARED)
        if cut is None or not end:
            self._keep(place, head, text, "", ())
            return run(text)
        ids = run(text[:end])
        self._keep(place, head, text, text[:end], tuple(ids))
        return ids + run(cut.rest(text, end))

    def _keep(self, place: tuple[Any, ...], head: _Head, text: str, start: str, ids: tuple[int, ...]) -> None:
        with self._lock:
            key = (place, text[:HEAD])
            if self._heads.get(key) is not head:  # it went meanwhile
                return
            kept = [each for each in head.kept if each[0] != start][: PER_HEAD - 1]
            kept = sorted([*kept, (start, ids)] if start else kept, key=lambda each: -len(each[0]))
            size = sys.getsizeof(text) + 4 * HEAD + 400
            size += sum(sys.getsizeof(each) + ID_BYTES * len(of) for each, of in kept)
            self._heads.move_to_end(key)
            if size > self.config.max_bytes:
                self._let_go(key)
                return
            self._shrink(size - head.bytes)  # before it grows: readers never see more than the bound
            self._bytes += size - head.bytes
            head.last, head.kept, head.bytes = text, kept, size

    def _add(self, key: tuple[Any, ...], head: _Head) -> None:
        if head.bytes <= self.config.max_bytes:
            self._shrink(head.bytes)
            self._heads[key] = head
            self._bytes += head.bytes

    def _shrink(self, more: int = 0) -> None:
        """Let go of what was used longest ago, until so many bytes more fit."""
        while self._bytes + more > self.config.max_bytes and self._heads:
            self._let_go(next(iter(self._heads)))

    def _let_go(self, key: tuple[Any, ...]) -> None:
        self._bytes -= self._heads.pop(key).bytes
        self._stats.setdefault(key[0][0], TokenizerCacheStats()).evicted += 1

    def _checked(
        self, place: tuple[Any, ...], text: str, ids: tuple[int, ...], rest: Any, run: Run, stats: TokenizerCacheStats
    ) -> list[int]:
        """What was kept, compared with a fresh encoding now and then."""
        hits = stats.hits + stats.prefix_hits
        rate = self.config.rate(hits)
        found = [*ids, *rest]
        if rate > 0.0 and hits % max(round(1 / rate), 1) == 0:
            stats.validations += 1
            fresh = run(text)
            if fresh != found:
                stats.mismatches += 1
                log.error("tokenizer cache: a kept text of %s has other ids than a fresh one; it is replaced", place[0])
                with self._lock:
                    gone = self._heads.pop((place, text[:HEAD]), None)
                    self._bytes -= gone.bytes if gone is not None else 0
                self._see(place, text)
                return fresh
            with self._lock:  # what is used stays; on every hit that would cost more than it is worth
                if (place, text[:HEAD]) in self._heads:
                    self._heads.move_to_end((place, text[:HEAD]))
        return found

    def stats(self, tokenizer: Tokenizer | None = None) -> TokenizerCacheStats:
        """What was counted, for one tokenizer or for all."""
        with self._lock:
            chosen = [
                each for space, each in self._stats.items() if tokenizer is None or space == self.namespace(tokenizer)
            ]
            names = ("hits", "prefix_hits", "misses", "validations", "mismatches", "evicted")
            found = TokenizerCacheStats(**{name: sum(getattr(each, name) for each in chosen) for name in names})
            spaces = None if tokenizer is None else self.namespace(tokenizer)
            heads = [each for (place, _), each in self._heads.items() if spaces in (None, place[0])]
            found.bytes, found.entries = sum(each.bytes for each in heads), len(heads)
            return found

    def invalidate_model(self, name: str) -> int:
        """Forget all texts of tokenizers of this name, shared ones too; returns how many."""
        with self._lock:
            spaces = {self.namespace(each) for each in known() if each.name == name}
            gone = [key for key in self._heads if key[0][0] in spaces or key[0][0].rpartition(":")[0] == name]
            for key in gone:
                self._bytes -= self._heads.pop(key).bytes
            return len(gone)

    def clear(self) -> None:
        """Forget everything that is kept."""
        with self._lock:
            self._heads.clear()
            self._bytes = 0
            for marks in self._marks.values():
                marks[:] = [_UNMARKED] * MARKS  # readers hold them
            self._marks.clear()

    def configure(self, **changes: Any) -> None:
        """Change the settings, and let go of what no longer fits. Raises: TypeError for an unknown name."""
        for name, value in changes.items():
            if name not in TokenizerCacheConfig.__slots__:
                raise TypeError(f"tokenizer cache: wanted one of {TokenizerCacheConfig.__slots__}, got {name!r}")
            setattr(self.config, name, value)
        with self._lock:
            self._shrink()


TEXTS = EncodedTexts()
"""The cache of this process."""
