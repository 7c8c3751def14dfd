"""``lz.batched_linear`` and ``lz.grouped_linear``: their signatures, the checks of a call, and random calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.draw import Draw
from layerzero.ops.experts.declare import BATCHED, GROUPED
from layerzero.ops.linear.declare import deviation
from layerzero.ops.linear.route import FEATURES


def batched_linear(input: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply each input of a stack with its own weight: ``input[g] @ weight[g]^T + bias[g]``.

    Shapes: input (G, M, K), weight (G, N, K), bias (G, N) → (G, M, N)
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def grouped_linear(
    input: Tensor,
    weight: Tensor,
    group_ends: Tensor,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply rows that are sorted by group with their group's weight: the experts of a mixture, each with its tokens.

    Shapes: input (T, K), weight (G, N, K), group_ends (G,), bias (G, N) → (T, N). Group g has the rows from the end of
        the group before it to group_ends[g]: ``torch.cumsum(counts, 0, dtype=torch.int32)``. A group may be empty.
    Dtype: floating, the same for all, group_ends int32; sums are in float32; returns input.dtype.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and, where values can be read (debug mode),
        for ends that fall or whose last is not T. Without, rows of no group hold anything.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _to(name: str, operation: Operation, varies: str) -> Any:
    def route(arguments: dict[str, Any], default_layout: str | None) -> Routed:  # the protocol's
        check_dense(name, arguments)
        problems = operation.schema.validate(**arguments)
        if problems:
            raise InvalidCallError(name, problems)
        return Routed(operation, arguments, varies=(varies,))

    return route


def _stack(draw: Draw, dtype: torch.dtype, groups: int, inputs: int) -> dict[str, Tensor]:
    outputs = draw.of(FEATURES)
    made = draw.normal((groups, outputs, inputs), torch.float32).mul_(deviation(inputs)).to(dtype)
    arguments = {"weight": draw.laid_out(made, expand=False)}
    if draw.chance(0.4):
        arguments["bias"] = draw.laid_out(draw.normal((groups, outputs), dtype))
    return arguments


def draw_batched(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a stack of inputs, and of weights."""
    groups, rows, inputs = draw.of((1, 2, 3, 5)), draw.of((0, 1, 2, 5, 17), (1, 6, 3, 3, 3)), draw.of(FEATURES)
    arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal((groups, rows, inputs), dtype))}
    arguments |= _stack(draw, dtype, groups, inputs)
    draw.poison(arguments, ("input",))
    return arguments


def draw_grouped(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw rows, weights, and where each group ends; some are empty."""
    groups, rows, inputs = (
        draw.of((1, 2, 3, 5, 8)),
        draw.of((0, 1, 2, 5, 17, 40), (1, 3, 3, 3, 3, 3)),
        draw.of(FEATURES),
    )
    arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal((rows, inputs), dtype))}
    arguments |= _stack(draw, dtype, groups, inputs)
    group_ends = draw.integers((groups,), rows, torch.int32).sort().values
    group_ends[-1] = rows
    arguments["group_ends"] = group_ends
    draw.poison(arguments, ("input",))
    return arguments


FUNCTIONS = (
    Function(
        "batched_linear",
        batched_linear,
        _to("batched_linear", BATCHED, "rows_each"),
        (BATCHED,),
        draw=draw_batched,
        weight=1,
        state=frozenset({"matmul"}),
    ),
    Function(
        "grouped_linear",
        grouped_linear,
        _to("grouped_linear", GROUPED, "rows"),
        (GROUPED,),
        draw=draw_grouped,
        weight=1,
        state=frozenset({"matmul"}),
    ),
)
