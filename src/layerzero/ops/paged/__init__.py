"""Attention over a paged cache, and writing into one."""

from __future__ import annotations

from layerzero.ops.paged import declare, mixed, quantized
from layerzero.ops.paged.cache import PagedCache
from layerzero.ops.paged.declare import DECODE_PAGED
from layerzero.ops.paged.route import FUNCTIONS
from layerzero.ops.paged.step import StepMetadata

__all__ = ["ALIASES", "EXPORTS", "FUNCTIONS", "OPERATIONS", "PagedCache", "StepMetadata"]

EXPORTS = ("PagedCache", "StepMetadata")

OPERATIONS = (*declare.OPERATIONS, *mixed.OPERATIONS, *quantized.OPERATIONS)

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "attention.paged": (DECODE_PAGED, {}),
    "attention.pod.paged": (mixed.MIXED_PAGED, {}),
}
"""The specification's flat name, and that of prefill on decode, which is a kernel of mixed batches."""
