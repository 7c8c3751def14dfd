"""Operations on every element, and softmax of rows.

elementwise.add_bias     a number for each feature added to every row
elementwise.add          one tensor added to another, in place
elementwise.scaled_add   the same, scaled by one number or by one for each row (what a mixture of experts adds up)
elementwise.softmax      exponentials of a row, brought to a sum of 1
elementwise.cast         the same numbers in another dtype
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import REQUIRED, Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.judge import Exact
from layerzero.core.operation import Case, Operation, Tolerance, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.elementwise import stock

TOLERANCE = {
    torch.float64: Tolerance(1e-5, 1e-5),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-2, 1e-2),
}
TOLERANCE_REASON = "twice the rounding of the output"

AXES = (
    Axis("rows", scales=True, live=True, apart=True, leading=True),
    Axis("features", scales=True),
    Axis("input_ndim", works=False),  # dense rows are the same rows in any number of axes
)
_FEATURES = ("...", "features")
_SHAPES = {"small": (33, 96), "decode": (1, 4096), "batch_decode": (64, 4096), "prefill": (512, 4096)}
_FIRST = ("input", "residual")

SCALE = Param("scale", float, None, Role.PASSED, -1e6, 1e6, example=0.5)
TEMPERATURE = Param("temperature", float, None, Role.PASSED, 1e-6, 1e6, example=0.5)
OUT_DTYPE = Param("out_dtype", torch.dtype, REQUIRED, example=torch.float16)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    shape = next(arguments[name] for name in _FIRST if name in arguments).shape
    return {"rows": math.prod(shape[:-1]), "input_ndim": len(shape)}


def _work(tensors: int, flops: int) -> Callable[[Mapping[str, Any]], Work]:
    """So many tensors of the size of the first read or written, so many operations an element of it."""

    def work(facts: Mapping[str, Any]) -> Work:
        elements = facts["rows"] * facts["features"]
        return Work(float(flops * elements), float(tensors * elements * facts["dtype"].itemsize))

    return work


def _operation(
    name: str,
    summary: str,
    reference: Callable[..., Any],
    inputs: tuple[TensorSchema, ...],
    params: tuple[Param, ...],
    stock_function: Callable[..., Any],
    work: Callable[[Mapping[str, Any]], Work],
    **more: Any,
) -> Operation:
    given = tuple(each.name for each in inputs if not each.required)
    params_of_cases = {each.name: each.example for each in params} if not given else {}
    outputs: tuple[TensorSchema, ...] = (TensorSchema("output", _FEATURES, FLOATING),)
    if any(each.mutated for each in inputs):
        outputs = ()
    judged: dict[str, Any] = {"tolerance": TOLERANCE, "tolerance_reason": TOLERANCE_REASON}
    return Operation(
        schema=OperationSchema(
            operation=f"elementwise.{name}",
            inputs=inputs,
            outputs=more.pop("outputs", outputs),
            params=params,
            axes=AXES,
        ),
        summary=summary,
        reference=reference,
        fake=more.pop("fake", _like if outputs else _nothing),
        cases=tuple(
            Case(label, {"rows": rows, "features": features}, params_of_cases, given)
            for label, (rows, features) in _SHAPES.items()
        ),
        derive=_derive,
        derived=("rows", "input_ndim"),
        derived_from={"rows": ("...",), "input_ndim": ()},
        work=work,
        stock=stock_function,
        fuses=bool(outputs),
        **({} if "judge" in more else judged),
        **more,
    )


def _like(input: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _nothing(*_: object, **__: object) -> None:
    return None


def _add_bias(input: Tensor, bias: Tensor) -> Tensor:
    """A number for each feature added. Shapes: (*, D), (D,) → (*, D). Dtype: computes in float32 or wider."""
    return (_wide(input) + _wide(bias)).to(input.dtype)


def _add(residual: Tensor, input: Tensor) -> None:
    """Added in place. Shapes: (*, D), (*, D). Dtype: computes in float32 or wider, rounds once."""
    residual.add_(_wide(input))  # torch 2.13 converts into a negated view without negating, where it copies


def _scaled_add(
    residual: Tensor,
    input: Tensor,
    *,
    scale_by_row: Tensor | None = None,
    scale: float | None = None,
) -> None:
    """Added in place, scaled. Shapes: (*, D), (*, D), (*). Dtype: computes in float32 or wider, rounds once."""
    factor: Any = scale if scale_by_row is None else scale_by_row.unsqueeze(-1)
    residual.add_(_wide(input) * factor)


def _softmax(input: Tensor, *, temperature: float | None = None) -> Tensor:
    """Softmax of the last axis. Shapes: (*, D) → (*, D). Dtype: computes in float32 or wider; returns input.dtype."""
    wide = _wide(input)
    return (wide if temperature is None else wide / temperature).softmax(-1).to(input.dtype)


def _cast(input: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """The nearest numbers of another dtype. Shapes: (*, D) → (*, D). Returns out_dtype, in memory of its own."""
    # copied into memory of another dtype, a negated view loses its sign (torch 2.11 and 2.13, CPU)
    return torch.empty_like(input, dtype=out_dtype, memory_format=torch.contiguous_format).copy_(input.resolve_neg())


def _cast_fake(input: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    return torch.empty_like(input, dtype=out_dtype, memory_format=torch.contiguous_format)


_INPUT = TensorSchema("input", _FEATURES, FLOATING)
_RESIDUAL = TensorSchema("residual", _FEATURES, FLOATING, mutated=True)
_SCALE_BY_ROW = TensorSchema(
    "scale_by_row", ("...",), frozenset({torch.float32}), required=False, same_dtype=False, given_as="scale"
)

ADD_BIAS = _operation(
    "add_bias",
    "A number for each feature added to every row",
    _add_bias,
    (_INPUT, TensorSchema("bias", ("features",), FLOATING)),
    (),
    stock.add_bias,
    _work(2, 1),
)
ADD = _operation(
    "add", "One tensor added to another, in place", _add, (_RESIDUAL, _INPUT), (), stock.add_residual, _work(3, 1)
)
SCALED_ADD = _operation(
    "scaled_add",
    "One tensor scaled and added to another, in place",
    _scaled_add,
    (_RESIDUAL, _INPUT, _SCALE_BY_ROW),
    (SCALE,),
    stock.add_residual,
    _work(3, 2),
)
SOFTMAX = _operation(
    "softmax", "Exponentials of a row that add up to 1", _softmax, (_INPUT,), (TEMPERATURE,), stock.softmax, _work(2, 5)
)
CAST = _operation(
    "cast",
    "The same numbers in another dtype",
    _cast,
    (_INPUT,),
    (OUT_DTYPE,),
    stock.cast,
    _work(2, 0),
    judge=Exact("rounding to the nearest is one number"),
    fake=_cast_fake,
    outputs=(TensorSchema("output", _FEATURES, FLOATING, dtype_from="out_dtype"),),
)

OPERATIONS = (ADD_BIAS, ADD, SCALED_ADD, SOFTMAX, CAST)
