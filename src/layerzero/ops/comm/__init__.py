"""Sums, pieces and rows that ranks of a process group exchange."""

from layerzero.ops.comm.declare import FUNCTIONS, OPERATIONS
from layerzero.ops.comm.ranks import Ranks, tree_sum

EXPORTS = ("Ranks", "tree_sum")

__all__ = ["FUNCTIONS", "OPERATIONS", "Ranks", "tree_sum"]
