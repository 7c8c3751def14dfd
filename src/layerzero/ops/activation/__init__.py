"""Activations, of one tensor and of a gate beside what it lets through."""

from __future__ import annotations

from layerzero.ops.activation.declare import OPERATIONS
from layerzero.ops.activation.route import FUNCTIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
