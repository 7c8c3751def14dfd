"""Attention with linear biases: the slopes of heads, and the bias that they make."""

from __future__ import annotations

from layerzero.ops.alibi.declare import FUNCTIONS, OPERATIONS, alibi_slopes

__all__ = ["EXPORTS", "FUNCTIONS", "OPERATIONS", "alibi_slopes"]

EXPORTS = ("alibi_slopes",)
