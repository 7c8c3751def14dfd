"""Errors of calls that do not fit a signature: the public name, and the argument that a misspelt one may have meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar

_Init = TypeVar("_Init", bound=Callable[..., None])


def misfit(
    name: str,
    error: TypeError,
    passed: Iterable[str],
    known: Iterable[str],
    renamed: Mapping[str, str] = MappingProxyType({}),
    lacking: str = "",
) -> TypeError:
    """The error to raise in place of Python's own, by the names of a call, those of the signature and former ones.

    ``lacking`` says what the arguments are that the call leaves out.
    """
    known = list(known)
    stranger = next((each for each in passed if each not in known), None)
    if stranger is None:
        return TypeError(f"{name}: {error}{lacking}")
    if stranger in renamed:
        return TypeError(f"{name}: got an unexpected keyword argument {stranger!r}; it is {renamed[stranger]!r} now")
    wanted = ", ".join(each for each in known if each != "self")
    hint = meant(stranger, known) or f"; wanted {wanted}"
    return TypeError(f"{name}: got an unexpected keyword argument {stranger!r}{hint}")


ELSEWHERE: dict[str, tuple[str, ...]] = {}
"""Names that other libraries have for arguments, and those of ours that mean the same; the families in ``ops/`` say."""

NEEDLESS: dict[str, tuple[str, str]] = {}
"""The same of names for which nothing stands here: an argument of the functions that are meant, and what to do."""


def meant(stranger: str, known: Sequence[str]) -> str:
    """Which of these arguments a foreign or misspelt name means, as the end of a message; empty if that is not sure.

    A guess that is only near may be of another meaning: ``softmax_scale`` is no misspelt ``softcap``.
    """
    ours = next((each for each in ELSEWHERE.get(stranger, ()) if each in known), None)
    beside, what_to_do = NEEDLESS.get(stranger, ("", ""))
    if ours is None and beside in known:
        return f"; {what_to_do}"
    return f"; did you mean {ours!r}?" if ours is not None else did_you_mean(stranger, known, _SURE)


_SHORT, _SURE = 4, 0.8
"""Letters of a word of which a misspelt one has few left: ``epz`` has two thirds in common with ``eps``. And the part
in common from which a word is another one misspelt, whatever it begins with: rope is no misspelt nope."""


def did_you_mean(word: str, known: Iterable[str], least: float | None = None) -> str:
    """Name the closest known word, as the end of an error message; empty if nothing is close."""
    if least is None:
        least = 0.5 if len(word) <= _SHORT else 0.7  # at a half, mine.own would be mlp.linear.quant
    for each in get_close_matches(word, known, n=3, cutoff=least):
        if each[:1].lower() == word[:1].lower() or SequenceMatcher(None, each, word).ratio() >= _SURE:
            return f"; did you mean {each!r}?"
    return ""


def public(name: str) -> Callable[[_Init], _Init]:
    """Let a constructor say its public name where a call does not fit it, whatever class it is written in."""

    def of(init: _Init) -> _Init:
        @functools.wraps(init)
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                init(self, *args, **kwargs)
            except TypeError:
                bound(name, init, (self, *args), kwargs)
                raise

        return made  # type: ignore[return-value]  # the same signature

    return of


def bound(name: str, of: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults filled in. Raises: TypeError with the public name for a misfit."""
    signature = inspect.signature(of)
    try:
        found = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise misfit(name, error, kwargs, signature.parameters) from None
    found.apply_defaults()
    return dict(found.arguments)


Made = tuple[dict[str, Any], tuple[str, ...]]
"""The arguments of the public function, and notes about what of them is not as the caller gave it."""


@dataclass(frozen=True, slots=True)
class DropIn:
    """What questions about such a function need to know.

    Attributes:
        name: what it is called.
        function: name of the public function that it calls.
        home: the module that has it, which is imported on first use.
        library: whose function it stands for, and which runs the calls that the public one does not take.
        call: from all its arguments, and the type of device in question (empty for that of the tensors), to the call
            that it makes; InvalidCallError with the reason and what to do where it makes none.
        instead: the call of the public function that means the same for tensors as they are.
    """

    name: str
    function: str
    home: str
    library: str
    call: Callable[[Mapping[str, Any], str], Made]
    instead: str
