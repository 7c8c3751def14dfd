"""Draws of token ids, what is done to logits before them, and what they give after."""

from __future__ import annotations

from layerzero.ops.sampling import declare, logits, route, verify

OPERATIONS = (*declare.OPERATIONS, *logits.OPERATIONS, *verify.OPERATIONS)
FUNCTIONS = (*route.FUNCTIONS, *logits.FUNCTIONS, *verify.FUNCTIONS)

__all__ = ["ALIASES", "FUNCTIONS", "OPERATIONS"]

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "sampling.speculative": (tuple(operation.name for operation in verify.OPERATIONS), {}),
}
"""The specification's flat name."""
