"""``lz.defragment``: give back what torch's allocator keeps in pieces, while a device is idle.

Without it the allocator does so amid a request, once no piece is large enough: that waits for the device, 10 to 100 ms.
Nothing in this package calls it: only a server knows when no request waits.
"""

from __future__ import annotations

import math

import msgspec
import torch

from layerzero.core.device import Device
from layerzero.core.system.free_memory import FREE, mib
from layerzero.engine.config import CONFIGURATION


class Defragmented(msgspec.Struct, frozen=True):
    """What :func:`defragment` did.

    Attributes:
        device: as torch names it.
        given_back_bytes: what other requests can get at once now.
        before, after: the fragmentation, 0 to 1.
        left: why nothing was done; empty where something was.
    """

    device: str
    given_back_bytes: int = 0
    before: float = 0.0
    after: float = 0.0
    left: str = ""

    def __str__(self) -> str:
        if self.left:
            return f"{self.device}: nothing is done: {self.left}"
        done = f"{self.device}: {mib(self.given_back_bytes)} given back"
        return f"{done}, fragmentation {self.before:.2f} before and {self.after:.2f} after"


def defragment(device: str | torch.device | None = None) -> Defragmented:
    """Give back what torch's allocator keeps and does not use, if it is fragmented and the device is idle.

    Call it where a server waits for requests; it takes 10 to 100 ms, and is never called by this package. Nothing is
    done below the setting ``memory.fragmentation``, while a CUDA graph is captured, or while the device works: on the
    current stream, the default one, or with memory that another stream still reads.

    Args:
        device: which; the current CUDA device if there is one in use, else the CPU, whose memory lies anywhere.
    Returns: what was done, or why nothing was.
    Raises: ValueError for a CUDA device that does not exist.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    found = Device.detect(device or ("cuda" if used else "cpu"))
    name = f"{found.torch_type}:{found.index}"
    if found.torch_type != "cuda" or not used:
        return Defragmented(name, left="torch keeps no memory of it")
    with torch.cuda.device(found.index):
        if busy := _busy(found.index):
            return Defragmented(name, left=busy)
        before = FREE.renewed(found)
        most = CONFIGURATION.policy["memory.fragmentation"]
        if math.isinf(before.free) or before.fragmentation <= most:
            told = f"fragmentation is {before.fragmentation:.2f}, memory.fragmentation allows {most:g}"
            return Defragmented(name, before=before.fragmentation, after=before.fragmentation, left=told)
        kept = torch.cuda.memory_reserved(found.index)
        torch.cuda.empty_cache()
        after = FREE.renewed(found)
        given_back = kept - torch.cuda.memory_reserved(found.index)
        return Defragmented(name, given_back, before.fragmentation, after.fragmentation)


def _busy(index: int) -> str:
    """What the device does now; empty if nothing is known."""
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if not torch.cuda.current_stream(index).query() or not torch.cuda.default_stream(index).query():
        return "a stream has work that is not done"
    told = torch.cuda.memory_stats(index)
    if told.get("active_bytes.all.current", 0) > told.get("allocated_bytes.all.current", 0):
        return "another stream still reads freed memory"
    return ""
