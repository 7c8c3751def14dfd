"""Losses of classes: cross-entropy of logits, and of a linear layer whose logits nothing holds as a whole."""

from __future__ import annotations

from layerzero.ops.loss.declare import FUNCTIONS, OPERATIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
