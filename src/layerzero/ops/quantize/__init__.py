"""Numbers as narrow ones with scales, and back."""

from __future__ import annotations

from layerzero.ops.quantize.conversion import quantize_weight, read_gguf, repack
from layerzero.ops.quantize.declare import OPERATIONS, QUANTIZE
from layerzero.ops.quantize.route import FUNCTIONS
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import WeightFormat

__all__ = [
    "ALIASES",
    "EXPORTS",
    "FUNCTIONS",
    "OPERATIONS",
    "QuantizedWeight",
    "WeightFormat",
    "quantize_weight",
    "read_gguf",
    "repack",
]

EXPORTS = ("QuantizedWeight", "WeightFormat", "quantize_weight", "read_gguf", "repack")

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "quantize": (tuple(each.name for each in QUANTIZE.values()), {})
}
"""The specification's flat name."""
