"""fastokens: byte-level BPE of tokenizer.json files and of ranks, on several threads within one long text.

Source: fastokens 0.3.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.backends.tokenizing import encoder, formats, one_by_one, ranks_file
from layerzero.core import limits as limit
from layerzero.core.forking import forked
from layerzero.core.kernel import Backend
from layerzero.ops.tokenize.limits import TokenizerPart
from layerzero.ops.tokenize.tokenizer import Tokenizer

FASTOKENS = Backend(
    "fastokens",
    "fastokens: byte-level BPE in Rust, quickest on very long texts",
    import_name="fastokens",
    distribution="fastokens",
    versions=">=0.3.5,<0.4",
    tested=("0.3.5",),
    install="pip install fastokens",
    homepage="https://pypi.org/project/fastokens/",
)


def _made(tokenizer: Tokenizer, parses: bool) -> Any:
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


def _load_encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    made = _made(tokenizer, asked["parse_special"])
    encode = made.encode if asked["parse_special"] else made.encode_ordinary

    def one(text: str) -> list[int]:
        ids: list[int] = (encode(text, add_special_tokens=False) if asked["parse_special"] else encode(text)).ids
        return ids

    if not asked["batched"]:
        return one
    if not asked["parse_special"]:
        return one_by_one(one)
    several, alone = made.encode_batch, one_by_one(one)

    def batch(texts: list[str]) -> list[list[int]]:
        return alone(texts) if forked() else [each.ids for each in several(texts, add_special_tokens=False)]

    return batch


KERNELS = (
    encoder(
        FASTOKENS,
        _load_encode,
        limits=(
            formats("tokenizer.json", "tiktoken"),
            TokenizerPart("model", ("BPE",)),
            TokenizerPart("normalizer", ("none", "NFC"), "NORMALIZER_MISMATCH"),
            limit.one_of("add_special_tokens", False),
        ),
        priority=28,
    ),
)
