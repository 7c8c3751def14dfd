"""A cache of keys and values that knows itself, and the strategies for its memory."""

from __future__ import annotations

from layerzero.ops.kv.cache import KVCache
from layerzero.ops.kv.declare import APPEND, FUNCTIONS, OPERATIONS
from layerzero.ops.kv.form import KVCacheError, KVCacheStrategy, StrategyChoice, kv_cache_strategy
from layerzero.ops.kv.step import CacheStep

__all__ = [
    "ALIASES",
    "EXPORTS",
    "FUNCTIONS",
    "OPERATIONS",
    "CacheStep",
    "KVCache",
    "KVCacheError",
    "KVCacheStrategy",
    "StrategyChoice",
    "kv_cache_strategy",
]

EXPORTS = ("CacheStep", "KVCache", "KVCacheError", "KVCacheStrategy", "StrategyChoice", "kv_cache_strategy")
ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {"kv.append": ((APPEND.name,), {})}
"""The specification's name: the caches of a batch are rows of one tensor."""
