"""Hugging Face tokenizers: what defines a tokenizer.json. It encodes batches on all cores by itself, and knows offsets.

Source: tokenizers 0.23.3. After a fork it stays on one thread by itself where its threads had run before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.backends.tokenizer_kernels import decoder, encoder, formats
from layerzero.core.kernel import Backend
from layerzero.ops.tokenize import oracle
from layerzero.ops.tokenize.tokenizer import Tokenizer

TOKENIZERS = Backend(
    "tokenizers",
    "Hugging Face tokenizers: every tokenizer.json, with offsets",
    import_name="tokenizers",
    distribution="tokenizers",
    versions=">=0.20",
    tested=("0.23.3",),
    install="pip install tokenizers",
    homepage="https://github.com/huggingface/tokenizers",
)


def _load_encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    native = tokenizer.native if asked["parse_special"] else oracle.ordinary_copy(tokenizer)
    adds, encode = asked["add_special_tokens"], native.encode
    if asked.get("return_offsets"):
        encode_all = native.encode_batch
        if asked["batched"]:
            return lambda texts: [(each.ids, each.offsets) for each in encode_all(texts, add_special_tokens=adds)]

        def with_offsets(text: str) -> tuple[list[int], list[tuple[int, int]]]:
            encoded = encode(text, add_special_tokens=adds)
            return encoded.ids, encoded.offsets

        return with_offsets
    if asked["batched"]:
        several = native.encode_batch_fast
        return lambda texts: [each.ids for each in several(texts, add_special_tokens=adds)]
    return lambda text: encode(text, add_special_tokens=adds).ids


def _load_decode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    skip = asked["skip_special_tokens"]
    run = tokenizer.native.decode_batch if asked["batched"] else tokenizer.native.decode
    return lambda items: run(items, skip_special_tokens=skip)


KERNELS = (
    encoder(
        TOKENIZERS,
        _load_encode,
        native="tokenizer.json",
        offsets=True,
        limits=(formats("tokenizer.json"),),
        priority=60,
    ),
    decoder(TOKENIZERS, _load_decode, native="tokenizer.json", limits=(formats("tokenizer.json"),), priority=60),
)
