"""What measuring a call needs of a CPU's memory: Linux gives out more than there is, and kills who then uses it.

A GPU's allocator says so instead, and its error is caught where it is raised.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

from layerzero.core import address_space
from layerzero.core.facts import Facts
from layerzero.core.free_memory import available_bytes

SHARE = 0.5
"""Of what is available, so much may be used: the machine belongs to others, too."""

WIDE_BYTES = 12
"""What an element needs beside its own memory: eight bytes in float64, and half as much where it is drawn or compared.
The peak of a call in float32 was 11.8 and 12.4 bytes an element (embedding, linear; AMD EPYC, 2026-11-23)."""


def needed_bytes(facts: Facts) -> int:
    """What its tensors need, as they are and in float64, and the scores of a reference that is not cut in parts."""
    operation = facts.operation
    whole = operation.scratch(facts.sizes()) if operation.scratch is not None and operation.parts is None else 0
    sizes = [(math.prod(each.shape), each.dtype.itemsize) for each in facts.tensors.values()]
    return sum(count * (own + WIDE_BYTES) for count, own in sizes) + 8 * whole


def too_large(facts: Facts) -> str:
    """Why a call is not made at all; empty if it may be."""
    if facts.device.torch_type != "cpu":
        return ""
    needed, free = needed_bytes(facts), available_bytes()
    if needed <= SHARE * free:
        return ""
    wanted = f"it needs about {needed / 1e9:.1f} GB with its values in float64"
    return f"too little memory: {wanted}, and of {free / 1e9:.1f} free ones {SHARE:.0%} may be used"


def bounded(facts: Facts) -> AbstractContextManager[None]:
    """Let what runs here fail to allocate where it would take more than its share of a CPU's memory."""
    return address_space.bounded(SHARE * available_bytes() if facts.device.torch_type == "cpu" else math.inf)
