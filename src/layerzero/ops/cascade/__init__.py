"""Attention in parts: states of parts of the keys made one, and a prefix that sequences share attended once for all."""

from __future__ import annotations

from layerzero.ops.cascade import declare, merge

__all__ = ["FUNCTIONS", "OPERATIONS"]

OPERATIONS = (*merge.OPERATIONS, *declare.OPERATIONS)
FUNCTIONS = (*merge.FUNCTIONS, *declare.FUNCTIONS)
