"""Attention on contiguous keys and values."""

from __future__ import annotations

from layerzero.ops.attention.declare import OPERATIONS, PREFILL
from layerzero.ops.attention.limits import KINDS as LIMITS
from layerzero.ops.attention.route import FUNCTIONS

__all__ = ["ALIASES", "FUNCTIONS", "LIMITS", "OPERATIONS"]

ALIASES = {"attention.causal": (PREFILL, {"causal": True}), "attention.full": (PREFILL, {"causal": False})}
"""The specification's flat names."""
