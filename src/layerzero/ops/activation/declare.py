"""Activations: of one tensor, and of a gate times what it lets through, apart or joined in one tensor.

activation.gelu    activation.silu    activation.relu2
mlp.silu_mul       mlp.gelu_mul       mlp.swiglu_oai                   gate and up are two tensors
mlp.silu_mul.joined mlp.gelu_mul.joined                                one tensor, gate before up
mlp.swiglu_oai.interleaved                                             one tensor, gate and up by turns
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Tolerance, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.activation import stock
from layerzero.ops.activation.formulas import gelu, gelu_tanh, relu2, silu, swiglu_oai
from layerzero.ops.activation.sweep import joined_sweep, sweep

TOLERANCE = {
    torch.float64: Tolerance(1e-5, 1e-5),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-2, 1e-2),
}
TOLERANCE_REASON = "twice the rounding of the output: kernels may round the activation before they multiply"

_ROWS = Axis("rows", scales=True, live=True, apart=True, leading=True)
_NDIM = Axis("input_ndim", works=False)  # dense rows are the same rows in any number of axes
AXES = (_ROWS, Axis("features", scales=True), _NDIM)
JOINED_AXES = (_ROWS, Axis("joined", scales=True), Axis("features", scales=True, implied=True), _NDIM)

APPROXIMATE = Param("approximate", str, "none", example="tanh")
ALPHA = Param("alpha", float, 1.702, example=1.25, works=False)
LIMIT = Param("limit", float, 7.0, example=0.75, works=False)

_SHAPES = {"small": (33, 96), "decode": (1, 14336), "minilm": (1024, 1536), "batch_decode": (64, 14336)}


def _cases(params: tuple[Param, ...], *, joined: bool) -> tuple[Case, ...]:
    """Shapes of models' layers, and a small one with each parameter away from its neutral value."""
    found = [
        Case(name, {"rows": rows, "joined": 2 * features} if joined else {"rows": rows, "features": features})
        for name, (rows, features) in _SHAPES.items()
    ]
    other = {each.name: each.example for each in params}
    return (*found, Case("other", found[0].sizes, other)) if other else tuple(found)


