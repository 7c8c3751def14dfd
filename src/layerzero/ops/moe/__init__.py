"""Mixtures of experts: which experts a token goes to, and what they make of it."""

from layerzero.ops.moe.experts import EXPERTS
from layerzero.ops.moe.quantized import MOE_EXPERTS, QUANTIZED, ROUNDED
from layerzero.ops.moe.routing import MOE_ROUTE, ROUTE, moe_experts_of_ranks

EXPORTS = ("moe_experts_of_ranks",)

__all__ = ["FUNCTIONS", "OPERATIONS", "moe_experts_of_ranks"]

FUNCTIONS = (MOE_ROUTE, MOE_EXPERTS)
OPERATIONS = (ROUTE, EXPERTS, QUANTIZED, ROUNDED)
