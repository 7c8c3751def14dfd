"""Matrix products with a weight."""

from __future__ import annotations

from layerzero.ops.linear.declare import LINEAR
from layerzero.ops.linear.fused import OPERATIONS as FUSED
from layerzero.ops.linear.packed import PackedWeight
from layerzero.ops.linear.route import FUNCTIONS

__all__ = ["EXPORTS", "FUNCTIONS", "OPERATIONS", "PackedWeight"]

OPERATIONS = (LINEAR, *FUSED)

EXPORTS = ("PackedWeight",)
