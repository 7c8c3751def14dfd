"""The public functions of activations: signatures, the checks of a call, and the routes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.activation import declare, draw
from layerzero.ops.checks import check_dense


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Apply the Gaussian error linear unit: ``x / 2 * (1 + erf(x / sqrt(2)))``, or its approximation by tanh.

    Shapes: input (*) → (*)
    Dtype: floating; computes in float32; returns input.dtype. An infinity may give NaN.
    Args:
        approximate: ``"none"`` or ``"tanh"``.
    Raises: InvalidCallError for dtypes or a name that is none of these.
    Source: arXiv:1606.08415.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def silu(input: Tensor) -> Tensor:
    """Apply the sigmoid linear unit: ``x / (1 + exp(-x))``.

    Shapes: input (*) → (*)
    Dtype: floating; computes in float32; returns input.dtype.
    Raises: InvalidCallError for other dtypes.
    Source: arXiv:1702.03118.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def relu2(input: Tensor) -> Tensor:
    """Apply the squared rectified linear unit: ``max(x, 0)^2``.

    Shapes: input (*) → (*)
    Dtype: floating; computes in float32; returns input.dtype.
    Raises: InvalidCallError for other dtypes.
    Source: arXiv:2109.08668.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def silu_mul(input: Tensor, up: Tensor | None = None) -> Tensor:
    """Multiply the SiLU of a gate with what it lets through: ``silu(gate) * up``.

    Shapes: gate and up (*, D) → (*, D); or both in one input (*, 2 D), the gate first, as one product with the two
        weights joined makes them.
    Dtype: floating, the same for both; computes in float32; returns input.dtype.
    Args:
        input: the gate, or gate and up.
        up: what the gate lets through; None if it is in the input.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    Source: arXiv:2002.05202.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def gelu_mul(input: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Multiply the GELU of a gate with what it lets through: ``gelu(gate) * up``.

    Shapes: gate and up (*, D) → (*, D); or both in one input (*, 2 D), the gate first.
    Dtype: floating, the same for both; computes in float32; returns input.dtype. An infinite gate may give NaN.
    Args:
        input: the gate, or gate and up.
        up: what the gate lets through; None if it is in the input.
        approximate: ``"none"`` or ``"tanh"``, as for :func:`layerzero.gelu`.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, or another approximation.
    Source: arXiv:2002.05202.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def swiglu_oai(
    input: Tensor,
    up: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """Apply gpt-oss's gate: ``g * sigmoid(alpha * g) * (u + 1)``, with the gate clamped from above, up on both sides.

    Shapes: gate and up (*, D) → (*, D); or both in one input (*, 2 D) **by turns**: gate 0, up 0, gate 1, up 1, …
    Dtype: floating, the same for both; computes in float32; returns input.dtype.
    Args:
        input: the gate, or gate and up by turns.
        up: what the gate lets through; None if it is in the input.
        alpha: factor on the gate within the sigmoid.
        limit: what the gate is at most, and up on either side; above 0.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and for numbers that mean nothing.
    Source: gpt-oss, arXiv:2508.10925.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(name: str, apart: Operation, together: Operation | None = None) -> Callable[..., Routed]:
    def route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
        check_dense(name, arguments)
        operation, given = apart, arguments
        if together is not None and arguments["up"] is None:
            operation, given = together, {each: value for each, value in arguments.items() if each != "up"}
        problems = operation.schema.validate(**given) + _value_problems(given)
        if not problems:
            problems = _shape_problems(given, in_one=operation is together)
        if problems:
            raise InvalidCallError(name, problems)
        return Routed(operation, given, varies=("...",))

    return route


def _value_problems(arguments: dict[str, Any]) -> list[str]:
    problems = []
    approximate, alpha, limit = (arguments.get(name) for name in ("approximate", "alpha", "limit"))
    if isinstance(approximate, str) and approximate not in ("none", "tanh"):
        problems.append(f"approximate: wanted 'none' or 'tanh', got {told(approximate)}")
    if isinstance(alpha, (int, float)) and not math.isfinite(alpha):
        problems.append(f"alpha: wanted a finite number, got {told(alpha)}")
    if isinstance(limit, (int, float)) and not (math.isfinite(limit) and limit > 0):
        problems.append(f"limit: wanted a finite number above 0, got {told(limit)}")
    return problems


def _shape_problems(arguments: dict[str, Any], *, in_one: bool) -> list[str]:
    shape = tuple(arguments["input"].shape)
    if in_one and shape[-1] % 2:
        return [f"input: wanted gate and up in one tensor, an even last axis, got {shape}; or pass up="]
    up = arguments.get("up")
    if up is not None and tuple(up.shape) != shape:
        return [f"up: wanted shape {shape} like input, got {tuple(up.shape)}"]
    return []


FUNCTIONS = (
    Function("gelu", gelu, _route("gelu", declare.GELU), (declare.GELU,), draw=draw.gelu, weight=1),
    Function("silu", silu, _route("silu", declare.SILU), (declare.SILU,), draw=draw.silu, weight=1),
    Function("relu2", relu2, _route("relu2", declare.RELU2), (declare.RELU2,), draw=draw.relu2, weight=1),
    *(
        Function(name, signature, _route(name, *operations), operations, draw=drawn)
        for name, signature, operations, drawn in (
            ("silu_mul", silu_mul, (declare.SILU_MUL, declare.SILU_MUL_JOINED), draw.silu_mul),
            ("gelu_mul", gelu_mul, (declare.GELU_MUL, declare.GELU_MUL_JOINED), draw.gelu_mul),
            ("swiglu_oai", swiglu_oai, (declare.SWIGLU_OAI, declare.SWIGLU_OAI_INTERLEAVED), draw.swiglu_oai),
        )
    ),
)
