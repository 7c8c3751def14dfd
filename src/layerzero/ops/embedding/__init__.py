"""Rows of a table by ids, of a whole vocabulary or of a shard of it."""

from __future__ import annotations

from layerzero.ops.embedding.declare import FUNCTIONS, OPERATIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
