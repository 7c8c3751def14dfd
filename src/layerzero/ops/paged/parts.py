"""Pieces of an attention over pages that is too large to be computed in float64 as a whole: two of its sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.core.facts import Facts
from layerzero.core.operation import Part


def scratch(sizes: Mapping[str, int]) -> int:
    """The larger of the scores and of the keys for every head."""
    keys = sizes["max_blocks"] * sizes["page_size"]
    return sizes["batch"] * sizes["heads"] * keys * max(sizes["seq_q"], sizes["head_dim"])


def parts(arguments: Mapping[str, Any], facts: Facts) -> Sequence[Part]:
    """The first and the last sequence of a batch."""
    by_batch = [each.name for each in facts.operation.schema.inputs if each.shape_vars[:1] == ("batch",)]
    return [_sequence(arguments, by_batch, row) for row in dict.fromkeys((0, facts.size("batch") - 1))]


def _sequence(arguments: Mapping[str, Any], by_batch: Sequence[str], row: int) -> Part:
    rows = slice(row, row + 1)
    cut = {name: arguments[name][rows] for name in by_batch}
    return Part(f"sequence {row}", {**arguments, **cut, "step": None}, lambda tensor: tensor[rows])
