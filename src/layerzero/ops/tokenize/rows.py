"""What a caller asks for beside the ids: texts cut, surrounded, and filled up to rows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from layerzero.core.errors import InvalidCallError
from layerzero.ops.tokenize.checks import shown
from layerzero.ops.tokenize.tokenizer import Tokenizer

_PADDING = (False, True, "longest", "max_length", "do_not_pad")
_CUTTING = (False, True, "longest_first", "only_first", "do_not_truncate")

Offsets = list[tuple[int, int]]


class Asked(NamedTuple):
    """What is asked of rows; hashable, since it is a part of a key."""

    return_offsets: bool = False
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    truncation: bool | str = False
    max_length: int | None = None
    padding: bool | str = False
    pad_to_multiple_of: int | None = None
    return_attention_mask: bool | None = None

    def problems(self) -> list[str]:
        """What is wrong with it."""
        found = []
        if self.truncation not in _CUTTING:
            found.append(f"truncation: wanted one of {_CUTTING}, got {shown(self.truncation)}")
        if self.padding not in _PADDING:
            found.append(f"padding: wanted one of {_PADDING}, got {shown(self.padding)}")
        for name in ("max_length", "pad_to_multiple_of"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                found.append(f"{name}: wanted a number of at least 1 or None, got {shown(value)}")
        flags = ("add_special_tokens", "parse_special", "return_attention_mask")
        wrong = [name for name in flags if getattr(self, name) not in (None, True, False)]
        return [*found, *(f"{name}: wanted a bool or None, got {shown(getattr(self, name))}" for name in wrong)]

    @property
    def cuts(self) -> bool:
        """Whether texts may be cut."""
        return self.truncation not in (False, "do_not_truncate")

    @property
    def fills(self) -> bool:
        """Whether rows are filled up."""
        return self.padding not in (False, "do_not_pad")


def finish(rows: list[Any], tokenizer: Tokenizer, asked: Asked, surrounds: bool) -> dict[str, list[Any]]:
    """Cut, surround and fill up what a kernel gave; each row is ids, or ids and offsets."""
    ids: list[list[int]] = [row[0] for row in rows] if asked.return_offsets else rows
    offsets: list[Offsets] | None = [row[1] for row in rows] if asked.return_offsets else None
    around = tokenizer.surround if surrounds else None
    extra = len(around.before) + len(around.behind) if around is not None else 0
    if asked.cuts:
        most = asked.max_length or tokenizer.most
        if most is None:
            problem = "truncation: wanted max_length, since the tokenizer does not say what its model takes, got none"
            raise InvalidCallError("tokenize", [problem])
        keep = most - extra
        if keep < 0:
            raise InvalidCallError("tokenize", [f"max_length: wanted at least {extra}, the special tokens, got {most}"])
        ids = [_cut(row, keep, left=tokenizer.cuts_left) for row in ids]
        offsets = [_cut(row, keep, left=tokenizer.cuts_left) for row in offsets] if offsets is not None else None
    if around is not None and extra:
        before, behind = around
        ids = [[*before, *row, *behind] for row in ids]
        nothing = (0, 0)
        if offsets is not None:
            offsets = [[*(nothing for _ in before), *row, *(nothing for _ in behind)] for row in offsets]
    found: dict[str, list[Any]] = {"input_ids": ids}
    if asked.return_attention_mask or (asked.fills and asked.return_attention_mask is None):
        found["attention_mask"] = [[1] * len(row) for row in ids]
    if offsets is not None:
        found["offset_mapping"] = offsets
    return _filled(found, tokenizer, asked) if asked.fills else found


def _cut(row: Sequence[Any], keep: int, *, left: bool) -> list[Any]:
    return list(row[:keep]) if not left else list(row[max(len(row) - keep, 0) :])


def _filled(found: dict[str, list[Any]], tokenizer: Tokenizer, asked: Asked) -> dict[str, list[Any]]:
    if tokenizer.pad_id is None:
        wanted = "wanted a tokenizer with a token that fills rows up"
        raise InvalidCallError("tokenize", [f"padding: {wanted}, {tokenizer.name!r} has none"])
    longest = max(map(len, found["input_ids"]), default=0)
    if asked.padding == "max_length":
        most = asked.max_length or tokenizer.most
        if most is None:
            raise InvalidCallError("tokenize", ["padding: 'max_length' wants max_length, got none"])
        longest = most
    step = asked.pad_to_multiple_of or 1
    width = -(-longest // step) * step
    fills: dict[str, Any] = {"input_ids": tokenizer.pad_id, "attention_mask": 0, "offset_mapping": (0, 0)}
    for name, rows in found.items():
        filler = fills[name]
        if tokenizer.pads_left:
            found[name] = [[filler] * (width - len(row)) + row for row in rows]
        else:
            found[name] = [row + [filler] * (width - len(row)) for row in rows]
    return found
