"""tiktoken: what defines encodings by ranks, its plugins' too (``tiktoken_ext``), and Mistral's tekken files.

Source: tiktoken 0.14.0. Its Python function mends lone surrogates, which no other library does; the core beneath it
raises, so that a text has the same fate everywhere. Its batches are eight threads of Python over the core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from layerzero.backends.tokenizer_kernels import decoder, encoder, formats
from layerzero.core.kernel import Backend
from layerzero.core.system.threads import usable_cpus
from layerzero.ops.tokenize import oracle
from layerzero.ops.tokenize.tokenizer import Tokenizer

TIKTOKEN = Backend(
    "tiktoken",
    "tiktoken: OpenAI's encodings, those of plugins, and tekken files",
    import_name="tiktoken",
    distribution="tiktoken",
    versions=">=0.9",
    tested=("0.14.0",),
    install="pip install tiktoken",
    homepage="https://github.com/openai/tiktoken",
)

FEW = 8_000
"""Characters below which starting threads takes longer than encoding (2 CPU cores, 2026-11-22)."""


def _load_encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    native = tokenizer.native
    core, special = native._core_bpe, native.special_tokens_set
    one: Callable[[str], list[int]] = core.encode_ordinary
    if asked["parse_special"]:

        def one(text: str) -> list[int]:
            ids: list[int] = core.encode(text, special)
            return ids

    if asked.get("return_offsets"):

        def with_offsets(text: str) -> tuple[list[int], list[tuple[int, int]]]:
            ids = one(text)
            return ids, oracle.offsets_of_bytes(text, native.decode_tokens_bytes(ids))

        return (lambda texts: [with_offsets(text) for text in texts]) if asked["batched"] else with_offsets
    if not asked["batched"]:
        return one
    cores = min(8, usable_cpus())

    def several(texts: list[str]) -> list[list[int]]:
        if cores == 1 or sum(map(len, texts)) < FEW:
            return [one(text) for text in texts]
        step = -(-len(texts) // cores)
        parts = [texts[start : start + step] for start in range(0, len(texts), step)]
        with ThreadPoolExecutor(len(parts)) as pool:  # a pool of this call alone: a forked child finds none
            return [ids for part in pool.map(lambda part: [one(text) for text in part], parts) for ids in part]

    return several


def _load_decode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    core, left_out = tokenizer.native._core_bpe, tokenizer.special_ids

    def one(ids: list[int]) -> str:
        if asked["skip_special_tokens"]:
            ids = [each for each in ids if each not in left_out]
        text: str = core.decode_bytes(ids).decode("utf-8", "replace")
        return text

    return (lambda rows: [one(row) for row in rows]) if asked["batched"] else one


KERNELS = (
    encoder(TIKTOKEN, _load_encode, native="tiktoken", offsets=True, limits=(formats("tiktoken"),), priority=70),
    decoder(TIKTOKEN, _load_decode, native="tiktoken", limits=(formats("tiktoken"),), priority=70),
)
