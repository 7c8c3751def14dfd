"""SentencePiece: what defines .model files. Batches go one text after the other: its threads begin anew at each call.

Source: sentencepiece 0.2.0 to 0.2.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.backends.tokenizer_kernels import decoder, encoder, formats, one_by_one
from layerzero.core.kernel import Backend
from layerzero.ops.tokenize import oracle
from layerzero.ops.tokenize.tokenizer import Tokenizer

SENTENCEPIECE = Backend(
    "sentencepiece",
    "SentencePiece: unigram and BPE models in .model files",
    import_name="sentencepiece",
    distribution="sentencepiece",
    versions=">=0.2",
    tested=("0.2.0", "0.2.1", "0.2.2", "0.2.3"),
    install="pip install sentencepiece",
    homepage="https://github.com/google/sentencepiece",
)


def _load_encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    native = tokenizer.native
    if asked.get("return_offsets"):
        with_offsets = functools.partial(oracle.with_offsets_of_pieces, native)
        return one_by_one(with_offsets) if asked["batched"] else with_offsets
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
