"""Flags that several measuring commands share: shapes and parameters as text, seconds, and torch's threads."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence

import torch

from layerzero.cli.question import pair_of, value_of
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measuring.jobs import Shape, operations_named
from layerzero.tuning.measuring.timing import Deadline

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


def deadline_of(budget_s: float) -> Deadline:
    """The end of a command that begins now. Raises: ValueError with wanted, got and the next step."""
    if not budget_s > 0:  # nor is what is no number
        raise ValueError(
            f"--budget-s: wanted more than 0 seconds, got {budget_s:g}; leave it out for the default, inf has no end"
        )
    return Deadline(None if budget_s == math.inf else left_of(budget_s))


def left_of(budget_s: float) -> float:
    """Seconds of a command's budget that are left: what its process has worked so far counts, up to a half.

    That is importing torch and kernel libraries: on a slow host 8 s, so that `tune --budget-s 90` took 104 (an H200's,
    2026-11-24).
    """
    return max(budget_s - time.process_time(), budget_s / 2)


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


def params_of(texts: Sequence[str], operation: str) -> dict[str, object]:
    """What ``--param`` says, of the types that the operations declare. Raises: ValueError with wanted and got."""
    _, names = operations_named(operation)
    schemas = [REGISTRY.operation(name).schema for name in names]
    known = {name: schema.param(name) for schema in schemas for name in (*schema.chosen, *schema.scalars)}
    found = {}
    for name, text in (pair_of(text, "--param", "name=value") for text in texts):
        if name not in known:
            raise ValueError(f"--param: wanted one of {', '.join(sorted(known)) or 'no parameters'}, got {name!r}")
        found[name] = value_of(known[name].types, text, f"--param {name}")
        problem = known[name].problem(found[name])
        if problem:
            raise ValueError(f"--param {problem}")
    return found
