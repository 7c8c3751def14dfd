"""What a question is about: a public function, as itself or by its name, an operation, or an alias."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.core.argument_errors import DropIn, Made, bound
from layerzero.core.arguments import told
from layerzero.core.device import Device
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Operation
from layerzero.engine.functions import CALLS
from layerzero.engine.plain import PLAIN_CALLS
from layerzero.ops import DROP_INS, current_name


def drop_in_named(asked: object) -> DropIn | None:
    """The one that is given as itself; its module is looked at only where it was imported."""
    if not callable(asked):
        return None
    homes = ((each, sys.modules.get(each.home)) for each in DROP_INS.values())
    return next((each for each, home in homes if asked is getattr(home, each.name, None)), None)


def call_made(of: DropIn, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: Device | None) -> Made:
    """The call that it makes; ``device`` is the call's device, if that is not where the tensors lie.

    Raises: TypeError for a call that does not fit the signature; InvalidCallError where the library's own runs.
    """
    given = bound(of.name, getattr(importlib.import_module(of.home), of.name), args, kwargs)
    return of.call(given, "" if device is None else device.torch_type)


def refused(of: DropIn, error: InvalidCallError) -> InvalidCallError:
    """The error of a call that the public function does not take: the library's own answers it, or refuses it too."""
    why = f"{of.library}'s own function runs this call, since lz.{of.function} does not take it"
    return InvalidCallError(of.name, [f"{why}: {each}" for each in error.problems], error.code)


Named = str | Operation | Callable[..., Any]
"""How a function or an operation may be named."""


def function_named(asked: object) -> str | None:
    """The name of a public function that is given as itself, however it is called; None for anything else."""
    standing = drop_in_named(asked)
    if standing is not None:
        return standing.name
    ways = [(name, way) for name, call in list(CALLS.items()) for way in (call.fast, call.python)]
    ways += [(name, way) for name, (_, way) in list(PLAIN_CALLS.items())]
    return next((name for name, way in ways if way is asked), None)


def name_of(asked: object, question: str, also: str = "") -> str:
    """The name that a question means; a text is one itself, whether or not there is such a thing.

    Raises: TypeError with what was wanted and got, and what to do.
    """
    if isinstance(asked, str):
        return current_name(asked, stacklevel=3)
    name = asked.name if isinstance(asked, Operation) else function_named(asked)
    if name is None:
        got = repr(asked) if callable(asked) else told(asked)
        wanted = f"wanted a function of LayerZero or its name, an operation or an alias{also}, got {got}"
        raise TypeError(f"{question}: {wanted}; lz.list_operations() lists the operations")
    return name
