"""What lies between larger operations: biases, residuals, softmax, other dtypes."""

from __future__ import annotations

from layerzero.ops.elementwise.declare import FUNCTIONS, OPERATIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
