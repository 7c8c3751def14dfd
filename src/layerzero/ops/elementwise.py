"""Operations on every element, and softmax of rows.

elementwise.add_bias     a number for each feature added to every row
elementwise.add          one tensor added to another, in place
elementwise.scaled_add   the same, scaled by one number or by one for each row (what a mixture of experts adds up)
elementwise.softmax      exponentials of a row, brought to a sum of 1
elementwise.cast         the same numbers in another dtype
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import REQUIRED, Axis, Param, Role, TensorSchema
from layerzero.core.judge import Exact
from layerzero.core.operation import Operation
from layerzero.ops import declaration
from layerzero.ops.declaration import NDIM, ROUNDED_TWICE, cases, function, moved, operation, same_shape, tensor, wide
from layerzero.ops.draw import Draw

_NEAR: dict[str, Any] = {"tolerance": ROUNDED_TWICE, "tolerance_reason": "twice the rounding of the output"}


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(wide(tensor.dtype))


def add_bias(input: Tensor, bias: Tensor) -> Tensor:
    """Add a number for each feature to every row.

    Shapes: input (*, D), bias (D,) → (*, D)
    Dtype: floating, the same for both; computes in float32 or wider; returns input.dtype.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    """
    return (_widened(input) + _widened(bias)).to(input.dtype)


def add_residual_(residual: Tensor, input: Tensor, scale: float | Tensor | None = None) -> None:
    """Add the input to the residual in place, scaled where a scale is given: ``residual += scale * input``.

    Shapes: residual and input (*, D), the same; scale (*) where it is a tensor
    Dtype: floating, the same for both, scale float32; computes in float32 or wider, rounds once.
    Args:
        scale: a number from -1e6 to 1e6, or a tensor with one for each row, as a mixture of experts has them.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a residual that needs gradients, that
        is an expanded view, or that shares memory with what is added.
    """
    added = _widened(input)  # torch 2.13 converts into a negated view without negating, where it copies
    if scale is not None:
        added = added * (scale.unsqueeze(-1) if isinstance(scale, Tensor) else scale)
    residual.add_(added)


def _add(residual: Tensor, input: Tensor, scale_by_row: Tensor | None = None, scale: float | None = None) -> None:
    """``add_residual_`` with the schema's arguments: a tensor of factors has a name of its own."""
    add_residual_(residual, input, scale if scale_by_row is None else scale_by_row)


def _torch_add(residual: Tensor, input: Tensor, scale_by_row: Tensor | None = None, scale: float | None = None) -> None:
    if scale_by_row is None:
        residual.add_(input, alpha=1 if scale is None else scale)
    else:
        residual.add_(input * scale_by_row.unsqueeze(-1).to(input.dtype))


def softmax(input: Tensor, *, temperature: float | None = None) -> Tensor:
    """Bring the exponentials of a row to a sum of 1: ``exp(x / t) / sum(exp(x / t))`` over the last axis.

    Shapes: input (*, D) → (*, D)
    Dtype: floating; computes in float32 or wider; returns input.dtype.
    Args:
        temperature: what is divided by, 1e-6 to 1e6; 1 if None.
    Raises: InvalidCallError for other dtypes. A row of -inf alone, or with NaN or +inf in it, gives NaN.
    """
    scores = _widened(input)
    return (scores if temperature is None else scores / temperature).softmax(-1).to(input.dtype)


def _torch_softmax(input: Tensor, *, temperature: float | None = None) -> Tensor:
    """``torch.softmax``; a temperature divides in float32 at least, where half precision would overflow."""
    return input.softmax(-1) if temperature is None else softmax(input, temperature=temperature)


