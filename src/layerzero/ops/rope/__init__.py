"""Positions: rotating queries and keys, with a norm and a split before it, the tables of angles that rotations read."""

from layerzero.ops.rope import declare, normed, route, split
from layerzero.ops.rope.normed import QK_NORM_ROPE, ROPE_ONE
from layerzero.ops.rope.split import SPLIT_QKV_NORM_ROPE
from layerzero.ops.rope.table import rope_frequencies, rope_table

__all__ = ["EXPORTS", "FUNCTIONS", "OPERATIONS", "rope_frequencies", "rope_table"]

OPERATIONS = (*declare.OPERATIONS, ROPE_ONE, QK_NORM_ROPE, SPLIT_QKV_NORM_ROPE)

FUNCTIONS = (*route.FUNCTIONS, *normed.FUNCTIONS, *split.FUNCTIONS)

EXPORTS = ("rope_frequencies", "rope_table")
