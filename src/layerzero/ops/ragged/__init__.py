"""Attention of sequences that lie one after the other, without padding between them."""

from layerzero.ops.ragged.declare import FUNCTIONS, OPERATIONS
from layerzero.ops.ragged.starts import RaggedMetadata

__all__ = ["EXPORTS", "FUNCTIONS", "OPERATIONS", "RaggedMetadata"]

EXPORTS = ("RaggedMetadata",)
