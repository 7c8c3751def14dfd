"""Operations and the functions that lead to them: one file a family, gathered here.

Add an operation: write its block in its family's file (schema, reference, fake, cases, tolerance) and name it in that
file's ``OPERATIONS``; a new family adds one line to each tuple below.
"""

from __future__ import annotations

from layerzero.core.operation import Function, Operation
from layerzero.ops import attention, norm
from layerzero.ops.attention_call import ATTENTION

OPERATIONS: dict[str, Operation] = {
    operation.name: operation for operation in (*attention.OPERATIONS, *norm.OPERATIONS)
}
FUNCTIONS: dict[str, Function] = {function.name: function for function in (ATTENTION, *norm.FUNCTIONS)}

OPERATION_ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "attention.causal": (attention.PREFILL, {"causal": True}),
    "attention.full": (attention.PREFILL, {"causal": False}),
}
"""The specification's flat names: the operations they cover and the facts they imply."""
