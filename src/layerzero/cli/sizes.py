"""Flags that several measuring commands share: shapes as text, and torch's threads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import torch

from layerzero.tuning.measuring.jobs import Shape

_SIZES = re.compile(r"\d+(?:x\d+)*")


def shapes_of(texts: Sequence[str] | None) -> list[Shape] | None:
    """Read ``1x8x4x16:1x9x2x16,2x8x4x16``. Raises: ValueError with wanted and got."""
    if not texts:
        return None
    found: list[Shape] = []
    for text in (part for each in texts for part in each.split(",")):
        several = text.split(":")
        if len(several) > 2 or not all(_SIZES.fullmatch(each) for each in several):
            raise ValueError(f"--shapes: wanted sizes like 1x2048x32x128 or 1x1x32x128:1x512x8x128, got {text!r}")
        sizes = [tuple(int(size) for size in each.split("x")) for each in several]
        found.append(sizes[0] if len(sizes) == 1 else sizes)
    return found


@contextlib.contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Let torch have so many threads inside."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
