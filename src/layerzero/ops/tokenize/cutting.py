"""Where a text may be cut so that the ids of both parts, one behind the other, are those of the whole text.

A text is cut at a space that follows another character, for tokenizers that say nothing over such a place:

    byte-level BPE  whose split patterns are known (:data:`~layerzero.ops.tokenize.identity.SCHEMES`): no piece of
                    them has a space behind another character, none of them looks back, and the first part ends in no
                    space, which is all that they look ahead over. NFC does not compose over a space.
    WordPiece       behind BERT's normalizer and splitter: words are what lies between spaces, and each is on its own.
    SentencePiece   BPE with the identity for a normalizer, whose pieces have the mark of a space in front only: no
                    merge reaches over such a place, so merges on both sides of it know nothing of each other. Where
                    the model puts a mark before every text, that one stands for the space of the second part. A
                    Unigram model adds up scores from the start of a text, and rounds: that is not cut.

Added tokens with a space, or with flags, leave no cut.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from layerzero.ops.tokenize.identity import fields_of, number_of
from layerzero.ops.tokenize.tokenizer import Tokenizer

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
        """Whether a text may be cut at a place."""
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
        """The second part."""
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
