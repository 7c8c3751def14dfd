"""Rotating queries and keys and writing keys and values into a cache, in one call."""

from __future__ import annotations

from layerzero.ops.rope_append.declare import OPERATIONS
from layerzero.ops.rope_append.route import FUNCTIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
