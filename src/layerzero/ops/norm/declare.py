"""Normalisation over the last axes: norm.rms, norm.layer, norm.add_rms; ``lz.rms_norm`` and its relatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, TensorSchema, told
from layerzero.core.dtypes import FLOATING
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Case, Function, Operation, Routed, Tolerance, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.calls import drawn
from layerzero.ops.checks import check_dense, overlaps, write_problems
from layerzero.ops.norm import draw, stock
from layerzero.ops.norm.sweep import sweep

TOLERANCE = {
    torch.float64: Tolerance(1e-5, 1e-5),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-2, 1e-2),
}
TOLERANCE_REASON = "twice the rounding of the output; the sums are in float32"

_CASES = tuple(
    Case(name, {"rows": rows, "hidden": hidden})
    for name, rows, hidden in (
        ("minilm", 1024, 384),
        ("decode", 1, 4096),
        ("batch_decode", 64, 4096),
        ("prefill", 512, 1024),
        ("long_prefill", 4096, 4096),
    )
)


_AXES = (
    Axis("rows", scales=True, live=True, apart=True, leading=True),
    Axis("hidden", scales=True),
    Axis("last", scales=True),
    Axis("input_ndim", works=False),  # dense rows are the same rows in any number of axes
)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rows(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    input_ = arguments["input"]
    hidden = math.prod(arguments.get("normalized_shape") or (input_.shape[-1],))
    return {"hidden": hidden, "rows": input_.numel() // hidden if hidden else 0, "input_ndim": input_.ndim}


_DERIVED_FROM = {"hidden": ("hidden", "last"), "rows": ("...",), "input_ndim": ()}


def _work(tensors: int, flops: int) -> Callable[[Mapping[str, Any]], Work]:
    """So many tensors of the input's size read or written, so many operations an element; the weights are small."""

    def work(facts: Mapping[str, Any]) -> Work:
        elements = facts["rows"] * facts["hidden"]
        return Work(float(flops * elements), float(tensors * elements * facts["dtype"].itemsize))

    return work


def _same_shape(input: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


# norm.rms


def rms_norm_reference(input: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    Shapes: input (*, D), weight (D,) → (*, D)
    Dtype: computes in float32 (float64 for float64), the weight included; returns input.dtype.
    Units: eps in x^2.
    Source: arXiv:1910.07467.
    """
    wide = input.to(_wide(input.dtype))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(wide.dtype)).to(input.dtype)


RMS = Operation(
    schema=OperationSchema(
        operation="norm.rms",
        inputs=(TensorSchema("input", ("...", "hidden"), FLOATING), TensorSchema("weight", ("hidden",), FLOATING)),
        outputs=(TensorSchema("output", ("...", "hidden"), FLOATING),),
        params=(Param("eps", float, 1e-6, example=0.1),),
        axes=_AXES,
    ),
    summary="Root mean square normalisation",
    reference=rms_norm_reference,
    fake=_same_shape,
    cases=_CASES,
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    derive=_rows,
    derived=("hidden", "rows", "input_ndim"),
    derived_from=_DERIVED_FROM,
    work=_work(tensors=2, flops=4),
    sweep=sweep,
    stock=stock.rms_norm,
    fuses=True,
)


def rms_norm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise the last axis by its root mean square and scale by the weight.

    Shapes: input (*, D), weight (D,) → (*, D)
    Dtype: floating, the same for both; sums are in float32; returns input.dtype.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    Source: arXiv:1910.07467.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route_rms(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("rms_norm", arguments)
    weight = arguments["weight"]
    if isinstance(weight, (int, tuple, list)):
        hint = "torch's normalized_shape is the shape of weight here: rms_norm(input, weight, eps)"
        raise InvalidCallError("rms_norm", [f"weight: wanted a tensor, got {type(weight).__name__}; {hint}"])
    return routed("rms_norm", RMS, arguments)


# norm.layer


def layer_norm_reference(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float = 1e-5,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last ``len(normalized_shape)`` axes.

    Shapes: input (*, *normalized_shape), weight and bias normalized_shape → input's shape
    Dtype: computes in float32 (float64 for float64); returns input.dtype. The variance is the biased one.
    Units: eps in x^2.
    Source: arXiv:1607.06450.
    """
    axes = tuple(range(-len(normalized_shape), 0))
    wide = input.to(_wide(input.dtype))
    centred = wide - wide.mean(axes, keepdim=True)
    output = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)
    if weight is not None:
        output = output * weight.to(wide.dtype)
    if bias is not None:
        output = output + bias.to(wide.dtype)
    return output.to(input.dtype)


def _layer_examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Any]:
    given: Any = case.params.get("normalized_shape")
    shape = tuple(given or (case.sizes["hidden"],))
    schemas = [TensorSchema(name) for name in ("weight", "bias")]
    made = {each.name: drawn(each, shape, dtype, device, case.sizes, generator) for each in schemas}
    return {**made, "normalized_shape": shape}


