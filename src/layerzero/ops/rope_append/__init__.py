"""Rotating queries and keys and writing keys and values into a cache, in one call; of a joined product as well."""

from layerzero.ops.rope_append import split
from layerzero.ops.rope_append.declare import ROPE_APPEND, ROPE_APPEND_PAGED, ROPE_APPEND_QUANTIZED
from layerzero.ops.rope_append.route import ROPE_APPEND_FUNCTION
from layerzero.ops.rope_append.split import SPLIT_FUNCTION

OPERATIONS = (ROPE_APPEND, ROPE_APPEND_PAGED, ROPE_APPEND_QUANTIZED, *split.OPERATIONS)
FUNCTIONS = (ROPE_APPEND_FUNCTION, SPLIT_FUNCTION)

__all__ = ["FUNCTIONS", "OPERATIONS"]
