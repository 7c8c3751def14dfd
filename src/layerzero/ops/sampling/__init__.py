"""Draws of token ids, what is done to logits before them, and what they give after."""

from __future__ import annotations

from layerzero.ops.sampling import declare, logits, request_state, route, verify
from layerzero.ops.sampling.request_state import TokenCounts

OPERATIONS = (*declare.OPERATIONS, *logits.OPERATIONS, *request_state.OPERATIONS, *verify.OPERATIONS)
FUNCTIONS = (*route.FUNCTIONS, *logits.FUNCTIONS, *request_state.FUNCTIONS, *verify.FUNCTIONS)

__all__ = ["ALIASES", "EXPORTS", "FUNCTIONS", "OPERATIONS", "TokenCounts"]

EXPORTS = ("TokenCounts",)

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "sampling.speculative": (tuple(operation.name for operation in verify.OPERATIONS), {})
}
"""The specification's flat name."""
