"""What is wrong with texts and ids themselves: no kernel is at fault for it."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from layerzero.core.errors import InvalidCallError
from layerzero.ops.tokenize.tokenizer import Tokenizer

MOST_SHOWN = 80
"""Characters of a value in an error."""


def shown(value: object) -> str:
    """A value in an error, of bounded length; Python itself refuses to write integers of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        value = value[: MOST_SHOWN + 1]
    text = reprlib.repr(value) if isinstance(value, (list, tuple, dict, set)) else repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def text_problems(items: Any = None, **_: Any) -> list[str]:
    """Halves of characters, which no tokenizer has an id for."""
    for number, text in enumerate(items if isinstance(items, list) else [items]):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"place {error.start}" + (f" of text {number}" if isinstance(items, list) else "")
            return [f"texts: wanted text that is Unicode, got a lone surrogate at {where}"]
    return []


def id_problems(items: Any = None, tokenizer: Tokenizer | None = None, **_: Any) -> list[str]:
    """Ids that lie amid a vocabulary and mean nothing."""
    if tokenizer is None or tokenizer.identity.format != "tiktoken":
        return []
    known = {*tokenizer.native._mergeable_ranks.values(), *tokenizer.native._special_tokens.values()}
    for row in items if items and isinstance(items[0], list) else [items]:
        wrong = next((each for each in row if each not in known), None)
        if wrong is not None:
            return [f"tokens: wanted ids of the vocabulary, got {shown(wrong)}, which is none of them"]
    return []


def check_ids(rows: Sequence[Sequence[Any]], tokenizer: Tokenizer) -> None:
    """Raise InvalidCallError for what is no id, or lies outside of the vocabulary."""
    for row in rows:
        if row and not (set(map(type, row)) <= {int} and min(row) >= 0 and max(row) < tokenizer.bound):
            wrong = next(each for each in row if type(each) is not int or not 0 <= each < tokenizer.bound)
            raise InvalidCallError(
                "detokenize", [f"tokens: wanted ids from 0 to {tokenizer.bound - 1}, got {shown(wrong)}"]
            )
