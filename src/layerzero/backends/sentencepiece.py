"""SentencePiece: what defines .model files. Batches go one text after the other: its threads begin anew at each call.

Source: sentencepiece 0.2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.backends.tokenizing import decoder, encoder, formats
from layerzero.core.kernel import Backend
from layerzero.ops.tokenize import oracle
from layerzero.ops.tokenize.tokenizer import Tokenizer

SENTENCEPIECE = Backend(
    "sentencepiece",
    "SentencePiece: unigram and BPE models in .model files",
    import_name="sentencepiece",
    distribution="sentencepiece",
    versions=">=0.2",
    tested=("0.2.3",),
    install="pip install sentencepiece",
    homepage="https://github.com/google/sentencepiece",
)


def _load_encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    native = tokenizer.native
    if asked.get("return_offsets"):

        def with_offsets(text: str) -> tuple[list[int], list[tuple[int, int]]]:
            return native.encode(text), oracle.offsets_of_pieces(native, text)

        return (lambda texts: [with_offsets(text) for text in texts]) if asked["batched"] else with_offsets
    run: Callable[..., Any] = native.encode
    return run


def _load_decode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    native, left_out = tokenizer.native, tokenizer.special_ids

    def one(ids: list[int]) -> str:
        if asked["skip_special_tokens"]:
            ids = [each for each in ids if each not in left_out]
        text: str = native.decode(ids)
        return text

    return (lambda rows: [one(row) for row in rows]) if asked["batched"] else one


KERNELS = (
    encoder(
        SENTENCEPIECE,
        _load_encode,
        native="sentencepiece",
        offsets=True,
        limits=(formats("sentencepiece"),),
        priority=50,
    ),
    decoder(SENTENCEPIECE, _load_decode, native="sentencepiece", limits=(formats("sentencepiece"),), priority=50),
)
