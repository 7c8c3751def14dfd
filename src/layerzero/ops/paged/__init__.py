"""Attention over a paged cache, and writing into one."""

from __future__ import annotations

from layerzero.ops.paged import append, declare, mixed, quantized, route, tiles
from layerzero.ops.paged.cache import PagedCache
from layerzero.ops.paged.pages import CacheList
from layerzero.ops.paged.step import StepMetadata

__all__ = ["ALIASES", "EXPORTS", "FUNCTIONS", "OPERATIONS", "CacheList", "PagedCache", "StepMetadata"]

EXPORTS = ("CacheList", "PagedCache", "StepMetadata")

OPERATIONS = (*declare.OPERATIONS, *append.OPERATIONS, *mixed.OPERATIONS, *quantized.OPERATIONS, tiles.ATTENTION)
FUNCTIONS = (*route.FUNCTIONS, *append.FUNCTIONS)

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "attention.paged": (declare.DECODE_PAGED, {}),
    "attention.pod.paged": (mixed.MIXED_PAGED, {}),
}
"""The specification's flat name, and that of prefill on decode, which is a kernel of mixed batches."""
