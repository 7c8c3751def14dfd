"""Pieces of a product that is too large to be computed in float64 as a whole: some rows, some outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from layerzero.core.facts import Facts
from layerzero.core.operation import Part

ROWS, OUTPUTS = 32, 256


def linear_scratch(sizes: Mapping[str, int]) -> int:
    """Input, weight and output, all of which the reference widens."""
    rows, inputs, outputs = sizes["rows"], sizes["in_features"], sizes["out_features"]
    return rows * inputs + inputs * outputs + rows * outputs


def linear_parts(arguments: Mapping[str, Any], facts: Facts) -> Sequence[Part]:
    """The first rows and outputs, and the last."""
    rows, outputs = facts.size("rows"), facts.size("out_features")
    found = []
    for row, output in ((0, 0), (max(rows - ROWS, 0), max(outputs - OUTPUTS, 0))):
        of_rows, of_outputs = slice(row, row + ROWS), slice(output, output + OUTPUTS)
        bias = arguments.get("bias")
        cut = {
            "input": arguments["input"].flatten(0, -2)[of_rows] if facts["input_ndim"] != 1 else arguments["input"],
            "weight": arguments["weight"][of_outputs],
            "bias": None if bias is None else bias[of_outputs],
            "packed": None,
        }
        text = f"rows from {row}, outputs from {output}"
        found.append(Part(text, {**arguments, **cut}, _place(of_rows, of_outputs)))
    return found


def _place(rows: slice, outputs: slice) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[outputs] if tensor.ndim == 1 else tensor.flatten(0, -2)[rows, outputs]