LAYER = Operation(
    schema=OperationSchema(
        operation="norm.layer",
        inputs=(
            TensorSchema("input", ("...", "last"), FLOATING),
            TensorSchema("weight", (), FLOATING, required=False),
            TensorSchema("bias", (), FLOATING, required=False),
        ),
        outputs=(TensorSchema("output", ("...", "last"), FLOATING),),
        params=(Param("normalized_shape", tuple, implied=True), Param("eps", float, 1e-5, example=0.1)),
        axes=_AXES,
    ),
    summary="Layer normalisation",
    reference=layer_norm_reference,
    fake=_same_shape,
    cases=_CASES,
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    derive=_rows,
    derived=("hidden", "rows", "input_ndim"),
    derived_from=_DERIVED_FROM,
    work=_work(tensors=2, flops=8),
    examples=_layer_examples,
    complete=lambda sizes: {"last": sizes["hidden"]} if "hidden" in sizes else {"hidden": sizes["last"]},
    sweep=sweep,
    stock=stock.layer_norm,
    fuses=True,
)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise the last axes to mean 0 and variance 1, then scale and shift.

    Shapes: input (*, *normalized_shape), weight and bias normalized_shape → input's shape
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    Source: arXiv:1607.06450.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route_layer(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("layer_norm", arguments)
    given = arguments["normalized_shape"]
    sizes = (given,) if isinstance(given, (int, torch.SymInt)) else given
    if not isinstance(sizes, (tuple, list)) or not all(isinstance(size, (int, torch.SymInt)) for size in sizes):
        raise InvalidCallError("layer_norm", [f"normalized_shape: wanted an int or ints, got {told(given)}"])
    shape = tuple(int(size) for size in sizes)
    arguments["normalized_shape"] = shape
    input_ = arguments["input"]
    if isinstance(input_, Tensor):
        ending = tuple(input_.shape[max(input_.ndim - len(shape), 0) :])
        if not shape or ending != shape:
            wanted = f"input: wanted a shape that ends in normalized_shape {told(shape)}, got {tuple(input_.shape)}"
            raise InvalidCallError("layer_norm", [wanted])
    for name in ("weight", "bias"):
        tensor = arguments[name]
        if isinstance(tensor, Tensor) and tuple(tensor.shape) != shape:
            wanted = f"{name}: wanted shape {told(shape)} like normalized_shape, got {tuple(tensor.shape)}"
            raise InvalidCallError("layer_norm", [wanted])
    return routed("layer_norm", LAYER, arguments, varies=("...",) if len(shape) == 1 else ())


# norm.add_rms


def add_rms_norm_reference(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """``residual += input``, then RMS normalisation of the sum.

    The sum is rounded to the residual's dtype before it is normalised, because that is what the next layer will read.

    Shapes: input and residual (*, D), weight (D,) → (*, D)
    Dtype: the normalisation computes in float32; returns input.dtype. ``residual`` is updated in place.
    Units: eps in x^2.
    Source: arXiv:1910.07467; fused as in vLLM's fused_add_rms_norm.
    """
    residual.add_(input)
    return rms_norm_reference(residual, weight, eps=eps)


ADD_RMS = Operation(
    schema=OperationSchema(
        operation="norm.add_rms",
        inputs=(
            TensorSchema("input", ("...", "hidden"), FLOATING),
            TensorSchema("residual", ("...", "hidden"), FLOATING, mutated=True),
            TensorSchema("weight", ("hidden",), FLOATING),
        ),
        outputs=(TensorSchema("output", ("...", "hidden"), FLOATING),),
        params=(Param("eps", float, 1e-6, example=0.1),),
        axes=_AXES,
    ),
    summary="Residual addition in place, then root mean square normalisation",
    reference=add_rms_norm_reference,
    fake=_same_shape,
    cases=_CASES,
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON + "; the rounded sum is what is normalised",
    derive=_rows,
    derived=("hidden", "rows", "input_ndim"),
    derived_from=_DERIVED_FROM,
    work=_work(tensors=4, flops=5),
    sweep=sweep,
    stock=stock.add_rms_norm,
)


def add_residual_rms_norm_(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Add the input to the residual in place and return the sum, normalised by its root mean square.

    Shapes: input and residual (*, D), the same; weight (D,) → (*, D)
    Dtype: floating, the same for all; the sum is rounded to it, then normalised in float32.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a residual that needs gradients, that
        overlaps itself in memory, or that shares memory with the input.
    Source: arXiv:1910.07467; fused as in vLLM's fused_add_rms_norm.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route_add_rms(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    return route_sum("add_residual_rms_norm_", ADD_RMS, arguments, written=("residual",))


def route_sum(
    function: str,
    operation: Operation,
    arguments: dict[str, Any],
    written: tuple[str, ...],
    read: tuple[str, ...] = (),
) -> Routed:
    """Check a norm of ``residual += input`` that writes over some tensors, which share no memory with those read."""
    check_dense(function, arguments)
    input_, residual = arguments["input"], arguments["residual"]
    if isinstance(input_, Tensor) and isinstance(residual, Tensor):
        problems = []
        if residual.shape != input_.shape:
            wanted, got = tuple(input_.shape), tuple(residual.shape)
            problems.append(f"residual: wanted shape {wanted} like input, got {got}")
        problems += write_problems(arguments, written, read)
        if residual is input_ or overlaps(residual, input_):
            problems.append("residual: wanted memory of its own, got memory that it shares with input")
        if problems:
            raise InvalidCallError(function, problems)
    return routed(function, operation, arguments)


def routed(
    function: str, operation: Operation, arguments: dict[str, Any], varies: tuple[str, ...] = ("...",)
) -> Routed:
    """Check a call of any norm; its rows may be of any number."""
    problems = operation.schema.validate(**arguments)
    eps = arguments["eps"]
    if isinstance(eps, (int, float)) and not (math.isfinite(eps) and eps >= 0):
        problems.append(f"eps: wanted a finite number of at least 0, got {eps}")
    if not problems and arguments["input"].ndim and arguments["input"].shape[-1] == 0:
        problems.append(f"input: wanted a last axis above 0, got shape {tuple(arguments['input'].shape)}")
    if problems:
        raise InvalidCallError(function, problems)
    return Routed(operation, arguments, varies=varies)


OPERATIONS = (RMS, LAYER, ADD_RMS)

RMS_NORM = Function("rms_norm", rms_norm, _route_rms, (RMS,), draw=draw.rms_norm)
LAYER_NORM = Function("layer_norm", layer_norm, _route_layer, (LAYER,), draw=draw.layer_norm)
ADD_RMS_NORM = Function(
    "add_residual_rms_norm_",
    add_residual_rms_norm_,
    _route_add_rms,
    (ADD_RMS,),
    draw=draw.add_residual_rms_norm_,
    renamed={"add_rms_norm": "add_residual_rms_norm_"},
)
FUNCTIONS = (RMS_NORM, LAYER_NORM, ADD_RMS_NORM)
