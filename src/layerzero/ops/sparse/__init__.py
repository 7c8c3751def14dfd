"""Attention of blocks of queries to some blocks of keys."""

from __future__ import annotations

from layerzero.ops.sparse import declare
from layerzero.ops.sparse.declare import BlockPattern
from layerzero.ops.sparse.variable import VARIABLE_SPARSE, VARIABLE_SPARSE_ATTENTION

__all__ = ["ALIASES", "EXPORTS", "FUNCTIONS", "OPERATIONS", "BlockPattern"]

EXPORTS = ("BlockPattern",)
OPERATIONS = (*declare.OPERATIONS, VARIABLE_SPARSE)
FUNCTIONS = (*declare.FUNCTIONS, VARIABLE_SPARSE_ATTENTION)

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "attention.sparse.variable_block": ((VARIABLE_SPARSE.name,), {})
}
"""The specification's name."""
