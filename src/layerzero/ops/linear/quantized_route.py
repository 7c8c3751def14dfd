"""``lz.quantized_linear``: its signature, the checks of a call, the route, random calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.draw import Draw
from layerzero.ops.linear import draw as of_linear
from layerzero.ops.linear.packed import PackedWeight, packed_problems
from layerzero.ops.linear.quantized import ACTIVATIONS, OPERATIONS, QUANTIZED
from layerzero.ops.linear.route import out_dtype_problems
from layerzero.ops.quantize.formats import FORMATS
from layerzero.ops.quantize.reference import quantize_scaled


def quantized_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    activations: str | None = None,
    out_dtype: torch.dtype | None = None,
    packed: PackedWeight | None = None,
) -> Tensor:
    """Multiply with a weight of int8 or float8: ``input @ (weight * weight_scale)^T + bias``.

    ``weight, weight_scale = lz.quantize(linear.weight, "int8", per="row")`` makes both.

    Shapes: input (*, K), weight (N, K), weight_scale (), (1,), (N,) or (N, 1), bias (N,) → (*, N)
    Dtype: input and bias floating, the same; weight int8, float8_e4m3fn or float8_e5m2; weight_scale float32; sums are
        in float32, or of whole numbers; returns out_dtype or input.dtype.
    Args:
        activations: None multiplies the rows as they are. ``"int8"`` with a weight of int8, or ``"fp8_e4m3"`` with one
            of float8_e4m3fn, quantizes each row first, as ``lz.quantize(input, activations, per="row")``: faster, less
            exact, and nothing flows back to the input; of a row that is not finite nothing is said in int8.
        out_dtype: dtype of the result: the input's, or float32 for float16 and bfloat16.
        packed: the :class:`layerzero.PackedWeight` of this weight, so that kernels that want it in another order make
            that once. It changes no result, and has no effect in compiled code.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and for a packed weight of another tensor or
        of one that was written into since.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("quantized_linear", arguments)
    activations = arguments.pop("activations")
    if not (activations is None or isinstance(activations, str)) or activations not in ACTIVATIONS:
        wanted = " or ".join(map(repr, ACTIVATIONS))
        raise InvalidCallError("quantized_linear", [f"activations: wanted {wanted}, got {told(activations)}"])
    operation = QUANTIZED[activations]
    problems = operation.schema.validate(**arguments)
    if not problems:
        outputs, scale = arguments["weight"].shape[0], arguments["weight_scale"]
        if tuple(scale.shape) not in ((), (1,), (outputs,), (outputs, 1)):
            wanted = f"(), ({outputs},) or ({outputs}, 1)"
            problems.append(f"weight_scale: wanted shape {wanted}, got {tuple(scale.shape)}")
        if activations is not None and arguments["weight"].shape[1] == 0:
            problems.append(f"input: wanted numbers in its rows, got {tuple(arguments['input'].shape)}")
    problems += packed_problems(arguments)
    problems += out_dtype_problems(arguments)
    if problems:
        raise InvalidCallError("quantized_linear", problems)
    if arguments["out_dtype"] == arguments["input"].dtype:
        arguments["out_dtype"] = None  # the default, spelled out: kernels without that argument stay legal
    return Routed(operation, arguments, varies=("...",))


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: every weight, scales of every shape, with and without quantized rows."""
    inputs, outputs = (draw.of((1, 2, 7, 16, 31, 32, 48, 64, 96, 128, 160)) for _ in range(2))
    activations = draw.of(tuple(ACTIVATIONS))
    format_name = activations or draw.of(("int8", "fp8_e4m3", "fp8_e5m2"))
    numbers = of_linear.weight(draw, (outputs, inputs), torch.float32)
    weight, scale = quantize_scaled(numbers, FORMATS[format_name], per=draw.of(("row", "tensor")))
    scale = scale.reshape(draw.of(((outputs,), (outputs, 1)))) if scale.ndim else scale.reshape(draw.of(((), (1,))))
    arguments: dict[str, Any] = {
        "input": draw.laid_out(draw.normal((*of_linear.leading(draw), inputs), dtype)),
        "weight": draw.laid_out(weight, expand=False) if weight.dtype is torch.int8 else weight,
        "weight_scale": draw.laid_out(scale),
        "activations": activations,
    }
    if draw.chance(0.5):
        arguments["bias"] = draw.laid_out(draw.normal((outputs,), dtype))
    draw.poison(arguments, ("input",))
    if draw.chance(0.1):
        arguments["out_dtype"] = torch.promote_types(dtype, torch.float32)
    if draw.chance(0.4):
        arguments["packed"] = PackedWeight(arguments["weight"])
    return arguments


FUNCTIONS = (
    Function("quantized_linear", quantized_linear, _route, OPERATIONS, draw=_draw, state=frozenset({"matmul"})),
)
