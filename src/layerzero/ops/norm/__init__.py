"""Normalisation over the last axes, alone and behind a residual addition."""

from __future__ import annotations

from layerzero.ops.norm import declare, in_place

__all__ = ["FUNCTIONS", "OPERATIONS"]

OPERATIONS = (*declare.OPERATIONS, in_place.ADD_RMS_INPLACE)

FUNCTIONS = (*declare.FUNCTIONS, in_place.ADD_RMS_NORM_IN_PLACE)
