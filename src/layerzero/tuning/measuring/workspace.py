"""How much memory a kernel takes besides its results, as torch's allocator counts it while a call is tuned.

A GPU's alone: torch's allocator of a CPU has no counter, and what a process holds at most tells of its whole life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.engine import headroom
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE


class Counters(Protocol):
    """The counters of ``torch.cuda``."""

    def synchronize(self, device: Any = None) -> None:
        """Wait for the device."""

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Count the most that is allocated from now on."""

    def max_memory_allocated(self, device: Any = None) -> int:
        """The most since then."""

    def memory_allocated(self, device: Any = None) -> int:
        """What is allocated now."""


def taken_bytes(run: Callable[[], object], device: torch.device, counters: Counters = torch.cuda) -> int:
    """Bytes that a run had at its peak and gave back: neither its results nor what it keeps for later calls."""
    counters.synchronize(device)
    counters.reset_peak_memory_stats(device)
    result = run()  # held until its memory is counted
    counters.synchronize(device)
    taken = counters.max_memory_allocated(device) - counters.memory_allocated(device)
    del result
    return max(0, taken)


def note(kernel: Kernel, facts: Facts, run: Callable[[], object], counters: Counters = torch.cuda) -> None:
    """Measure a kernel that declares nothing, and remember it for its class; it ran before, and is warm."""
    if kernel.workspace_bytes is not None or facts.device.torch_type != "cuda":
        return
    taken = taken_bytes(run, torch.device("cuda", facts.device.index), counters)
    ENGINE.ledger.record_workspace(kernel, facts, taken)
    if not headroom.fits(kernel, facts, current_policy()):
        ENGINE.bump()
