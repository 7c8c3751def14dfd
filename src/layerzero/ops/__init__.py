"""Operations and the functions that lead to them: a folder a family, gathered here.

Add an operation: write its block in its family's folder (schema, reference, fake, cases, tolerance) and name it in the
``OPERATIONS`` of that folder; a new family is a new folder, with ``OPERATIONS``, ``FUNCTIONS`` and, where there are
such things, ``ALIASES`` (names of several operations), ``EXPORTS`` (names that users find beside the functions) and
``LIMITS`` (kinds of limits that are its own, by the names that descriptors know them by).
"""

from __future__ import annotations

import importlib
import pkgutil

from layerzero.core.limit_data import register_kinds
from layerzero.core.operation import Function, Operation

OPERATIONS: dict[str, Operation] = {}
FUNCTIONS: dict[str, Function] = {}
OPERATION_ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {}
"""Names for several operations: those that they cover, and the facts that they imply."""

EXPORTS: dict[str, str] = {}
"""What families offer users beside their functions (a handle's class): the name and the module that it lives in."""


def function_of(operation: str) -> Function | None:
    """The public function whose calls may be routed to an operation, None where there is none."""
    for function in FUNCTIONS.values():
        if any(each.name == operation for each in function.operations):
            return function
    return None


for _family in sorted(each.name for each in pkgutil.iter_modules(__path__) if each.ispkg):
    _module = importlib.import_module(f"{__name__}.{_family}")
    OPERATIONS |= {operation.name: operation for operation in _module.OPERATIONS}
    FUNCTIONS |= {function.name: function for function in _module.FUNCTIONS}
    OPERATION_ALIASES |= getattr(_module, "ALIASES", {})
    EXPORTS |= dict.fromkeys(getattr(_module, "EXPORTS", ()), _module.__name__)
    register_kinds(getattr(_module, "LIMITS", {}))
