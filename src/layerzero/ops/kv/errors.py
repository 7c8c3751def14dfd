"""What goes wrong with a cache that is no mistake in one argument: no room, a freed cache, two steps at once."""

from __future__ import annotations

from layerzero.core.errors import LayerZeroError
from layerzero.core.reasons import ReasonCode

GONE = "wanted a cache that is there, got one that was closed; make another"
"""What a closed cache says, and whatever stands for it."""


class KVCacheError(LayerZeroError):
    """A cache cannot do what was asked; nothing was written and nothing was lost.

    Attributes:
        problem: what was wanted, what came, and the next step.
        code: the reason code where the catalogue has one (KV_CACHE_EXHAUSTED, VIRTUAL_MEMORY_EXHAUSTED).
    """

    def __init__(self, problem: str, code: ReasonCode | None = None) -> None:
        self.problem = problem
        self.code = code
        super().__init__(f"[{code}] KVCache: {problem}" if code is not None else f"KVCache: {problem}")
