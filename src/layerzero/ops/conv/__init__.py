"""Convolutions over sequences and pictures: conv.conv1d, conv.conv2d."""

from __future__ import annotations

from layerzero.ops.conv.declare import FUNCTIONS, OPERATIONS

__all__ = ["FUNCTIONS", "OPERATIONS"]
