"""splintr: tokenizer.json files, and vocabularies that it brings along, with a cache of words of its own.

Source: splintr-rs 0.22.0. Its WordPiece knows another version of Unicode than tokenizers 0.23 does: 37 of 5,400 texts
of the corpus differ with MiniLM's file, so a proof refuses ``splintr.encode`` there. ``splintr.encode_known`` gives it
all text of characters that are as old as both, and words with others to the library that defines the tokenizer. 874 of
the first 196,608 characters differ, none of those in ``_OLD`` (2026-11-22).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from layerzero.backends.tokenizers import encoder, formats, library, one_by_one
from layerzero.core import limits as limit
from layerzero.core.kernel import Kernel
from layerzero.ops.tokenize import rows
from layerzero.ops.tokenize.declare import OWN_SPECIALS, TokenizerPart
from layerzero.ops.tokenize.prefixes import cut_of
from layerzero.ops.tokenize.tokenizer import Tokenizer

SPLINTR = library(
    "splintr",
    "splintr: BPE in Rust with its own vocabularies, quickest on short texts",
    ">=0.22,<0.23",
    ("0.22.0",),
    "https://pypi.org/project/splintr-rs/",
    distribution="splintr-rs",
)

_BROUGHT = {
    "1ed95da8c64f95d46c2309468b36b36ff085db93cab0ed69726eba15379fec4c": "cl100k_base",
    "f406a602251cf270bb965e4396fde1106a8abe16a05f54106837001eca781a2d": "o200k_base",
    "a7f3c3ec90ef08bc9d0560b1b6803a7c82069ec5a4b84f8cfe30c5a71a539ea5": "mistral_v3",
}
"""Hashes of the ranks that it brings, and what it calls them."""

_OLD = "\x00-\u05ff\u2010-\u2027\u2030-\u205e\u20a0-\u20b5\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
"""Latin, Greek, Cyrillic, Hebrew, Chinese, Japanese and Korean, their marks, and common punctuation."""


def _made(tokenizer: Tokenizer) -> Any:
    def make() -> Any:
        import splintr

        if tokenizer.identity.format == "tokenizer.json":
            return splintr.from_json_bytes(tokenizer.native.to_str().encode())
        return splintr.Tokenizer.from_pretrained(_BROUGHT[tokenizer.identity.vocab_hash])

    return tokenizer.engine("splintr", make)


def _load_encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    made = _made(tokenizer)
    one: Callable[..., Any] = made.encode_raw if asked["parse_special"] else made.encode_ordinary
    return one_by_one(one) if asked["batched"] else one  # its batches parse special tokens, and add templates


def _load_known(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    encode: Callable[[str], list[int]] = _made(tokenizer).encode_raw
    strange, cuts = re.compile(f"[^{_OLD}]+"), cut_of(tokenizer) is not None

    def own(text: str) -> list[int]:
        ids: list[int] = rows.encode(text, tokenizer=tokenizer, parse_special=True)
        return ids

    def one(text: str) -> list[int]:
        if text.isascii() or strange.search(text) is None:
            return encode(text)
        if not cuts:
            return own(text)
        ids: list[int] = []
        done = 0
        for start, end in _spans(text, strange):
            if start > done:
                ids += encode(text[done:start])
            ids += own(text[start:end])
            done = end
        return ids + encode(text[done:]) if done < len(text) else ids

    return one_by_one(one) if asked["batched"] else one


NEAR = 100
"""Characters between strange ones that are not worth a call of their own."""


def _spans(text: str, strange: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Where strange characters lie, in order, widened to whole words."""
    first = last = -1
    done = 0
    for found in (*strange.finditer(text), None):
        if found is not None and first >= 0 and found.start() - last <= NEAR:
            last = found.end()
            continue
        if first >= done:  # else it stands in the word that ended the one before
            end = text.find(" ", last)
            done, start = end if end >= 0 else len(text), max(text.rfind(" ", done, first), done)
            yield start, done
        if found is not None:
            first, last = found.span()


KERNELS: tuple[Kernel, ...] = (
    encoder(
        SPLINTR,
        _load_encode,
        limits=(
            formats("tokenizer.json", "tiktoken"),
            TokenizerPart("vocab_hash", tuple(_BROUGHT), "VOCAB_HASH_MISMATCH", "tiktoken"),
            OWN_SPECIALS,
            limit.one_of("add_special_tokens", False),
        ),
        priority=32,
    ),
    encoder(
        SPLINTR,
        _load_known,
        name="encode_known",
        limits=(
            formats("tokenizer.json"),
            TokenizerPart("model", ("WordPiece",)),
            TokenizerPart("normalizer", ("none", "BertNormalizer"), "NORMALIZER_MISMATCH"),
            limit.one_of("parse_special", True),  # its other way adds the template
            limit.one_of("add_special_tokens", False),
        ),
        priority=31,
    ),
)
