"""The libraries that define the formats of tokenizers.

SentencePiece: what defines .model files. Batches go one text after the other: its threads begin anew at each call.

Source: sentencepiece 0.2.0 to 0.2.3.

tiktoken: what defines encodings by ranks, its plugins' too (``tiktoken_ext``), and Mistral's tekken files.

Source: tiktoken 0.14.0. Its Python function mends lone surrogates, which no other library does; the core beneath it
raises, so that a text has the same fate everywhere. Its batches are eight threads of Python over the core.

Hugging Face tokenizers: what defines a tokenizer.json. It encodes batches on all cores by itself, and knows offsets.

Source: tokenizers 0.23.3. After a fork it stays on one thread by itself where its threads had run before.

Transformers' tokenizers that are written in Python, which nothing else can take the place of.

What tokenizer libraries have in common: how their kernels are declared, and how a tokenizer is found for one.
"""

from __future__ import annotations

import base64
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.limit_kinds import Limit
from layerzero.core.system.disk import make_private, write_whole
from layerzero.core.system.resources import usable_cpus
from layerzero.ops.tokenize import rows
from layerzero.ops.tokenize.declare import TokenizerPart, folder
from layerzero.ops.tokenize.tokenizer import Tokenizer, by_hash

ENCODING = ("tokenizer", "items", "batched", "add_special_tokens", "parse_special", "return_offsets", "source")
DECODING = ("tokenizer", "items", "batched", "skip_special_tokens", "source")

Load = Callable[[Tokenizer, Mapping[str, Any]], Callable[..., Any]]
"""What encodes or decodes for a tokenizer, given the wanted results."""


def _loaded(load: Load, facts: Facts) -> Callable[..., Any]:
    return load(by_hash(facts["tokenizer_hash"]), facts)


def library(
    name: str, summary: str, versions: str, tested: tuple[str, ...], homepage: str, *, distribution: str = ""
) -> Backend:
    """A library that is installed and imported by its name; ``distribution`` is another name of its package."""
    package = distribution or name
    more = {"versions": versions, "tested": tested, "install": f"pip install {package}", "homepage": homepage}
    return Backend(name, summary, import_name=name, distribution=package, **more)  # type: ignore[arg-type]


def formats(*names: str) -> Limit:
    """Take tokenizers that these libraries define only."""
    return TokenizerPart("format", names)


def _kernel(
    name: str,
    operation: str,
    accepts: tuple[str, ...],
    backend: Backend,
    load: Load,
    native: str,
    declared: dict[str, Any],
) -> Kernel:
    """A kernel; one that does not define the format works on a form of its own, and has to prove it."""
    return backend.kernel(
        f"{backend.name}.{name}",
        operation,
        functools.partial(_loaded, load),
        accepts=accepts,
        deterministic=True,
        stock=(lambda facts: facts["format"] == native) if native else False,
        proved_first=not native,
        **declared,
    )


def ranks_file(tokenizer: Tokenizer) -> str:
    """A file of a tiktoken encoding's ranks, for libraries that read nothing else."""
    native = tokenizer.native
    path = folder() / f"{tokenizer.tokenizer_hash}.tiktoken"
    if not path.exists():
        make_private(path.parent)
        write_whole(path, ranks_bytes(native._mergeable_ranks))
    return os.fspath(path)


def ranks_bytes(ranks: Mapping[bytes, int]) -> bytes:
    """Ranks as tiktoken's files hold them."""
    return b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks.items())


