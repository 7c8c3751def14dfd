"""What measuring a call needs of a CPU's memory: Linux gives out more than there is, and kills who then uses it.

A GPU's allocator says so instead, and its error is caught where it is raised.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layerzero.core.facts import Facts

SHARE = 0.5
"""Of what is available, so much may be used: the machine belongs to others, too."""

WIDE_BYTES = 12
"""What an element needs beside its own memory: eight bytes in float64, and half as much where it is drawn or compared.
The peak of a call in float32 was 11.8 and 12.4 bytes an element (embedding, linear; AMD EPYC, 2026-11-23)."""

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""A container's bound and its use, by versions 2 and 1 of control groups."""

_GROUP_FOLDER = Path("/sys/fs/cgroup")


def available_bytes() -> float:
    """What processes can still get without another one losing it; infinite where the system does not say."""
    return min(_of_machine(), *(_of_group(*names) for names in _GROUPS))


def _of_machine() -> float:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024.0
    except (OSError, KeyError, ValueError):  # another system, or an old one
        return math.inf


def _of_group(bound: str, use: str) -> float:
    try:
        return float(int((_GROUP_FOLDER / bound).read_text()) - int((_GROUP_FOLDER / use).read_text()))
    except (OSError, ValueError):  # no such version, or no bound: "max"
        return math.inf


def needed_bytes(facts: Facts) -> int:
    """What a call's tensors need, as they are and in float64; what its reference makes between them comes on top."""
    sizes = [(math.prod(each.shape), each.dtype.itemsize) for each in facts.tensors.values()]
    return sum(count * (own + WIDE_BYTES) for count, own in sizes)


def too_large(facts: Facts) -> str:
    """Why a call is not made at all; empty if it may be."""
    if facts.device.torch_type != "cpu":
        return ""
    needed, free = needed_bytes(facts), available_bytes()
    if needed <= SHARE * free:
        return ""
    wanted = f"it needs about {needed / 1e9:.1f} GB with its values in float64"
    return f"too little memory: {wanted}, and of {free / 1e9:.1f} free ones {SHARE:.0%} may be used"


@contextmanager
def bounded(facts: Facts) -> Iterator[None]:
    """Let what runs here fail to allocate where it would take more than its share of a CPU's memory.

    It bounds the address space of the whole process meanwhile; what asks for less than there is, is not touched.
    """
    free = available_bytes() if facts.device.torch_type == "cpu" else math.inf
    if free == math.inf or sys.platform != "linux":
        yield
        return
    import resource

    pages = int(_STATM.read_text().split()[0])
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + int(SHARE * free)
    own = wanted if before == resource.RLIM_INFINITY else min(wanted, before)
    resource.setrlimit(resource.RLIMIT_AS, (own, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
