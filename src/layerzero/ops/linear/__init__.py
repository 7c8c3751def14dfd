"""Matrix products with a weight."""

from __future__ import annotations

from layerzero.ops.linear.declare import OPERATIONS
from layerzero.ops.linear.packed import PackedWeight
from layerzero.ops.linear.route import FUNCTIONS

__all__ = ["EXPORTS", "FUNCTIONS", "OPERATIONS", "PackedWeight"]

EXPORTS = ("PackedWeight",)
