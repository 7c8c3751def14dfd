"""Attention of blocks of queries to some blocks of keys."""

from __future__ import annotations

from layerzero.ops.sparse.declare import OPERATIONS
from layerzero.ops.sparse.pattern import BlockPattern
from layerzero.ops.sparse.route import FUNCTIONS

__all__ = ["EXPORTS", "FUNCTIONS", "OPERATIONS", "BlockPattern"]

EXPORTS = ("BlockPattern",)
