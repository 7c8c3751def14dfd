"""A tokenizer that texts are encoded with: its library's own object, its identity, and what surrounds a text.

It is read once, and anew where its file or object changed: each call compares a stamp
(:mod:`layerzero.ops.tokenize.identity`). :func:`forget` covers what no stamp sees.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from layerzero.core.errors import InvalidCallError, printable
from layerzero.core.system import forking
from layerzero.core.system.disk import make_private, write_whole
from layerzero.ops.tokenize import identity
from layerzero.ops.tokenize.identity import Identity

DUMPED = "layerzero.tiktoken"
"""What a written tiktoken encoding says it is."""


class Surround(NamedTuple):
    """What stands before and behind the ids of a text."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class Tokenizer:
    """One tokenizer.

    Attributes:
        name: what the user called it.
        native: the object of the library that defines it, and that everything else is compared with.
        identity: what it is.
        tokenizer_hash: the hash of that.
        source: where another process finds it: a file, or an encoding's name; empty for an object.
        surround: what is added to a text, None where only the library itself knows how.
        adds: whether that is added where the caller does not say.
        parses: whether texts of special tokens become these tokens where the caller does not say.
        bound: ids lie below it.
        pad_id: what fills rows up, None where it has no such token.
        pads_left, cuts_left: on which side rows are filled up, and texts cut.
        most: tokens that its model takes, None where it does not say.
        specials: texts of special and added tokens.
        special_ids: ids of special tokens, which detokenizing may leave out.
        engines: forms of it that libraries work with, by kernel and settings; made once each.
    """

    name: str
    native: Any
    identity: Identity
    source: str
    surround: Surround | None
    adds: bool
    parses: bool
    bound: int
    pad_id: int | None = None
    pads_left: bool = False
    cuts_left: bool = False
    most: int | None = None
    specials: tuple[str, ...] = ()
    special_ids: frozenset[int] = frozenset()
    write: Callable[[], tuple[str, bytes]] | None = None
    tokenizer_hash: str = ""
    engines: dict[Any, Any] = field(default_factory=dict)
    _lock: Any = field(default_factory=forking.rlock)

    def __post_init__(self) -> None:
        self.tokenizer_hash = self.identity.tokenizer_hash

    def __repr__(self) -> str:
        return f"<lz tokenizer {self.name!r} {self.identity.format} {self.tokenizer_hash[:12]}>"

    def engine(self, key: Any, make: Callable[[], Any]) -> Any:
        """A form of it that a library works with, made at the first call for it."""
        found = self.engines.get(key)
        if found is None:
            with self._lock:
                found = self.engines.get(key)
                if found is None:
                    found = self.engines[key] = make()
        return found

    def written(self, folder: Path) -> str:
        """A file or name by which another process finds it; objects are written into the folder, under their hash.

        Raises: InvalidCallError for an object that only this process has.
        """
        if self.source and self.source == printable(self.source):  # no document has a path that is no Unicode
            return self.source
        if self.write is None:
            problem = (
                f"tokenizer_id: wanted a tokenizer that can be written to a file, got {type(self.native).__name__}"
            )
            raise InvalidCallError("tokenize", [problem])
        suffix, content = self.write()
        path = folder / f"{self.tokenizer_hash}{suffix}"
        if not path.exists():
            make_private(folder)
            write_whole(path, content, private=True)
        return os.fspath(path)


class Followed(NamedTuple):
    """What a name or object stood for when it was read.

    Attributes:
        given: the name or object; the object lives as long as its place here.
        tokenizer: what was read.
        changed: whether it is another now; None for what never changes.
    """

    given: Any
    tokenizer: Tokenizer
    changed: Callable[[], bool] | None


_KNOWN: dict[Any, Followed] = {}
_BY_HASH: dict[str, Tokenizer] = {}
_LOCK = forking.rlock()
_FORGETTING: list[Callable[[], None]] = []
_CHOICES: list[Callable[[], None]] = []


def resolve(tokenizer_id: object) -> Tokenizer:
    """The tokenizer that a file, folder, encoding name or object stands for now.

    Raises: InvalidCallError where it stands for none, with what was wanted.
    """
    return follow(tokenizer_id).tokenizer


