"""Activations, of one tensor and of a gate with what it lets through."""

from layerzero.ops.activation.declare import FUNCTIONS, OPERATIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
