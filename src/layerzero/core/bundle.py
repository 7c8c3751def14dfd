"""An object that stands for several arguments of a call: a cache, which brings its tensors, its layout, its tables.

Where a call has one in place of a tensor, the call is made again with what the object brings. Objects make no key of
their own, so that such a call costs 7 us more than one with the tensors themselves (2 CPU cores, 2026-11-22).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from layerzero.core.operation import Function


class _Missing(enum.Enum):
    """What torch.compile can follow: a member of an enumeration, not an object of its own."""

    MISSING = "MISSING"

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing.MISSING
"""Stands for a required argument that a call leaves out: an object may bring it, or the error says what it is."""


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
    """The arguments of a call with what its objects bring. Raises: TypeError for required ones that are missing."""
    found = dict(arguments)
    for name in function.tensors:
        value = arguments[name]
        if isinstance(value, Bundle):
            found |= value.arguments_of(function.name, name, found)
    missing = [name for name, value in found.items() if value is MISSING]
    if missing:
        given = {name: value for name, value in arguments.items() if value is not MISSING}
        objects = [given[name] for name in function.tensors if isinstance(given.get(name), Bundle)]
        said = f"{function.name}() missing required arguments: {', '.join(map(repr, missing))}"
        if not objects:
            try:
                function.signature(**{name: given[name] for name in given if name not in function.given_as})
            except TypeError as error:
                said = str(error)
        hints = "".join(f"; {each}" for each in dict.fromkeys(value.hint(missing) for value in objects) if each)
        raise TypeError(f"{said}{hints or lacking(function, missing, given)}")
    return found


def lacking(function: Function, missing: Sequence[str], given: Mapping[str, Any]) -> str:
    """What the required arguments are that a call lacks, and what it has, for the end of an error."""
    inputs = {each.name: each for operation in function.operations[::-1] for each in operation.schema.inputs}
    types = {each.name: each.annotation for each in function.parameters}

    def wanted(name: str) -> str:
        axes = inputs[name].shape_vars if name in inputs else ()
        return f"{name} ({', '.join(axes)})" if axes else f"{name}: {types[name]}"

    shapes = [f"{name} {tuple(value.shape)}" for name, value in given.items() if isinstance(value, torch.Tensor)]
    meant = f"; {function.lacking}" if function.lacking else ""
    return f"; wanted {', '.join(map(wanted, missing))}, got {', '.join(shapes) or 'no tensor'}{meant}"
