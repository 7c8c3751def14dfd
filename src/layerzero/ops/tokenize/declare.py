"""Text to tokens and back: ``tokenize.encode`` and ``tokenize.decode``.

    encode  a text, or a list of texts, to the ids that the library which defines the tokenizer gives; with
            ``return_offsets`` also, for each id, where its characters begin and end in the text
    decode  ids, or lists of ids, to text; bytes that are no UTF-8 become U+FFFD

There are no tensors: what a call is chosen by are the tokenizer's hashes, the wanted results, and how many characters
it has in how many texts, each as the power of two above. A result is right if it equals that of the library itself: one
wrong id is a wrong model.
Source: the libraries tokenizers, tiktoken and sentencepiece, each for the files that it defines.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.core.arguments import Axis, Param, Role
from layerzero.core.errors import InvalidCallError
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import NOTHING, Findings, Limit, rule, violated
from layerzero.core.operation import Case, Operation, OpKind
from layerzero.core.plain import Plain
from layerzero.core.reasons import ReasonCode
from layerzero.core.schema import OperationSchema
from layerzero.core.system import forking, log
from layerzero.core.system.disk import distrust
from layerzero.ops.tokenize import rows
from layerzero.ops.tokenize.corpus import EDITION, drawn, prove_decode, prove_encode
from layerzero.ops.tokenize.rows import id_problems, text_problems
from layerzero.ops.tokenize.tokenizer import Tokenizer, by_hash, resolve

_LOCK = forking.lock()
_PRIVATE: list[Path] = []


def folder() -> Path:
    """The folder of written tokenizers; a private one of this process where nothing may be kept, or others may write.

    What lies there is read as this user's own tokenizer, so that no other user may have put it, or a link, there.
    """
    named = os.environ.get("LAYERZERO_CACHE_DIR")
    if named == "":
        return _private()
    if named is None:
        import platformdirs

        kept = platformdirs.user_cache_path("layerzero", appauthor=False)
    else:
        kept = Path(named).expanduser().absolute()
    place = kept / "tokenizers"
    why = distrust(kept) or distrust(place)
    if why:
        if not _PRIVATE:
            log.warning("tokenizers are written for this process alone: %s", why)
        return _private()
    return place


def _private() -> Path:
    """A new private folder, gone when this process ends; children find it by its name until then."""
    with _LOCK:
        if not _PRIVATE:
            made = Path(tempfile.mkdtemp(prefix="layerzero-tokenizers-"))
            _PRIVATE.append(made)
            atexit.register(_remove, made, os.getpid())
        return _PRIVATE[0]


def _remove(made: Path, process: int) -> None:
    """Remove a folder; a forked child leaves it to its parent."""
    if os.getpid() == process:
        shutil.rmtree(made, ignore_errors=True)


def written(tokenizer: Tokenizer) -> str:
    """A name by which another process finds a tokenizer."""
    return tokenizer.written(folder())


@dataclass(frozen=True, slots=True)
class TokenizerPart(Limit):
    """A part of the tokenizer is one of these values, else the kernel is refused with this code.

    Where ``format`` is given, tokenizers of other formats need none of them.
    """

    fact: str
    values: tuple[str, ...]
    code: str = "TOKENIZER_ID_MISMATCH"
    format: str = ""

    def check(self, facts: Facts) -> Findings:
        got = facts[self.fact]
        if got in self.values or (self.format and facts["format"] != self.format):
            return NOTHING
        return violated(ReasonCode(self.code), self.fact, " or ".join(map(_short, self.values)), _short(str(got)))

    def facts_named(self) -> tuple[str, ...]:
        return (self.fact,)

    def describe(self) -> str:
        where = f" of {self.format}" if self.format else ""
        return f"{self.fact}{where}: {', '.join(map(_short, self.values))}"


OWN_SPECIALS = rule(
    "parse_special: False for a tiktoken encoding",
    lambda facts: facts["format"] != "tiktoken" or not facts["parse_special"],
    "SPECIAL_TOKENS_MISMATCH",
)
"""The library brings special tokens of its own."""

ALWAYS_ADDED = rule(
    "added_tokens: none where they are text",
    lambda facts: facts["format"] != "tokenizer.json" or facts["parse_special"] or facts["added_tokens"] == "none",
    "ADDED_TOKENS_MISMATCH",
)
"""The library always parses added tokens of a tokenizer.json."""


def _short(value: str) -> str:
    """A hash by its beginning; it is compared as a whole."""
    return f"{value[:12]}…" if len(value) == 64 else value or "not a known one"


PARTS = (
    *("format", "model", "vocab_hash", "merges_hash", "model_id", "normalizer", "normalizer_id", "pretokenizer"),
    *("pretokenizer_id", "scheme", "postprocessor_id", "decoder_id", "added_tokens", "added_tokens_hash"),
    *("special_tokens_hash",),
)
"""Facts of a call that are parts of its tokenizer."""

_AXES = (Axis("characters", scales=True, live=True), Axis("batch", scales=True, live=True))
_BATCHED = Param("batched", bool, False)


def power(number: int) -> int:
    """The power of two above a number: what sizes of calls are chosen by."""
    return 1 << number.bit_length()


def _derived(sizes: Callable[[Any], int], arguments: Mapping[str, Any], _: Mapping[str, int]) -> Mapping[str, object]:
    tokenizer: Tokenizer = arguments["tokenizer"]
    items = arguments["items"] if arguments["batched"] else [arguments["items"]]
    parts = {name: getattr(tokenizer.identity, name) for name in PARTS}
    size = power(sum(map(sizes, items)))
    count = power(len(items)) if arguments["batched"] else 1
    return parts | {
        "tokenizer_hash": tokenizer.tokenizer_hash,
        "tokenizer_id": tokenizer.name,
        "corpus": EDITION,
        "characters": size,
        "batch": count,
    }


def _schema(name: str, *params: Param) -> OperationSchema:
    own = (
        Param("tokenizer", Tokenizer, None, role=Role.HANDLE, kind=lambda value: value.identity.format),
        Param("items", (str, list), None, role=Role.PASSED),
        Param("source", str, "", works=False),
        _BATCHED,
    )
    return OperationSchema(name, (), (), params=(*own, *params), axes=_AXES)


_ALONE = (*(6, 12, 24, 50, 100, 200, 400, 800, 1500, 3000, 6000, 12_000, 25_000, 50_000, 100_000, 200_000, 800_000),)
_SEVERAL = (
    *((4, 100), (16, 100), (128, 100), (512, 40), (2000, 20), (2000, 100), (2000, 400), (16, 3000), (64, 3000)),
    *((4, 1000), (256, 1000), (4, 30_000), (20_000, 100)),
)


def _cases(units: str, step: int) -> tuple[Case, ...]:
    """Every power of two of a text alone, since short ones are what a choice can spoil most; a few of several."""
    alone = (Case(f"{units}_{size}", {"characters": size, "batch": 1}) for size in _ALONE[::step])
    several = (
        Case(f"batch_{count}x{size}", {"characters": count * size, "batch": count}, {"batched": True})
        for count, size in _SEVERAL[::step]
    )
    return (*alone, *several)


def _sweep(cases: Sequence[Case], platform: str, _: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    yield from cases if platform == "cpu" else ()


def _portable(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**arguments, "source": written(arguments["tokenizer"])}


def _recipe(facts: Facts) -> dict[str, Any]:
    """Where another process finds the tokenizer, and the sizes; an object that cannot be written has no such place."""
    try:
        source = written(by_hash(facts["tokenizer_hash"], facts["tokenizer_id"]))
    except (InvalidCallError, LookupError):  # only this process has it, or it has changed since
        source = ""
    return {"source": source, "characters": facts.size("characters"), "batch": facts.size("batch")}


def _within(bound: int) -> int:
    return max(bound * 3 // 4, 1)


def _case(params: Mapping[str, Any]) -> Case:
    several = bool(params["batched"])
    count = _within(params["batch"]) if several else 1
    size = max(_within(params["characters"]), count)
    return Case(f"recorded_{count}x{size // count}", {"characters": size, "batch": count}, {"batched": several})


def _described(params: Mapping[str, Any], flags: set[str]) -> tuple[dict[str, Any], dict[str, int]]:
    several = bool(params["batched"])
    given = {"batched": several, "items": [] if several else "", "source": ""}
    sizes = {name: int(params[name]) for name in ("characters", "batch")}
    return _restored(params, flags) | given, sizes


def _operation(
    schema: OperationSchema, summary: str, reference: Any, check: Callable[..., list[str]], flag: str, plain: Plain
) -> Operation:
    cases = _cases("text", 1) if flag == "parse_special" else _cases("ids", 4)
    return Operation(
        schema=schema,
        summary=summary,
        reference=reference,
        fake=reference,
        cases=cases,
        kind=OpKind.TOKENIZATION,
        has_fallback=False,
        derive=functools.partial(_derived, len),
        check_values=check,
        derived=(*PARTS, "tokenizer_hash", "tokenizer_id", "corpus", "characters", "batch"),
        derived_from=dict.fromkeys((*PARTS, "tokenizer_hash", "tokenizer_id", "corpus"), ())
        | {"characters": (), "batch": ()},
        class_facts=("tokenizer_hash", flag, "corpus"),
        sweep=functools.partial(_sweep, cases),
        plain=plain,
    )


ENCODE = _operation(
    _schema(
        "tokenize.encode",
        Param("add_special_tokens", bool, False),
        Param("parse_special", bool, False),
        Param("return_offsets", bool, False),
    ),
    "text to the ids of a tokenizer, exactly those of the library that defines it",
    rows.encode,
    text_problems,
    "parse_special",
    Plain(
        drawn("encode"),
        prove_encode,
        lambda params: _restored(params, {"parse_special", "add_special_tokens"}),
        _portable,
        lambda a, b: a == b,
        _recipe,
        _case,
        lambda params: _described(params, {"parse_special", "add_special_tokens", "return_offsets"}),
    ),
)
DECODE = _operation(
    _schema("tokenize.decode", Param("skip_special_tokens", bool, False)),
    "ids of a tokenizer to text, exactly that of the library that defines it",
    rows.decode,
    id_problems,
    "skip_special_tokens",
    Plain(
        drawn("decode"),
        prove_decode,
        lambda params: _restored(params, {"skip_special_tokens"}),
        _portable,
        lambda a, b: a == b,
        _recipe,
        _case,
        lambda params: _described(params, {"skip_special_tokens"}),
    ),
)


def _restored(params: Mapping[str, Any], flags: set[str]) -> dict[str, Any]:
    """Canonical arguments of the call that a recipe's parameters name, without what it would encode."""
    tokenizer = resolve(params["source"])
    return {"tokenizer": tokenizer, **{name: bool(params.get(name, False)) for name in flags}}


PLAIN_OPERATIONS = (ENCODE, DECODE)
