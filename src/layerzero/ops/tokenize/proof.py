"""A proof that another form of a tokenizer is the same: everything of the corpus, and texts that are drawn of it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from layerzero.core.operation import Case
from layerzero.ops.tokenize import oracle
from layerzero.ops.tokenize.corpus import CODE, SCRIPTS, SEED, differential
from layerzero.ops.tokenize.tokenizer import Tokenizer, resolve

MAX_TOLD = 2

Load = Callable[[Mapping[str, Any]], Callable[..., Any]]
"""What a kernel runs, by what is asked of it."""


def sample(characters: int, seed: int) -> str:
    """A text of this length to measure with: prose and code in turn, in the order that the seed draws."""
    drawn_by = random.Random(seed)  # noqa: S311  # texts, no secret
    prose = SCRIPTS[0].split(" ")
    pieces: list[str] = []
    length = 0
    while length < characters:
        if drawn_by.random() < 0.3:
            piece = drawn_by.choice(CODE)
        elif drawn_by.random() < 0.1:
            piece = drawn_by.choice(SCRIPTS) + "\n"
        else:
            syllables = "".join(
                drawn_by.choices(("ta", "ri", "on", "es", "qu", "ment", "ing", "pro"), k=drawn_by.randint(1, 4))
            )
            piece = " ".join([*drawn_by.choices(prose, k=6), syllables, drawn_by.choice((".", ",", ";")), ""])
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces)[:characters]


def drawn(what: str) -> Callable[[Case, Mapping[str, Any]], dict[str, Any]]:
    """Makes canonical arguments of a case for the tokenizer that ``tokenizer_id`` names."""

    @functools.lru_cache(maxsize=2)  # asked for its facts, then measured
    def made(characters: int, count: int, tokenizer: Tokenizer, *, batched: bool) -> dict[str, Any]:
        each = characters // count
        texts = [sample(each, SEED + number) for number in range(count)]
        items: Any = texts if batched else texts[0]
        arguments: dict[str, Any] = {"tokenizer": tokenizer, "items": items, "batched": batched}
        if what == "encode":
            adds = tokenizer.surround is None and tokenizer.adds
            return arguments | {"add_special_tokens": adds, "parse_special": tokenizer.parses, "return_offsets": False}
        ids = oracle.encode(items, tokenizer=tokenizer, batched=batched, parse_special=tokenizer.parses)
        cut = [row[:each] for row in ids] if batched else ids[:each]
        return arguments | {"items": cut, "skip_special_tokens": False}

    def draw(case: Case, given: Mapping[str, Any]) -> dict[str, Any]:
        tokenizer = resolve(given["tokenizer_id"])
        batched = bool(case.params.get("batched"))
        return dict(made(case.sizes["characters"], case.sizes["batch"], tokenizer, batched=batched))

    return draw


def _texts(tokenizer: Tokenizer, parse_special: bool) -> Iterator[str]:
    yield from differential(tokenizer.specials)
    yield from (sample(size, SEED + size) for size in (500, 4000, 60_000, 250_000))
    del parse_special


def prove_encode(load: Load, given: Mapping[str, Any]) -> list[str]:
    """Encode every text of the corpus alone and in batches; what differs from the library itself, the first few."""
    tokenizer: Tokenizer = given["tokenizer"]
    flags = {"add_special_tokens": given["add_special_tokens"], "parse_special": given["parse_special"]}
    texts = list(_texts(tokenizer, given["parse_special"]))
    wanted = tokenizer.engine(  # the same for each kernel that proves itself in one process
        ("proof", *flags.values()), lambda: [oracle.encode(text, tokenizer=tokenizer, **flags) for text in texts]
    )
    one, many = load({**given, "batched": False}), load({**given, "batched": True})
    problems = []
    for text, ids in zip(texts, wanted, strict=True):
        got = _tried(one, text)
        if got != ids:
            problems.append(f"{_told(text)}: wanted {_told(ids)}, got {_told(got)}")
    for start in range(0, len(texts), 997):
        got = _tried(many, texts[start : start + 997])
        if got != wanted[start : start + 997]:
            problems.append(f"texts {start} to {start + 996} as a batch: other ids than one by one")
    again = [_tried(one, text) for text in reversed(texts)]  # with every cache of it warm
    if again[::-1] != wanted:
        problems.append("other ids at the second time")
    return _short(problems)


def prove_decode(load: Load, given: Mapping[str, Any]) -> list[str]:
    """Decode the ids of every text, their parts, and random ids; what differs from the library itself."""
    tokenizer: Tokenizer = given["tokenizer"]
    flags = {"skip_special_tokens": given["skip_special_tokens"]}
    rows = [
        oracle.encode(text, tokenizer=tokenizer, parse_special=tokenizer.parses) for text in _texts(tokenizer, True)
    ]
    rows += [row[1:] for row in rows if len(row) > 1] + [row[: len(row) // 2] for row in rows if len(row) > 1]
    order = random.Random(SEED)  # noqa: S311  # texts, no secret
    known = sorted({each for row in rows for each in row})
    rows += [order.choices(known, k=order.randint(1, 12)) for _ in range(3000)]
    rows += [[each] for each in known]
    wanted = [oracle.decode(row, tokenizer=tokenizer, **flags) for row in rows]
    one, many = load({**given, "batched": False}), load({**given, "batched": True})
    problems = []
    for row, text in zip(rows, wanted, strict=True):
        got = _tried(one, row)
        if got != text:
            problems.append(f"{_told(row)}: wanted {_told(text)}, got {_told(got)}")
    if _tried(many, rows) != wanted:
        problems.append("as a batch: other texts than one by one")
    return _short(problems)


def _tried(run: Callable[..., Any], item: Any) -> Any:
    try:
        return run(item)
    except Exception as error:  # noqa: BLE001  # a form that raises where the library does not is another one
        return f"{type(error).__name__}: {error}"


def _short(problems: list[str]) -> list[str]:
    left = len(problems) - MAX_TOLD
    return problems if left <= 0 else [*problems[:MAX_TOLD], f"and {left} more"]


def _told(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:40]}…{text[-12:]}"
