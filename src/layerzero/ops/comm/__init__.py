"""Sums, pieces and rows that ranks of a process group exchange."""

from layerzero.ops.comm.declare import FUNCTIONS, OPERATIONS
from layerzero.ops.comm.formulas import tree_sum
from layerzero.ops.comm.ranks import Ranks

EXPORTS = ("Ranks", "tree_sum")

__all__ = ["FUNCTIONS", "OPERATIONS", "Ranks", "tree_sum"]
