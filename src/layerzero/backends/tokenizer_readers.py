"""Libraries that read tokenizers which others define.

bpe-openai: OpenAI's two newer encodings, whose vocabularies it brings; linear in the length of a word.

Source: bpe-openai 0.1.4. Its own Python function counts and times each call; what is called is the Rust object.

fastokens: byte-level BPE of tokenizer.json files and of ranks, on several threads within one long text.

Source: fastokens 0.3.5. Its own worker threads share a long text; a forked child has none of them, and may wait for
them for ever (1 of 3 runs, 200 KB of text, 2 CPU cores, 2026-11-22). So it is chosen in no forked child, and what was
loaded before a fork gives its texts to the library that defines the tokenizer there.

kitoken: SentencePiece models and tokenizer.json files.

Source: kitoken 0.11.1. It is exact for Mistral's SentencePiece model and DeepSeek's file; not for BERT's, nor for
patterns with contractions in tokenizer.json (59 of 5,400 texts differ), where a proof refuses it.

gigatoken: byte-level BPE, and SentencePiece BPE with byte fallback, with a cache of words of its own.

Source: gigatoken 0.10.0. It parses the added tokens that it was made with, always; so it is made without them where
they are text. It stays on the calling thread in a forked child by itself. While one thread is inside of a batch, its
object refuses every other ("Already borrowed"): they wait, since a batch runs on all cores anyway. A process that is
forked while its first batch begins the threads leaves a child in which every call hangs, on new objects, too (8 of 25
children, 2026-11-23); so they are begun while forks wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.backends.tokenizers import decoder, encoder, formats, library, one_by_one, ranks_file, without_specials
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import Custom
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import forking
from layerzero.core.system.forking import forked
from layerzero.ops.tokenize import rows
from layerzero.ops.tokenize.declare import ALWAYS_ADDED, OWN_SPECIALS, TokenizerPart
from layerzero.ops.tokenize.tokenizer import Tokenizer

BPE_OPENAI = library(
    "bpe_openai",
    "bpe-openai: cl100k and o200k in Rust, never quadratic",
    ">=0.1.4,<0.2",
    ("0.1.4",),
    "https://pypi.org/project/bpe-openai/",
    distribution="bpe-openai",
)

_BROUGHT = {
    "1ed95da8c64f95d46c2309468b36b36ff085db93cab0ed69726eba15379fec4c": "cl100k_base",
    "f406a602251cf270bb965e4396fde1106a8abe16a05f54106837001eca781a2d": "o200k_base",
}
"""Hashes of the ranks that it brings."""


def _load_encode_openai(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    def make() -> Any:
        from bpe_openai import _bindings

        return _bindings.tokenizer_for_encoding(_BROUGHT[tokenizer.identity.vocab_hash])

    one: Callable[..., Any] = tokenizer.engine("bpe_openai", make).encode
    return one_by_one(one) if asked["batched"] else one


FASTOKENS = library(
    "fastokens",
    "fastokens: byte-level BPE in Rust, quickest on very long texts",
    ">=0.3.5,<0.4",
    ("0.3.5",),
    "https://pypi.org/project/fastokens/",
)


def _made_fastokens(tokenizer: Tokenizer, parses: bool) -> Any:
    def make() -> Any:
        from fastokens import _native

        native = tokenizer.native
        if tokenizer.identity.format == "tokenizer.json":
            return _native.Tokenizer.from_json_str(native.to_str())
        return _native.Tokenizer.from_tiktoken(
            ranks_file(tokenizer),
            pattern=native._pat_str,
            special_tokens=dict(native._special_tokens) if parses else {},
        )

    return tokenizer.engine(("fastokens", parses), make)


def _load_encode_fastokens(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    parses = bool(asked["parse_special"])
    made = _made_fastokens(tokenizer, parses)
    encode = made.encode if parses else made.encode_ordinary

    def one(text: str) -> list[int]:
        if forked():
            own: list[int] = rows.encode(text, tokenizer=tokenizer, parse_special=parses)
            return own
        ids: list[int] = (encode(text, add_special_tokens=False) if parses else encode(text)).ids
        return ids

    if not asked["batched"]:
        return one
    if not parses:
        return one_by_one(one)
    several, alone = made.encode_batch, one_by_one(one)

    def batch(texts: list[str]) -> list[list[int]]:
        return alone(texts) if forked() else [each.ids for each in several(texts, add_special_tokens=False)]

    return batch


def _in_child_fastokens(_: Facts) -> Reason | None:
    return Reason(ReasonCode.CONSTRAINT_FAILED, "forked", False, True) if forked() else None


KITOKEN = library(
    "kitoken",
    "kitoken: SentencePiece models and tokenizer.json files in Rust",
    ">=0.11,<0.12",
    ("0.11.1",),
    "https://github.com/Systemcluster/kitoken",
)


def _made_kitoken(tokenizer: Tokenizer) -> Any:
    def make() -> Any:
        from kitoken import Kitoken

        native = tokenizer.native
        if tokenizer.identity.format == "sentencepiece":
            return Kitoken.from_sentencepiece(native.serialized_model_proto())
        return Kitoken.from_tokenizers(native.to_str().encode())

    return tokenizer.engine("kitoken", make)


def _load_encode_kitoken(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    made, parses = _made_kitoken(tokenizer), bool(asked["parse_special"])
    encode, several = made.encode, made.encode_all

    def one(text: str) -> list[int]:
        ids: list[int] = encode(text, parses)
        return ids

    if not asked["batched"]:
        return one
    alone = one_by_one(one)
    return lambda texts: alone(texts) if forked() else several(texts, parses)


GIGATOKEN = library(
    "gigatoken",
    "gigatoken: byte-level and SentencePiece BPE in Rust, with a cache of words",
    ">=0.10,<0.11",
    ("0.10.0",),
    "https://pypi.org/project/gigatoken/",
)

_SCHEMES = {"gpt2": "gpt2", "cl100k": "gpt4", "o200k": "o200k", "qwen2": "qwen2"}
"""What it calls the split patterns that it has."""


_BEGINNING = forking.held_by_forks()


def _made_gigatoken(tokenizer: Tokenizer, parses: bool) -> Any:
    def make() -> Any:
        made = read()
        with _BEGINNING:
            made.encode_batch_list(["", "a"])
        return made

    def read() -> Any:
        from gigatoken import Tokenizer as Made

        native, kind = tokenizer.native, tokenizer.identity.format
        if kind == "tokenizer.json":
            return Made.from_json(native.to_str())
        if kind == "sentencepiece":
            return Made.from_sentencepiece(native.serialized_model_proto())
        specials = dict(native._special_tokens) if parses else {}
        return Made.from_tiktoken(ranks_file(tokenizer), _SCHEMES[tokenizer.identity.scheme], specials)

    return tokenizer.engine(("gigatoken", parses), make)


def _load_encode_gigatoken(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    made = _made_gigatoken(tokenizer, asked["parse_special"])
    run = made.encode_batch_list if asked["batched"] else made.backend.encode
    if asked["batched"]:
        return _waiting(run)

    def one(text: str) -> list[int]:  # as _waiting, with one call less on the way: 0.1 us
        try:
            ids: list[int] = run(text).tolist()
        except RuntimeError as error:
            if "borrowed" not in str(error):
                raise
            ids = patient(text)
        return ids

    patient = _waiting(lambda text: run(text).tolist())
    return one


PAUSE_S = 1e-4
"""How long a thread sleeps before it asks again whether the object is free."""


def _waiting(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same; while another thread is inside, the caller waits."""

    def encode(items: Any) -> Any:
        while True:
            try:
                return run(items)
            except RuntimeError as error:
                if "borrowed" not in str(error):
                    raise
                time.sleep(PAUSE_S)

    return encode