def follow(tokenizer_id: object) -> Followed:
    """As :func:`resolve`, with what tells later calls that it changed."""
    if isinstance(tokenizer_id, Tokenizer):
        return Followed(tokenizer_id, tokenizer_id, None)
    given = os.fspath(tokenizer_id) if isinstance(tokenizer_id, os.PathLike) else tokenizer_id
    key = given if isinstance(given, str) else id(given)
    found = _KNOWN.get(key)
    if found is not None and (found.changed is None or not found.changed()):
        return found
    from layerzero.ops.tokenize import formats

    with _LOCK:
        changed = _change(given)  # before it is read: what changes meanwhile is seen by the next call
        made = formats.named(given) if isinstance(given, str) else formats.of_object(given)
        made = _BY_HASH.get(_identical(made), made)
        if made.native is not given and made.identity.format == "transformers":
            made = formats.apart(formats.of_object(given), id(given))
        _BY_HASH[_identical(made)] = made
        followed = _KNOWN[key] = Followed(given, made, changed)
        if found is not None and not any(each.tokenizer is found.tokenizer for each in _KNOWN.values()):
            _drop(found.tokenizer)
    return followed


def _change(given: Any) -> Callable[[], bool] | None:
    """What tells whether something is another than it is now."""
    try:
        stamp = identity.of_name(given) if isinstance(given, str) else identity.of_object(given)
        before = None if stamp is None else stamp()
    except Exception:  # noqa: BLE001  # steps in Python raise what they like; reading it tells
        return lambda: True
    if stamp is None:
        return None

    def changed() -> bool:
        try:
            now = stamp()
        except Exception:  # noqa: BLE001
            return True
        return now is not None and now != before

    return changed


def _drop(tokenizer: Tokenizer | None) -> None:
    for name in [name for name, each in _BY_HASH.items() if each is tokenizer]:
        del _BY_HASH[name]


def _identical(tokenizer: Tokenizer) -> str:
    """What makes two of them exchangeable: identity, and how they are called."""
    ways = tokenizer.surround, tokenizer.adds, tokenizer.parses, tokenizer.pad_id, tokenizer.most
    return f"{tokenizer.tokenizer_hash} {ways} {tokenizer.pads_left} {tokenizer.cuts_left} {tokenizer.name}"


def by_hash(tokenizer_hash: object, name: object = None) -> Tokenizer:
    """A tokenizer that was resolved in this process, by its whole hash. Raises: LookupError."""
    for each in list(_BY_HASH.values()):
        if each.tokenizer_hash == tokenizer_hash and (name is None or each.name == name):
            return each
    raise LookupError(f"no tokenizer with the hash {tokenizer_hash} was used in this process")


def known() -> list[Tokenizer]:
    """Those that were resolved in this process."""
    return list(_BY_HASH.values())


def when_forgotten(method: Callable[[], None]) -> None:
    """Call a function where a tokenizer is forgotten."""
    _FORGETTING.append(method)


def when_chosen_anew(method: Callable[[], None]) -> None:
    """Call a function where what was chosen for a tokenizer no longer holds: it is forgotten, or this is a child."""
    _CHOICES.append(method)
    when_forgotten(method)


def forget(tokenizer_id: object = None) -> None:
    """Read a tokenizer anew at its next call; all of them if None.

    Calls notice other files, added tokens, and other steps, settings and sizes of an object by themselves. This is for
    what :mod:`layerzero.ops.tokenize.identity` names as not seen.
    """
    with _LOCK:
        if tokenizer_id is None:
            _KNOWN.clear()
            _BY_HASH.clear()
        else:
            key = os.fspath(tokenizer_id) if isinstance(tokenizer_id, (str, os.PathLike)) else id(tokenizer_id)
            found = _KNOWN.pop(key, None)
            gone = None if found is None else found.tokenizer
            _drop(gone)
            for other in [other for other, each in _KNOWN.items() if each.tokenizer is gone]:
                del _KNOWN[other]
    for method in _FORGETTING:
        method()


_WERE_SEVERAL: list[bool] = []


def _look_for_threads() -> None:
    _WERE_SEVERAL[:] = [threading.active_count() > 1]


def _make_anew() -> None:
    """In a forked child: choose anew, since some libraries cannot run there.

    Another thread may have been inside of a library's form of a tokenizer, and its locks would be held for ever;
    kitoken hangs so. Then forms are made anew, too, at their next call.
    """
    if any(_WERE_SEVERAL):
        for each in known():
            each.engines.clear()
    for method in _CHOICES:
        method()


forking.around(_look_for_threads, lambda: None)
forking.in_child(_make_anew)


def dumped(ranks: Mapping[bytes, int], pattern: str, specials: Mapping[str, int]) -> bytes:
    """A tiktoken encoding as a file that :func:`resolve` reads."""
    encoded = {base64.b64encode(piece).decode(): rank for piece, rank in ranks.items()}
    return json.dumps(
        {"format": DUMPED, "pattern": pattern, "special_tokens": dict(specials), "ranks": encoded}
    ).encode()
