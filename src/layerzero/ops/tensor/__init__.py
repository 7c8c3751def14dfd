"""The same numbers elsewhere in memory: heads before tokens and back, a joined product taken apart, slices."""

from __future__ import annotations

from layerzero.ops.tensor.declare import FUNCTIONS, OPERATIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
