"""fastokens: byte-level BPE of tokenizer.json files and of ranks, on several threads within one long text.

Source: fastokens 0.3.5. Its own worker threads share a long text; a forked child has none of them, and may wait for
them for ever (1 of 3 runs, 200 KB of text, 2 CPU cores, 2026-11-22). So it is chosen in no forked child, and what was
loaded before a fork gives its texts to the library that defines the tokenizer there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.backends.tokenizer_kernels import encoder, formats, one_by_one, ranks_file
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.core.limit_kinds import Custom
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system.forking import forked
from layerzero.ops.tokenize import oracle
from layerzero.ops.tokenize.declare import TokenizerPart
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
    parses = bool(asked["parse_special"])
    made = _made(tokenizer, parses)
    encode = made.encode if parses else made.encode_ordinary

    def one(text: str) -> list[int]:
        if forked():
            own: list[int] = oracle.encode(text, tokenizer=tokenizer, parse_special=parses)
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


def _in_child(_: Facts) -> Reason | None:
    return Reason(ReasonCode.CONSTRAINT_FAILED, "forked", False, True) if forked() else None


KERNELS = (
    encoder(
        FASTOKENS,
        _load_encode,
        limits=(
            formats("tokenizer.json", "tiktoken"),
            TokenizerPart("model", ("BPE",)),
            TokenizerPart("normalizer", ("none", "NFC"), "NORMALIZER_MISMATCH"),
            limit.one_of("add_special_tokens", False),
            Custom("not in a forked child, where its threads are missing", _in_child),
        ),
        priority=28,
    ),
)
