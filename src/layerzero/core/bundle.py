"""An object that stands for several arguments of a call: a cache, which brings its tensors, its layout, its tables.

Where a call has one in place of a tensor, the call is made again with what the object brings. Objects make no key of
their own, so that such a call costs 7 us more than one with the tensors themselves (2 CPU cores, 2026-11-22).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero.core.operation import Function


class _Missing(enum.Enum):
    """What torch.compile can follow: a member of an enumeration, not an object of its own."""

    MISSING = "MISSING"

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing.MISSING
"""Stands for a required argument that a call leaves out, since an object may bring it."""


class Bundle:
    """What may stand in place of a tensor."""

    __slots__ = ()

    def arguments_of(self, function: str, parameter: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments that it brings where it stands for ``parameter``; they replace those of the call.

        Raises: InvalidCallError where the call says something else.
        """
        raise NotImplementedError

    def hint(self, _missing: Sequence[str]) -> str:
        """What would bring required arguments that the call lacks still, for the end of an error; empty if nothing."""
        return ""


def unpack(function: Function, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call with what its objects bring. Raises: TypeError for required ones that nobody brings."""
    found = dict(arguments)
    for name in function.tensors:
        value = arguments[name]
        if isinstance(value, Bundle):
            found |= value.arguments_of(function.name, name, found)
    missing = [name for name, value in found.items() if value is MISSING]
    if missing:
        names = ", ".join(map(repr, missing))
        given = (arguments[name] for name in function.tensors)
        hints = [value.hint(missing) for value in given if isinstance(value, Bundle)]
        text = "; ".join(dict.fromkeys(filter(None, hints)))
        raise TypeError(f"{function.name}() missing required arguments: {names}{text and f'; {text}'}")
    return found