Formula = Callable[..., Tensor]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    shape = arguments["input"].shape
    features = {"features": values["joined"] // 2} if "joined" in values else {}
    return {"rows": math.prod(shape[:-1]), "input_ndim": len(shape), **features}


def _work(tensors: int, flops: int) -> Callable[[Mapping[str, Any]], Work]:
    """So many tensors of the output's size read or written, so many operations an element of it."""

    def work(facts: Mapping[str, Any]) -> Work:
        elements = facts["rows"] * facts["features"]
        return Work(float(flops * elements), float(tensors * elements * facts["dtype"].itemsize))

    return work


def _alone(formula: Formula, name: str) -> Formula:
    def reference(input: Tensor, **params: Any) -> Tensor:
        return formula(input.to(_wide(input.dtype)), **params).to(input.dtype)

    reference.__doc__ = f"``{name}`` of every element.\n\n    {_DTYPE}\n    "
    return reference


def _apart(formula: Formula, name: str) -> Formula:
    def reference(input: Tensor, up: Tensor, **params: Any) -> Tensor:
        wide = _wide(input.dtype)
        return formula(input.to(wide), up.to(wide), **params).to(input.dtype)

    reference.__doc__ = f"``{name}`` of a gate (*, D) and what it lets through (*, D) → (*, D).\n\n    {_DTYPE}\n    "
    return reference


def _together(formula: Formula, name: str, split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Formula:
    def reference(input: Tensor, **params: Any) -> Tensor:
        return formula(*split(input.to(_wide(input.dtype))), **params).to(input.dtype)

    reference.__doc__ = f"``{name}`` of both in one tensor (*, 2 D) → (*, D).\n\n    {_DTYPE}\n    "
    return reference


_DTYPE = "Dtype: computes in float32 (float64 for float64), rounds once; returns input.dtype."


def halves(input: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up, one after the other."""
    middle = input.shape[-1] // 2
    return input[..., :middle], input[..., middle:]


def turns(input: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up by turns."""
    return input[..., ::2], input[..., 1::2]


def _same_shape(input: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _half_shape(input: Tensor, **_: object) -> Tensor:
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


_FEATURES = ("...", "features")
_DERIVED_FROM: dict[str, tuple[str, ...]] = {"rows": ("...",), "input_ndim": ()}


def _operation(
    name: str,
    summary: str,
    reference: Formula,
    inputs: tuple[str, ...],
    params: tuple[Param, ...],
    stock_function: Callable[..., Any],
    flops: int,
) -> Operation:
    joined = inputs == ("joined",)
    tensors = ("input",) if joined else inputs
    axes = ("...", "joined") if joined else _FEATURES
    return Operation(
        schema=OperationSchema(
            operation=name,
            inputs=tuple(TensorSchema(each, axes, FLOATING) for each in tensors),
            outputs=(TensorSchema("output", _FEATURES, FLOATING),),
            params=params,
            axes=JOINED_AXES if joined else AXES,
        ),
        summary=summary,
        reference=reference,
        fake=_half_shape if joined else _same_shape,
        cases=_cases(params, joined=joined),
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        derive=_derive,
        derived=("rows", "input_ndim", *(("features",) if joined else ())),
        derived_from=_DERIVED_FROM | ({"features": ("joined",)} if joined else {}),
        work=_work(tensors=3 if joined else len(inputs) + 1, flops=flops),
        sweep=joined_sweep if joined else sweep,
        stock=stock_function,
        fuses=True,
    )


def _gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    return gelu_tanh(input) if approximate == "tanh" else gelu(input)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def _gelu_mul(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    return _gelu(gate, approximate=approximate) * up


def _swiglu_oai(gate: Tensor, up: Tensor, *, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    return swiglu_oai(gate, up, alpha, limit)


def _of_one(name: str, text: str, formula: Formula, flops: int, *params: Param) -> Operation:
    function = getattr(stock, name)
    return _operation(f"activation.{name}", text, _alone(formula, name), ("input",), params, function, flops)


GELU = _of_one("gelu", "Gaussian error linear unit", _gelu, 8, APPROXIMATE)
SILU = _of_one("silu", "Sigmoid linear unit", silu, 4)
RELU2 = _of_one("relu2", "Square of the rectified linear unit", relu2, 2)


def _gated(
    name: str, text: str, formula: Formula, flops: int, *params: Param, ending: str = "joined"
) -> tuple[Operation, Operation]:
    function, split = getattr(stock, name), halves if ending == "joined" else turns
    apart = _operation(f"mlp.{name}", text, _apart(formula, name), ("input", "up"), params, function, flops)
    reference = _together(formula, name, split)
    together = _operation(
        f"mlp.{name}.{ending}", f"{text}, both in one tensor", reference, ("joined",), params, function, flops
    )
    return apart, together


SILU_MUL, SILU_MUL_JOINED = _gated("silu_mul", "SiLU of a gate, times up", _silu_mul, 5)
GELU_MUL, GELU_MUL_JOINED = _gated("gelu_mul", "GELU of a gate, times up", _gelu_mul, 9, APPROXIMATE)
SWIGLU_OAI, SWIGLU_OAI_INTERLEAVED = _gated(
    "swiglu_oai", "gpt-oss's clamped gate, times up and one", _swiglu_oai, 9, ALPHA, LIMIT, ending="interleaved"
)

OPERATIONS = (
    *(GELU, SILU, RELU2, SILU_MUL, SILU_MUL_JOINED, GELU_MUL, GELU_MUL_JOINED),
    *(SWIGLU_OAI, SWIGLU_OAI_INTERLEAVED),
)
