"""Operations and the functions that lead to them: one file a family, gathered here.

Add an operation: write its block in its family's file (schema, reference, fake, cases, tolerance) and name it in that
file's ``OPERATIONS``; a new family adds one line to each tuple below.
"""

from __future__ import annotations

from layerzero.core.operation import Function, Operation
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.route import ATTENTION
from layerzero.ops.norm import declare as norm
from layerzero.ops.paged import declare as paged
from layerzero.ops.paged import route as paged_call

OPERATIONS: dict[str, Operation] = {
    operation.name: operation for operation in (*attention.OPERATIONS, *paged.OPERATIONS, *norm.OPERATIONS)
}
FUNCTIONS: dict[str, Function] = {
    function.name: function for function in (ATTENTION, *paged_call.FUNCTIONS, *norm.FUNCTIONS)
}

OPERATION_ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "attention.causal": (attention.PREFILL, {"causal": True}),
    "attention.full": (attention.PREFILL, {"causal": False}),
    "attention.paged": (paged.DECODE_PAGED, {}),
}
"""The specification's flat names: the operations they cover and the facts they imply."""


def function_of(operation: str) -> Function | None:
    """The public function whose calls may be routed to an operation, None where there is none."""
    for function in FUNCTIONS.values():
        if any(each.name == operation for each in function.operations):
            return function
    return None
