"""Matrix products with a weight."""

from layerzero.ops.linear.declare import LINEAR
from layerzero.ops.linear.fused import OPERATIONS as FUSED
from layerzero.ops.linear.packed import PackedWeight
from layerzero.ops.linear.qkv import FUNCTIONS as TO_ATTENTION
from layerzero.ops.linear.qkv import OPERATIONS as OF_ATTENTION
from layerzero.ops.linear.quantized import FUNCTIONS as WITH_QUANTIZED
from layerzero.ops.linear.quantized import OPERATIONS as QUANTIZED
from layerzero.ops.linear.route import FUNCTIONS as PRODUCTS

__all__ = ["EXPORTS", "FUNCTIONS", "OPERATIONS", "PackedWeight"]

OPERATIONS = (LINEAR, *FUSED, *OF_ATTENTION, *QUANTIZED)

FUNCTIONS = (*PRODUCTS, *TO_ATTENTION, *WITH_QUANTIZED)

EXPORTS = ("PackedWeight",)
