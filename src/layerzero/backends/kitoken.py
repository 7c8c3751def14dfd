"""kitoken: SentencePiece models and tokenizer.json files.

Source: kitoken 0.11.1. It is exact for Mistral's SentencePiece model and DeepSeek's file; not for BERT's, nor for
patterns with contractions in tokenizer.json (59 of 5,400 texts differ), where a proof refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.backends.tokenizer_kernels import encoder, formats, one_by_one
from layerzero.core import limits as limit
from layerzero.core.kernel import Backend
from layerzero.core.system.forking import forked
from layerzero.ops.tokenize.tokenizer import Tokenizer

KITOKEN = Backend(
    "kitoken",
    "kitoken: SentencePiece models and tokenizer.json files in Rust",
    import_name="kitoken",
    distribution="kitoken",
    versions=">=0.11,<0.12",
    tested=("0.11.1",),
    install="pip install kitoken",
    homepage="https://github.com/Systemcluster/kitoken",
)


def _made(tokenizer: Tokenizer) -> Any:
    def make() -> Any:
        from kitoken import Kitoken

        native = tokenizer.native
        if tokenizer.identity.format == "sentencepiece":
            return Kitoken.from_sentencepiece(native.serialized_model_proto())
        return Kitoken.from_tokenizers(native.to_str().encode())

    return tokenizer.engine("kitoken", make)


def _load_encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    made, parses = _made(tokenizer), bool(asked["parse_special"])
    encode, several = made.encode, made.encode_all

    def one(text: str) -> list[int]:
        ids: list[int] = encode(text, parses)
        return ids

    if not asked["batched"]:
        return one
    alone = one_by_one(one)
    return lambda texts: alone(texts) if forked() else several(texts, parses)


KERNELS = (
    encoder(
        KITOKEN,
        _load_encode,
        limits=(formats("sentencepiece", "tokenizer.json"), limit.one_of("add_special_tokens", False)),
        priority=24,
    ),
)