def _load_decode_gigatoken(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    decode = _waiting(_made_gigatoken(tokenizer, parses=True).backend.decode)
    return without_specials(tokenizer, asked, lambda ids: decode(ids).decode("utf-8", "replace"))


KERNELS = (
    encoder(
        BPE_OPENAI,
        _load_encode_openai,
        limits=(
            formats("tiktoken"),
            TokenizerPart("vocab_hash", tuple(_BROUGHT), "VOCAB_HASH_MISMATCH"),
            TokenizerPart("merges_hash", tuple(_BROUGHT), "MERGES_HASH_MISMATCH"),
            OWN_SPECIALS,
            limit.one_of("add_special_tokens", False),
        ),
        priority=26,
    ),
    encoder(
        FASTOKENS,
        _load_encode_fastokens,
        limits=(
            formats("tokenizer.json", "tiktoken"),
            TokenizerPart("model", ("BPE",)),
            TokenizerPart("normalizer", ("none", "NFC"), "NORMALIZER_MISMATCH"),
            limit.one_of("add_special_tokens", False),
            Custom("not in a forked child, where its threads are missing", _in_child_fastokens),
        ),
        priority=28,
    ),
    encoder(
        KITOKEN,
        _load_encode_kitoken,
        limits=(formats("sentencepiece", "tokenizer.json"), limit.one_of("add_special_tokens", False)),
        priority=24,
    ),
    encoder(
        GIGATOKEN,
        _load_encode_gigatoken,
        limits=(
            formats("tokenizer.json", "tiktoken", "sentencepiece"),
            TokenizerPart("model", ("BPE",)),
            limit.one_of("add_special_tokens", False),
            TokenizerPart("scheme", tuple(_SCHEMES), format="tiktoken"),
            ALWAYS_ADDED,
        ),
        priority=30,
    ),
    decoder(
        GIGATOKEN,
        _load_decode_gigatoken,
        limits=(formats("tiktoken"), TokenizerPart("scheme", tuple(_SCHEMES))),
        priority=30,
    ),
)
