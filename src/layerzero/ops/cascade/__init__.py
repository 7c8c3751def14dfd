"""Attention in parts: states of parts of the keys made one, and a prefix that sequences share attended once for all."""

from __future__ import annotations

from layerzero.ops.cascade.declare import FUNCTIONS, OPERATIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
