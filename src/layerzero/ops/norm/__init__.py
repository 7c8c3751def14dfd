"""Normalisation over the last axes."""

from __future__ import annotations

from layerzero.ops.norm.declare import FUNCTIONS, OPERATIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
