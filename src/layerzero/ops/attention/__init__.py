"""Attention on contiguous keys and values."""

from __future__ import annotations

from layerzero.ops.attention.declare import DECODE, OPERATIONS, PREFILL
from layerzero.ops.attention.layout import DROP_IN
from layerzero.ops.attention.limits import KINDS as LIMITS
from layerzero.ops.attention.route import FUNCTIONS

__all__ = ["ALIASES", "DROP_INS", "FUNCTIONS", "LIMITS", "OPERATIONS"]

DROP_INS = (DROP_IN,)

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "attention.causal": (PREFILL, {"causal": True}),
    "attention.full": (PREFILL, {"causal": False}),
    "attention.cross.prefill": (PREFILL, {"causal": False}),
    "attention.cross.decode": (DECODE, {}),
}
"""The specification's flat names. Cross attention is attention without a causal mask; ``kv_lens`` tells padded keys."""
