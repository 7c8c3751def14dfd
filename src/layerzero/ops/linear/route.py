"""``lz.linear``: its signature, the checks of a call, and the route."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.linear import draw
from layerzero.ops.linear.declare import ACTIVATIONS, LINEAR, wide
from layerzero.ops.linear.packed import PackedWeight, packed_problems


def linear(
    input: Tensor,  # noqa: A002  # torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    packed: PackedWeight | None = None,
) -> Tensor:
    """Multiply with a weight, as ``torch.nn.functional.linear``: ``activation(input @ weight^T + bias)``.

    Shapes: input (*, K), weight (N, K), bias (N,) → (*, N)
    Dtype: floating, the same for all; sums are in float32; returns out_dtype or input.dtype.
    Args:
        activation: what follows the product: ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"``, ``"silu"`` or
            ``"relu2"``; kernels that know it apply it before they round.
        out_dtype: dtype of the result: the input's, or float32 for float16 and bfloat16, whose sums are not rounded
            then (logits).
        packed: the :class:`layerzero.PackedWeight` of this weight, so that kernels that want it in another order make
            that once. It changes no result, and has no effect in compiled code.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and for a packed weight of another tensor or
        of one that was written into since.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("linear", arguments)
    problems = LINEAR.schema.validate(**arguments)
    problems += activation_problems(arguments["activation"])
    problems += packed_problems(arguments["packed"], arguments["weight"])
    problems += out_dtype_problems(arguments)
    if problems:
        raise InvalidCallError("linear", problems)
    if arguments["out_dtype"] == arguments["input"].dtype:
        arguments["out_dtype"] = None  # the default, spelled out: kernels without that argument stay legal
    return Routed(LINEAR, arguments, varies=("...",))


def activation_problems(activation: object) -> list[str]:
    """List what is wrong with the name of an activation; its type is the schema's business."""
    if not isinstance(activation, str) or activation in ACTIVATIONS:
        return []
    return [f"activation: wanted {', '.join(ACTIVATIONS)} or None, got {activation!r}"]


def out_dtype_problems(arguments: dict[str, Any]) -> list[str]:
    """List what is wrong with the dtype of the result; its type is the schema's business."""
    input_, out_dtype = arguments["input"], arguments["out_dtype"]
    if not isinstance(out_dtype, torch.dtype) or not isinstance(input_, Tensor):
        return []
    allowed = list(dict.fromkeys((input_.dtype, wide(input_.dtype))))
    if out_dtype in allowed:
        return []
    wanted = " or ".join(map(dtype_name, allowed))
    return [f"out_dtype: wanted {wanted} for an input of {dtype_name(input_.dtype)}, got {dtype_name(out_dtype)}"]


FUNCTIONS = (Function("linear", linear, _route, (LINEAR,), draw=draw.linear),)
