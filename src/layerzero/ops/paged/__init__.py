"""Attention over a paged cache, and writing into one."""

from __future__ import annotations

from layerzero.ops.paged.declare import DECODE_PAGED, OPERATIONS
from layerzero.ops.paged.route import FUNCTIONS

__all__ = ["ALIASES", "FUNCTIONS", "OPERATIONS"]

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {"attention.paged": (DECODE_PAGED, {})}
"""The specification's flat name."""