def cast(input: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Write the same numbers in another floating dtype, rounded to the nearest, into memory of its own.

    Shapes: input (*, D) → (*, D), contiguous
    Dtype: floating; returns out_dtype.
    Raises: InvalidCallError for dtypes that are not floating.
    """
    # copied into memory of another dtype, a negated view loses its sign (torch 2.11 and 2.13, CPU)
    return input.resolve_neg().to(out_dtype, copy=True, memory_format=torch.contiguous_format)


def _declared(
    name: str, summary: str, reference: Callable[..., Any], inputs: tuple[str | TensorSchema, ...], **more: Any
) -> Operation:
    params, written = more.get("params", ()), any(isinstance(each, TensorSchema) and each.mutated for each in inputs)
    given = tuple(each.name for each in inputs if isinstance(each, TensorSchema) and not each.required)
    defaults: dict[str, Any] = {"outputs": () if written else ("output: ... features",), **_NEAR}
    return operation(
        f"elementwise.{name}",
        summary,
        reference,
        inputs=inputs,
        axes=(Axis("rows", scales=True, live=True, apart=True, leading=True), Axis("features", scales=True), NDIM),
        cases=cases(
            "rows features",
            {"small": (33, 96), "decode": (1, 4096), "batch_decode": (64, 4096), "prefill": (512, 4096)},
            {} if given else {each.name: each.example for each in params},
            given,
        ),
        fuses=not written,
        **(defaults | more),
    )


_RESIDUAL = tensor("residual: ... features", mutated=True)
_SCALE_BY_ROW = tensor(
    "scale_by_row: ...", frozenset({torch.float32}), required=False, same_dtype=False, given_as="scale"
)

ADD_BIAS = _declared(
    "add_bias",
    "A number for each feature added to every row",
    add_bias,
    ("input: ... features", "bias: features"),
    work=moved("rows features", 2, 1),
    expression=lambda input, bias: input + bias,
)
ADD = _declared(
    "add",
    "One tensor added to another, in place",
    _add,
    (_RESIDUAL, "input: ... features"),
    work=moved("rows features", 3, 1),
    expression=_torch_add,
)
SCALED_ADD = _declared(
    "scaled_add",
    "One tensor scaled and added to another, in place",
    _add,
    (_RESIDUAL, "input: ... features", _SCALE_BY_ROW),
    params=(Param("scale", float, None, Role.PASSED, -1e6, 1e6, example=0.5),),
    work=moved("rows features", 3, 2),
    expression=_torch_add,
)
SOFTMAX = _declared(
    "softmax",
    "Exponentials of a row that add up to 1",
    softmax,
    ("input: ... features",),
    params=(Param("temperature", float, None, Role.PASSED, 1e-6, 1e6, example=0.5),),
    work=moved("rows features", 2, 5),
    expression=_torch_softmax,
)
CAST = _declared(
    "cast",
    "The same numbers in another dtype",
    cast,
    ("input: ... features",),
    outputs=(tensor("output: ... features", dtype_from="out_dtype"),),
    params=(Param("out_dtype", torch.dtype, REQUIRED, example=torch.float16),),
    work=moved("rows features", 2),
    expression=lambda input, out_dtype: input.to(out_dtype, copy=True, memory_format=torch.contiguous_format),
    judge=Exact("rounding to the nearest is one number"),
    tolerance={},
    tolerance_reason="",
)


def _axis_problems(arguments: dict[str, Any]) -> list[str]:
    return [] if arguments["input"].ndim else ["input: wanted at least one axis, got none"]


def _residual_problems(arguments: dict[str, Any]) -> list[str]:
    problems = same_shape("input", "residual")(arguments)
    rows, by_row = tuple(arguments["residual"].shape[:-1]), arguments.get("scale_by_row")
    if by_row is not None and tuple(by_row.shape) != rows:
        problems.append(f"scale: wanted shape {rows}, a number for each row, got {tuple(by_row.shape)}")
    return problems


_WIDTHS = (1, 2, 3, 7, 8, 16, 33, 64, 100, 257, 1536)


def _drawn(more: str, draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    shape = (*draw.leading((0, 1, 2, 3), (1, 6, 3, 1)), draw.of(_WIDTHS))
    arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal(shape, dtype))}
    draw.poison(arguments, ("input",))
    if more == "bias":
        arguments["bias"] = draw.laid_out(draw.normal(shape[-1:], dtype))
    if more == "temperature" and draw.chance(0.5):
        arguments["temperature"] = draw.of((0.5, 1.5, 2))
    if more == "out_dtype":
        arguments["out_dtype"] = draw.of((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    if more == "residual":
        arguments["residual"] = draw.laid_out(draw.normal(shape, dtype), expand=False)
        form = draw.of(("none", "one", "rows"))
        if form == "one":
            arguments["scale"] = draw.of((0.5, -1.25, 2))
        elif form == "rows":
            arguments["scale_by_row"] = draw.laid_out(draw.uniform(shape[:-1], torch.float32))
    return arguments


OPERATIONS = (ADD_BIAS, ADD, SCALED_ADD, SOFTMAX, CAST)
FUNCTIONS = (
    function("add_bias", ADD_BIAS, fits=_axis_problems, draw=functools.partial(_drawn, "bias"), weight=1),
    function(
        "add_residual_",
        *(ADD, SCALED_ADD),
        signature=add_residual_,
        choose=lambda arguments: (
            ADD if arguments["scale"] is None and arguments["scale_by_row"] is None else SCALED_ADD
        ),
        values=lambda arguments: declaration.given_twice(arguments, "scale"),
        fits=_residual_problems,
        draw=functools.partial(_drawn, "residual"),
        weight=1,
        renamed={"row_scale": "scale"},
    ),
    function("softmax", SOFTMAX, fits=_axis_problems, draw=functools.partial(_drawn, "temperature"), weight=1),
    function(
        "cast",
        CAST,
        values=declaration.out_dtype_problems,
        fits=_axis_problems,
        draw=functools.partial(_drawn, "out_dtype"),
        weight=1,
    ),
)
