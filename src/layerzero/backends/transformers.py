"""Transformers' tokenizers that are written in Python, which nothing else can take the place of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.backends.tokenizer_kernels import decoder, encoder, formats
from layerzero.core.kernel import Backend
from layerzero.ops.tokenize import oracle
from layerzero.ops.tokenize.tokenizer import Tokenizer

TRANSFORMERS = Backend(
    "transformers",
    "Transformers: tokenizers that are written in Python",
    import_name="transformers",
    distribution="transformers",
    versions=">=5",
    tested=("5.23.0", "5.24.0"),
    install="pip install transformers",
    homepage="https://github.com/huggingface/transformers",
)


def _load_encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    flags = {name: asked[name] for name in ("batched", "add_special_tokens", "parse_special")}
    return lambda items: oracle.encode(items, tokenizer=tokenizer, **flags)


def _load_decode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    flags = {name: asked[name] for name in ("batched", "skip_special_tokens")}
    return lambda items: oracle.decode(items, tokenizer=tokenizer, **flags)


KERNELS = (
    encoder(TRANSFORMERS, _load_encode, native="transformers", limits=(formats("transformers"),), priority=40),
    decoder(TRANSFORMERS, _load_decode, native="transformers", limits=(formats("transformers"),), priority=40),
)
