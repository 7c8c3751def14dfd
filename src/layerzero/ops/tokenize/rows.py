"""What the library gives that defines a tokenizer, and what a caller wants besides the ids.

Texts are cut, surrounded, and filled up to rows of one length.

Text of tokens as they come: what is handed out is never taken back, and half of a character waits for the rest.
"""

from __future__ import annotations

import codecs
import copy
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from layerzero.core.errors import InvalidCallError
from layerzero.ops.tokenize.tokenizer import Tokenizer, resolve


def encode(
    items: str | list[str],
    *,
    tokenizer: Tokenizer,
    batched: bool = False,
    add_special_tokens: bool = False,
    parse_special: bool = False,
    return_offsets: bool = False,
) -> Any:
    """Ids, or ids and offsets, one text after the other."""
    if batched:
        return [
            encode(
                each, tokenizer=tokenizer, add_special_tokens=add_special_tokens, parse_special=parse_special,
                return_offsets=return_offsets,
            )
            for each in items
        ]  # fmt: skip
    text: Any = items
    native, kind = tokenizer.native, tokenizer.identity.format
    if kind == "tokenizer.json":
        if not parse_special:
            native = ordinary_copy(tokenizer)
        encoded = native.encode(text, add_special_tokens=add_special_tokens)
        return (encoded.ids, encoded.offsets) if return_offsets else encoded.ids
    if kind == "tiktoken":
        ids = native.encode(text, allowed_special="all") if parse_special else native.encode_ordinary(text)
        return (ids, offsets_of_bytes(text, native.decode_tokens_bytes(ids))) if return_offsets else ids
    if kind == "sentencepiece":
        return with_offsets_of_pieces(native, text) if return_offsets else native.encode(text)
    return native.encode(text, add_special_tokens=add_special_tokens, split_special_tokens=not parse_special)


def ordinary_copy(tokenizer: Tokenizer) -> Any:
    """A tokenizers.Tokenizer that takes texts of special tokens as text: that switch is the object's own state."""

    def make() -> Any:
        copied = type(tokenizer.native).from_str(tokenizer.native.to_str())
        copied.encode_special_tokens = True
        return copied

    return tokenizer.engine("ordinary", make)


def offsets_of_bytes(text: str, pieces: list[bytes]) -> list[tuple[int, int]]:
    """Where the bytes of each token lie in characters; one that begins amid a character begins with it."""
    offsets, at = [], 0
    for piece in pieces:
        begins = sum(1 for byte in piece if byte & 0xC0 != 0x80)
        amid = bool(piece) and piece[0] & 0xC0 == 0x80
        offsets.append((at - amid, at + begins))
        at += begins
    return offsets


def with_offsets_of_pieces(native: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of SentencePiece, and where their pieces lie in characters.

    The library has two ways: ``immutable_proto`` up to 0.2.1, ``offset_mapping`` from 0.2.2 on.
    """
    if hasattr(native, "EncodeAsOffsetMapping"):
        found = native.encode(text, return_type="offset_mapping")
        return found["ids"], found["offsets"]
    pieces = native.encode(text, out_type="immutable_proto").pieces
    return [each.id for each in pieces], [(each.begin, each.end) for each in pieces]


def decode(items: Any, *, tokenizer: Tokenizer, batched: bool = False, skip_special_tokens: bool = False) -> Any:
    """Text of ids, one list after the other."""
    if batched:
        return [decode(each, tokenizer=tokenizer, skip_special_tokens=skip_special_tokens) for each in items]
    native, kind = tokenizer.native, tokenizer.identity.format
    if kind in ("tokenizer.json", "transformers"):
        return native.decode(items, skip_special_tokens=skip_special_tokens)
    left = [each for each in items if each not in tokenizer.special_ids] if skip_special_tokens else list(items)
    return native.decode(left)


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


_PADDING = (False, True, "longest", "max_length", "do_not_pad")
_CUTTING = (False, True, "longest_first", "only_first", "do_not_truncate")

Offsets = list[tuple[int, int]]


class Asked(NamedTuple):
    """The wanted form of rows; hashable, since it is a part of a key."""

    return_offsets: bool = False
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    truncation: bool | str = False
    max_length: int | None = None
    padding: bool | str = False
    pad_to_multiple_of: int | None = None
    return_attention_mask: bool | None = None

    def problems(self) -> list[str]:
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


MARK = "\ufffd"

REACH = 6
"""Ids behind which nothing that comes later changes a text: the longest character has four bytes."""


class StreamingDetokenizer:
    """Turns ids into text one by one.

        stream = lz.StreamingDetokenizer("cl100k_base")
        for token in model: print(stream.add(token), end="")
        print(stream.end())

    All that was handed out, joined, is what :func:`layerzero.detokenize` gives for all ids at once. A copy and a pickle
    go on from where this one is, as forks of a sequence do.
    """

    def __init__(self, tokenizer_id: Any, *, skip_special_tokens: bool = False) -> None:
        self._given, self._tokenizer = tokenizer_id, resolve(tokenizer_id)
        self._skip = skip_special_tokens
        self._bytes = self._tokenizer.identity.format == "tiktoken"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._context = self._told = 0

    def __reduce__(self) -> tuple[Any, ...]:
        state = self._skip, self._decoder.getstate(), [*self._ids], self._context, self._told
        return type(self), (self._given,), state

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._skip, decoded, self._ids, self._context, self._told = state
        self._decoder.setstate(decoded)

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamingDetokenizer:
        return copy.copy(self)  # of the same tokenizer

    def add(self, token: int | Iterable[int]) -> str:
        """The text that is certain now; empty while a character is not whole. Raises: InvalidCallError."""
        ids = [token] if isinstance(token, int) else list(token)
        check_ids([ids], self._tokenizer)
        if self._bytes:
            kept = [each for each in ids if not (self._skip and each in self._tokenizer.special_ids)]
            return self._decoder.decode(b"".join(map(self._tokenizer.native.decode_single_token_bytes, kept)))
        self._ids += ids
        return self._grown(last=False)

    def end(self) -> str:
        """What is left: half of a character becomes U+FFFD. The stream begins anew."""
        left = self._decoder.decode(b"", final=True) if self._bytes else self._grown(last=True)
        self._decoder.reset()
        self._ids, self._context, self._told = [], 0, 0
        return left

    def _grown(self, *, last: bool) -> str:
        """What the ids behind those that were given out add to the text; decoded with some before them."""
        before = self._text(self._context, self._told)
        whole = self._text(self._context, len(self._ids))
        if not whole.startswith(before):  # a cleaned-up ending: all that is certain is what both begin with
            self._context = 0
            before, whole = self._text(0, self._told), self._text(0, len(self._ids))
        if not last and whole.endswith(MARK):
            return ""
        new = whole[len(before) :]
        self._context, self._told = max(self._told - REACH, 0) if new else self._context, len(self._ids)
        return new

    def _text(self, start: int, end: int) -> str:
        text = decode(self._ids[start:end], tokenizer=self._tokenizer, skip_special_tokens=self._skip)
        return str(text)
