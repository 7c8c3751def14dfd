"""Mixtures of experts: which experts a token goes to, and what they make of it."""

from __future__ import annotations

from layerzero.ops.moe.experts import EXPERTS
from layerzero.ops.moe.quantized import MOE_EXPERTS, QUANTIZED
from layerzero.ops.moe.routing import MOE_ROUTE, ROUTE

__all__ = ["FUNCTIONS", "OPERATIONS"]

FUNCTIONS = (MOE_ROUTE, MOE_EXPERTS)
OPERATIONS = (ROUTE, EXPERTS, QUANTIZED)
