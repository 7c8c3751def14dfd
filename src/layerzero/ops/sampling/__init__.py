"""Draws of token ids, from logits or probabilities, of all places or of the likeliest; and the likeliest itself."""

from __future__ import annotations

from layerzero.ops.sampling.declare import OPERATIONS
from layerzero.ops.sampling.route import FUNCTIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
