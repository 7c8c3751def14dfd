"""gigatoken: byte-level BPE, and SentencePiece BPE with byte fallback, with a cache of words of its own.

Source: gigatoken 0.10.0. It parses the added tokens that it was made with, always; so it is made without them where
they are text. It stays on the calling thread in a forked child by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.backends.tokenizing import decoder, encoder, formats, one_by_one, ranks_file
from layerzero.core import limits as limit
from layerzero.core.kernel import Backend
from layerzero.ops.tokenize.limits import TokenizerPart, always_added
from layerzero.ops.tokenize.tokenizer import Tokenizer

GIGATOKEN = Backend(
    "gigatoken",
    "gigatoken: byte-level and SentencePiece BPE in Rust, with a cache of words",
    import_name="gigatoken",
    distribution="gigatoken",
    versions=">=0.10,<0.11",
    tested=("0.10.0",),
    install="pip install gigatoken",
    homepage="https://pypi.org/project/gigatoken/",
)

_SCHEMES = {"gpt2": "gpt2", "cl100k": "gpt4", "o200k": "o200k", "qwen2": "qwen2"}
"""What it calls the split patterns that it has."""


def _made(tokenizer: Tokenizer, parses: bool) -> Any:
    def make() -> Any:
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
    if asked["batched"]:
        several: Callable[..., Any] = made.encode_batch_list
        return several
    encode = made.backend.encode
    return lambda text: encode(text).tolist()


def _load_decode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    decode, left_out = _made(tokenizer, parses=True).backend.decode, tokenizer.special_ids

    def one(ids: list[int]) -> str:
        if asked["skip_special_tokens"]:
            ids = [each for each in ids if each not in left_out]
        text: str = decode(ids).decode("utf-8", "replace")
        return text

    return one_by_one(one) if asked["batched"] else one


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
