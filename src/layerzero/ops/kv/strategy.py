"""How a cache's memory is laid out, chosen by facts: the four strategies and why each is taken or refused.

Also what goes wrong with a cache that is no mistake in one argument: no room, a closed cache, two steps at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError, LayerZeroError
from layerzero.core.reasons import Reason, ReasonCode

GONE = "wanted a cache that is there, got one that was closed; make another"
"""What a closed cache says, and whatever stands for it."""


class KVCacheError(LayerZeroError):
    """A cache cannot do this; nothing was written and nothing was lost.

    Attributes:
        problem: what was wanted, what came, and the next step.
        code: the reason code where the catalogue has one (KV_CACHE_EXHAUSTED, VIRTUAL_MEMORY_EXHAUSTED).
    """

    def __init__(self, problem: str, code: ReasonCode | None = None) -> None:
        self.problem = problem
        self.code = code
        super().__init__(f"[{code}] KVCache: {problem}" if code is not None else f"KVCache: {problem}")


LEAST_CUDA = 12000
"""CUDA of the driver from which on virtual memory is used, as the driver counts: 12.0."""

MOST_ROWS = 1000
"""Sequences beyond which each having a row of its own address space is not worth it."""


class KVCacheStrategy(StrEnum):
    """Where the tokens of a sequence lie."""

    CONTIGUOUS = "contiguous"
    """One row a sequence, of memory that is there from the beginning."""
    PAGED = "paged"
    """Pages of a few tokens, found through block tables."""
    VIRTUAL = "virtual"
    """One row a sequence, whose memory is mapped as tokens come."""
    UNIFIED = "unified"
    """One row a sequence, of memory that CPU and GPU share."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy and why.

    Attributes:
        strategy: what was chosen.
        because: the fact that decided, in words.
        refused: by the other strategies that cannot be had here, why.
    """

    strategy: KVCacheStrategy
    because: str
    refused: dict[KVCacheStrategy, Reason] = field(default_factory=dict)


def kv_cache_strategy(
    device: torch.device | str = "cuda",
    *,
    strategy: KVCacheStrategy | str | None = None,
    max_sequences: int | None = None,
    captured: bool = False,
    paged: bool = False,
    layout: str = "NHD",
    cuda: int | None = None,
) -> StrategyChoice:
    """Choose how a cache's memory is laid out.

    Args:
        device: where the cache lies.
        strategy: the one to take, whatever the facts say; None to choose.
        max_sequences: how many sequences there are at once, where each would have a row.
        captured: whether steps are replayed as CUDA graphs, so that addresses must stay.
        paged: whether a number of pages was given.
        layout: of the cache: rows that grow have their tokens first.
        cuda: CUDA of the driver, 12040 for 12.4; the one that is here if None.
    Raises: KVCacheError for a strategy that cannot be had, with DRIVER_VERSION_UNSUPPORTED or KV_STRATEGY_UNSUPPORTED;
        InvalidCallError for what is no strategy.
    Source: vAttention, arXiv:2405.04437, for growing rows; PagedAttention, arXiv:2309.06180, for pages.
    """
    where = torch.device(device)
    refused = _refused(where, layout, cuda)
    if strategy is not None:
        try:
            wanted = KVCacheStrategy(strategy)
        except ValueError:
            problem = f"strategy: wanted {', '.join(KVCacheStrategy)} or None, got {told(strategy)}"
            raise InvalidCallError("kv_cache_strategy", [problem]) from None
        if wanted in refused:
            reason = refused[wanted]
            raise KVCacheError(f"strategy={wanted.value!r}: {reason.message}", reason.code)
        return StrategyChoice(wanted, "it was requested", refused)
    chosen, because = _by_facts(where, max_sequences, captured, paged, KVCacheStrategy.VIRTUAL in refused)
    return StrategyChoice(chosen, because, refused)


def _by_facts(
    device: torch.device, max_sequences: int | None, captured: bool, paged: bool, no_virtual: bool
) -> tuple[KVCacheStrategy, str]:
    if paged:
        return KVCacheStrategy.PAGED, "a number of pages was given"
    if device.type == "cpu":
        return KVCacheStrategy.CONTIGUOUS, "the operating system maps a CPU's memory on demand as it is"
    if max_sequences is not None and max_sequences > MOST_ROWS and not captured:
        return KVCacheStrategy.PAGED, f"{max_sequences} sequences are more than {MOST_ROWS}"
    if no_virtual:
        return KVCacheStrategy.CONTIGUOUS, "virtual memory cannot be had here"
    graphs = "captured steps want addresses that stay, " if captured else ""
    return KVCacheStrategy.VIRTUAL, f"{graphs}contiguous kernels serve rows that grow"


def _refused(device: torch.device, layout: str, cuda: int | None) -> dict[KVCacheStrategy, Reason]:
    found: dict[KVCacheStrategy, Reason] = {}
    unsupported = ReasonCode.KV_STRATEGY_UNSUPPORTED
    hint = "Take 'contiguous' or 'paged'"
    if device.type not in ("cpu", "cuda"):
        reason = Reason(unsupported, "the device of such a cache", "cpu or cuda", device.type, hint)
        found |= dict.fromkeys((KVCacheStrategy.VIRTUAL, KVCacheStrategy.UNIFIED), reason)
    if layout != "NHD":
        reason = Reason(unsupported, "the layout of rows that grow", "NHD", layout, hint)
        found[KVCacheStrategy.VIRTUAL] = reason
    if layout in ("VLLM", "VLLM_CPU"):
        reason = Reason(unsupported, "the layout of rows", "NHD or HND", layout, "Take 'paged'")
        found |= dict.fromkeys((KVCacheStrategy.CONTIGUOUS, KVCacheStrategy.UNIFIED), reason)
    if device.type == "cuda":
        version = _driver_version() if cuda is None else cuda
        if version < LEAST_CUDA:
            got: Any = _told_version(version) if version else "none"
            old = ReasonCode.DRIVER_VERSION_UNSUPPORTED
            reason = Reason(old, "the driver's CUDA", f">= {_told_version(LEAST_CUDA)}", got, hint)
            found |= dict.fromkeys((KVCacheStrategy.VIRTUAL, KVCacheStrategy.UNIFIED), reason)
    return found


def _told_version(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver_version() -> int:
    from layerzero.ops.kv.ranges import driver

    found = driver()
    return 0 if found is None else found.version()
