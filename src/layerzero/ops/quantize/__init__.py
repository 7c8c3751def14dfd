"""Numbers as narrow ones with scales, and back."""

from __future__ import annotations

from layerzero.ops.quantize.declare import OPERATIONS, QUANTIZE
from layerzero.ops.quantize.route import FUNCTIONS

__all__ = ["ALIASES", "FUNCTIONS", "OPERATIONS"]

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "quantize": (tuple(each.name for each in QUANTIZE.values()), {})
}
"""The specification's flat name."""