def one_by_one(run: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    """Several, one after the other."""
    return lambda items: [run(each) for each in items]


def without_specials(
    tokenizer: Tokenizer, asked: Mapping[str, Any], decode: Callable[[list[int]], str]
) -> Callable[..., Any]:
    """What decodes, for a library that leaves no special token out by itself."""
    left_out, skip = tokenizer.special_ids, asked["skip_special_tokens"]

    def one(ids: list[int]) -> str:
        return decode([each for each in ids if each not in left_out] if skip else ids)

    return one_by_one(one) if asked["batched"] else one


def encoder(backend: Backend, load: Load, *, native: str = "", offsets: bool = False, **declared: Any) -> Kernel:
    """A kernel that encodes. ``native`` is the format that its library defines: no proof is needed for that.

    ``name`` tells several of one library apart.
    """
    limits = declared.pop("limits", ())
    if not offsets:
        limits = (*limits, limit.one_of("return_offsets", False))
    name = declared.pop("name", "encode")
    return _kernel(name, "tokenize.encode", ENCODING, backend, load, native, {"limits": limits, **declared})


def decoder(backend: Backend, load: Load, *, native: str = "", **declared: Any) -> Kernel:
    """A kernel that decodes."""
    return _kernel("decode", "tokenize.decode", DECODING, backend, load, native, declared)


SENTENCEPIECE = library(
    "sentencepiece",
    "SentencePiece: unigram and BPE models in .model files",
    ">=0.2",
    ("0.2.0", "0.2.1", "0.2.2", "0.2.3"),
    "https://github.com/google/sentencepiece",
)


def _load_encode_pieces(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    native = tokenizer.native
    if asked.get("return_offsets"):
        with_offsets = functools.partial(rows.with_offsets_of_pieces, native)
        return one_by_one(with_offsets) if asked["batched"] else with_offsets
    run: Callable[..., Any] = native.encode
    return run


def _load_decode_pieces(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    return without_specials(tokenizer, asked, tokenizer.native.decode)


TIKTOKEN = library(
    "tiktoken",
    "tiktoken: OpenAI's encodings, those of plugins, and tekken files",
    ">=0.9",
    ("0.14.0",),
    "https://github.com/openai/tiktoken",
)

FEW = 8_000
"""Characters below which starting threads takes longer than encoding (2 CPU cores, 2026-11-22)."""


def _load_encode_ranks(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
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
            return ids, rows.offsets_of_bytes(text, native.decode_tokens_bytes(ids))

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


def _load_decode_ranks(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    core = tokenizer.native._core_bpe
    return without_specials(tokenizer, asked, lambda ids: core.decode_bytes(ids).decode("utf-8", "replace"))


TOKENIZERS = library(
    "tokenizers",
    "Hugging Face tokenizers: every tokenizer.json, with offsets",
    ">=0.22",
    ("0.23.3",),
    "https://github.com/huggingface/tokenizers",
)


def _load_encode_file(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    native = tokenizer.native if asked["parse_special"] else rows.ordinary_copy(tokenizer)
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


def _load_decode_file(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    skip = asked["skip_special_tokens"]
    run = tokenizer.native.decode_batch if asked["batched"] else tokenizer.native.decode
    return lambda items: run(items, skip_special_tokens=skip)


TRANSFORMERS = library(
    "transformers",
    "Transformers: tokenizers that are written in Python",
    ">=5",
    ("5.23.0", "5.24.0"),
    "https://github.com/huggingface/transformers",
)


def _load_encode_python(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    flags = {name: asked[name] for name in ("batched", "add_special_tokens", "parse_special")}
    return lambda items: rows.encode(items, tokenizer=tokenizer, **flags)


def _load_decode_python(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    flags = {name: asked[name] for name in ("batched", "skip_special_tokens")}
    return lambda items: rows.decode(items, tokenizer=tokenizer, **flags)


KERNELS = tuple(
    kernel
    for backend, native, encode, decode, priority, offsets in (
        (SENTENCEPIECE, "sentencepiece", _load_encode_pieces, _load_decode_pieces, 50, True),
        (TIKTOKEN, "tiktoken", _load_encode_ranks, _load_decode_ranks, 70, True),
        (TOKENIZERS, "tokenizer.json", _load_encode_file, _load_decode_file, 60, True),
        (TRANSFORMERS, "transformers", _load_encode_python, _load_decode_python, 40, False),
    )
    for kernel in (
        encoder(backend, encode, native=native, offsets=offsets, limits=(formats(native),), priority=priority),
        decoder(backend, decode, native=native, limits=(formats(native),), priority=priority),
    )
)
