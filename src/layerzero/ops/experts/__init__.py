"""Products of many weights at once: one input each, or rows that are sorted by the weight they go to."""

from __future__ import annotations

from layerzero.ops.experts.declare import FUNCTIONS, OPERATIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
