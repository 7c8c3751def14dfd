"""Numbers as narrow ones with scales, and back."""

from __future__ import annotations

from layerzero.ops.quantize.declare import OPERATIONS, QUANTIZE
from layerzero.ops.quantize.route import FUNCTIONS
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import WeightFormat

__all__ = ["ALIASES", "EXPORTS", "FUNCTIONS", "OPERATIONS", "QuantizedWeight", "WeightFormat"]

EXPORTS = ("QuantizedWeight", "WeightFormat")

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "quantize": (tuple(each.name for each in QUANTIZE.values()), {})
}
"""The specification's flat name."""
