"""Positions: rotating queries and keys, the tables of angles that rotations read."""

from __future__ import annotations

from layerzero.ops.rope.declare import OPERATIONS
from layerzero.ops.rope.route import FUNCTIONS
from layerzero.ops.rope.table import rope_frequencies, rope_table

__all__ = ["EXPORTS", "FUNCTIONS", "OPERATIONS", "rope_frequencies", "rope_table"]

EXPORTS = ("rope_frequencies", "rope_table")
