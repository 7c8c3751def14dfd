"""The public functions of elementwise operations: signatures, the checks of a call, routes, random calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.core.dtypes import FLOATING
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.checks import check_dense, write_problems
from layerzero.ops.draw import Draw
from layerzero.ops.elementwise import declare

_WIDTHS = (1, 2, 3, 7, 8, 16, 33, 64, 100, 257, 1536)


def add_bias(input: Tensor, bias: Tensor) -> Tensor:
    """Add a number for each feature to every row.

    Shapes: input (*, D), bias (D,) → (*, D)
    Dtype: floating, the same for both; computes in float32 or wider; returns input.dtype.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def add_residual_(
    residual: Tensor,
    input: Tensor,
    scale: float | Tensor | None = None,
) -> None:
    """Add the input to the residual in place, scaled where a scale is given: ``residual += scale * input``.

    Shapes: residual and input (*, D), the same; scale (*) where it is a tensor
    Dtype: floating, the same for both, scale float32; computes in float32 or wider, rounds once.
    Args:
        scale: a number from -1e6 to 1e6, or a tensor with one for each row, as a mixture of experts has them.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a residual that needs gradients, that
        overlaps itself in memory, or that shares memory with what is added.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def softmax(input: Tensor, *, temperature: float | None = None) -> Tensor:
    """Bring the exponentials of a row to a sum of 1: ``exp(x / t) / sum(exp(x / t))`` over the last axis.

    Shapes: input (*, D) → (*, D)
    Dtype: floating; computes in float32 or wider; returns input.dtype.
    Args:
        temperature: what is divided by, 1e-6 to 1e6; 1 if None.
    Raises: InvalidCallError for other dtypes. A row of -inf alone, or with NaN or +inf in it, gives NaN.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def cast(input: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Write the same numbers in another floating dtype, rounded to the nearest, into memory of its own.

    Shapes: input (*, D) → (*, D), contiguous
    Dtype: floating; returns out_dtype.
    Raises: InvalidCallError for dtypes that are not floating.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(name: str, operation: Operation) -> Callable[..., Routed]:
    def route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
        check_dense(name, arguments)
        problems = operation.schema.validate(**arguments)
        wanted = arguments.get("out_dtype")
        if isinstance(wanted, torch.dtype) and wanted not in FLOATING:
            problems.append(f"out_dtype: wanted a floating dtype, got {str(wanted).removeprefix('torch.')}")
        if not problems and arguments["input"].ndim == 0:
            problems.append("input: wanted at least one axis, got none")
        if problems:
            raise InvalidCallError(name, problems)
        return Routed(operation, arguments, varies=("...",))

    return route


def _route_residual(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "add_residual_"
    check_dense(name, arguments)
    scaled = arguments["scale"] is not None or arguments["scale_by_row"] is not None
    operation = declare.SCALED_ADD if scaled else declare.ADD
    given = {each: arguments[each] for each in operation.schema.arguments}
    problems = operation.schema.validate(**given)
    if arguments["scale"] is not None and arguments["scale_by_row"] is not None:
        problems.append("scale: wanted a number or a tensor with one for each row, got both")
    if not problems:
        shape, by_row = tuple(arguments["residual"].shape), arguments["scale_by_row"]
        if tuple(arguments["input"].shape) != shape:
            problems.append(f"input: wanted shape {shape} like residual, got {tuple(arguments['input'].shape)}")
        if by_row is not None and tuple(by_row.shape) != shape[:-1]:
            wanted = f"shape {shape[:-1]}, a number for each row"
            problems.append(f"scale: wanted {wanted}, got {tuple(by_row.shape)}")
        problems += write_problems(arguments, ("residual",), ("input", "scale_by_row"))
    if problems:
        raise InvalidCallError(name, problems)
    return Routed(operation, given, varies=("...",))


def _shape(draw: Draw) -> tuple[int, ...]:
    rows = tuple(draw.of((1, 2, 3, 5, 17)) for _ in range(draw.of((0, 1, 2, 3), (1, 6, 3, 1))))
    return (*((0, *rows) if draw.chance(0.02) else rows), draw.of(_WIDTHS))


def _drawn(*more: str) -> Callable[[Draw, torch.dtype], dict[str, Any]]:
    def drawn(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
        shape = _shape(draw)
        arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal(shape, dtype))}
        draw.poison(arguments, ("input",))
        if "bias" in more:
            arguments["bias"] = draw.laid_out(draw.normal(shape[-1:], dtype))
        if "temperature" in more and draw.chance(0.5):
            arguments["temperature"] = draw.of((0.5, 1.5, 2))
        if "out_dtype" in more:
            arguments["out_dtype"] = draw.of((torch.float32, torch.bfloat16, torch.float16, torch.float64))
        if "residual" in more:
            arguments["residual"] = draw.laid_out(draw.normal(shape, dtype), expand=False)
            form = draw.of(("none", "one", "rows"))
            if form == "one":
                arguments["scale"] = draw.of((0.5, -1.25, 2))
            elif form == "rows":
                arguments["scale_by_row"] = draw.laid_out(draw.uniform(shape[:-1], torch.float32))
        return arguments

    return drawn


FUNCTIONS = (
    Function("add_bias", add_bias, _route("add_bias", declare.ADD_BIAS), (declare.ADD_BIAS,), _drawn("bias"), 1),
    Function(
        "add_residual_",
        add_residual_,
        _route_residual,
        (declare.ADD, declare.SCALED_ADD),
        draw=_drawn("residual"),
        weight=1,
        renamed={"row_scale": "scale"},
    ),
    Function("softmax", softmax, _route("softmax", declare.SOFTMAX), (declare.SOFTMAX,), _drawn("temperature"), 1),
    Function("cast", cast, _route("cast", declare.CAST), (declare.CAST,), _drawn("out_dtype"), 1),
)
