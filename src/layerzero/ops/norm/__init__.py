"""Normalisation over the last axes, alone and behind a residual addition."""

from layerzero.ops.norm.declare import FUNCTIONS, OPERATIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
