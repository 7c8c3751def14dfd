"""Mixtures of experts: which experts a token goes to, and what they make of it."""

from __future__ import annotations

from layerzero.ops.moe import route
from layerzero.ops.moe.routing import ROUTE

__all__ = ["FUNCTIONS", "OPERATIONS"]

FUNCTIONS = (route.MOE_ROUTE,)
OPERATIONS = (ROUTE,)
