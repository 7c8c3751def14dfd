"""What a question is about: a public function, as itself or by its name, an operation, or an alias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerzero.asking.drop_in import drop_in_named
from layerzero.core.arguments import told
from layerzero.core.operation import Operation
from layerzero.engine.functions import CALLS
from layerzero.engine.plain import PLAIN_CALLS
from layerzero.ops import current_name

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
