"""gigatoken: byte-level BPE, and SentencePiece BPE with byte fallback, with a cache of words of its own.

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

from layerzero.backends.tokenizer_kernels import decoder, encoder, formats, library, ranks_file, without_specials
from layerzero.core import limits as limit
from layerzero.core.system import forking
from layerzero.ops.tokenize.declare import TokenizerPart, always_added
from layerzero.ops.tokenize.tokenizer import Tokenizer

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


def _made(tokenizer: Tokenizer, parses: bool) -> Any:
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


def _load_encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    made = _made(tokenizer, asked["parse_special"])
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


def _load_decode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    decode = _waiting(_made(tokenizer, parses=True).backend.decode)
    return without_specials(tokenizer, asked, lambda ids: decode(ids).decode("utf-8", "replace"))


KERNELS = (
    encoder(
        GIGATOKEN,
        _load_encode,
        limits=(
            formats("tokenizer.json", "tiktoken", "sentencepiece"),
            TokenizerPart("model", ("BPE",)),
            limit.one_of("add_special_tokens", False),
            TokenizerPart("scheme", tuple(_SCHEMES), format="tiktoken"),
            always_added(),
        ),
        priority=30,
    ),
    decoder(
        GIGATOKEN, _load_decode, limits=(formats("tiktoken"), TokenizerPart("scheme", tuple(_SCHEMES))), priority=30
    ),
)
