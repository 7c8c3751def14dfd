"""What lies between larger operations: biases, residuals, softmax, other dtypes."""

from __future__ import annotations

from layerzero.ops.elementwise.declare import OPERATIONS
from layerzero.ops.elementwise.route import FUNCTIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
