"""Normalisation over the last axes, alone and behind a residual addition.

norm.rms              root mean square          norm.layer             mean and variance
norm.add_rms          ``residual += input``, then norm.rms of the sum
norm.add_rms.inplace  the same, its result written over the input: what serving frameworks call between two halves of a
                      layer, where neither tensor is read again. Libraries have it as one kernel that moves four
                      times the tensor; a norm that leaves the input alone costs them a second launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, TensorSchema, told
from layerzero.core.dtypes import FLOATING
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.operation import Case, Function, Operation, Random, Routed
from layerzero.ops.calls import drawn
from layerzero.ops.declaration import (
    NDIM,
    ROUNDED_TWICE,
    cases,
    check_dense,
    eps_problems,
    moved,
    operation,
    overlaps,
    tensor,
    wide,
    write_problems,
)
from layerzero.ops.norm import draw

TOLERANCE_REASON = "twice the rounding of the output; the sums are in float32"

_CASES = cases(
    "rows hidden",
    {
        "minilm": (1024, 384),
        "decode": (1, 4096),
        "batch_decode": (64, 4096),
        "prefill": (512, 1024),
        "long_prefill": (4096, 4096),
    },
)

_ROWS = {"cuda": (1, 4, 16, 64, 256, 1024, 4096, 16384), "cpu": (1, 4, 16, 64, 256, 1024)}
_HIDDEN = {"cuda": (1024, 2048, 4096, 8192), "cpu": (512, 1024, 4096)}
_MAX_ELEMENTS = {"cuda": 2**27, "cpu": 2**21}


def norm_case(operation: str, rows: int, hidden: int) -> tuple[str, Case]:
    """An operation's name and a case of it."""
    return operation, Case(f"{rows}x{hidden}", {"rows": rows, "hidden": hidden})


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Every norm of a kind of device; none for sizes of attention."""
    kind = device if device in _ROWS else "cpu"
    for rows in _ROWS[kind] if not narrow else ():
        for hidden in _HIDDEN[kind]:
            if rows * hidden <= _MAX_ELEMENTS[kind]:
                yield norm_case("", rows, hidden)[1]


def _rows(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    input_ = arguments["input"]
    hidden = math.prod(arguments.get("normalized_shape") or (input_.shape[-1],))
    return {"hidden": hidden, "rows": input_.numel() // hidden if hidden else 0}


def _declared(
    name: str,
    summary: str,
    reference: Callable[..., Any],
    inputs: tuple[str | TensorSchema, ...],
    params: tuple[Param, ...],
    work: tuple[int, int],
    **more: Any,
) -> Operation:
    """Declare a norm; ``work`` is how many tensors of the input's size are moved, and the operations an element."""
    tensors, flops = work
    return operation(
        f"norm.{name}",
        summary,
        reference,
        inputs=inputs,
        params=params,
        axes=(
            Axis("rows", scales=True, live=True, apart=True, leading=True),
            Axis("hidden", scales=True),
            Axis("last", scales=True),
            NDIM,
        ),
        cases=_CASES,
        tolerance=ROUNDED_TWICE,
        derive=_rows,
        derived_from={"hidden": ("hidden", "last"), "rows": ("...",), "input_ndim": ()},
        work=moved("rows hidden", tensors, flops),
        sweep=_sweep,
        **{"tolerance_reason": TOLERANCE_REASON, **more},
    )


def rms_norm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise the last axis by its root mean square and scale by the weight.

    Shapes: input (*, D), weight (D,) → (*, D)
    Dtype: floating; sums are in float32; returns input.dtype. Where they differ, both are cast to the wider one, at
        least float32, and the result to input.dtype, as torch computes.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    Source: arXiv:1910.07467.
    """
    values = input.to(wide(input.dtype))
    scaled = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(values.dtype)).to(input.dtype)


def _torch_rms_norm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    if input.dtype is weight.dtype:
        return functional.rms_norm(input, weight.shape, weight, eps)
    between = torch.promote_types(wide(input.dtype), weight.dtype)  # as torch does, which warns of it
    return functional.rms_norm(input.to(between), weight.shape, weight.to(between), eps).to(input.dtype)


RMS = _declared(
    "rms",
    "Root mean square normalisation",
    rms_norm,
    ("input: ... hidden", "weight: hidden"),
    (Param("eps", float, 1e-6, example=0.1),),
    work=(2, 4),
    outputs=("output: ... hidden",),
    fuses=True,
    expression=_torch_rms_norm,
)


def _route_rms(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("rms_norm", arguments)
    weight = arguments["weight"]
    if isinstance(weight, (int, tuple, list)):
        hint = "torch's normalized_shape is the shape of weight here: rms_norm(input, weight, eps)"
        raise InvalidCallError("rms_norm", [f"weight: wanted a tensor, got {type(weight).__name__}; {hint}"])
    return _routed("rms_norm", RMS, arguments, casts=_cast(arguments, ("weight",)))


_Casts = Mapping[str, tuple[torch.dtype, torch.dtype]]


def _cast(arguments: dict[str, Any], names: Sequence[str]) -> _Casts:
    """Cast the input and these tensors to the widest of their dtypes, at least float32, where they differ.

    Returns: what was cast. The result gets the input's dtype.
    """
    given = {name: each for name in ("input", *names) if isinstance(each := arguments[name], Tensor)}
    dtypes = {each.dtype for each in given.values()}
    if len(dtypes) < 2 or not dtypes <= FLOATING:
        return {}
    own = given["input"].dtype if "input" in given else torch.float32
    between = functools.reduce(torch.promote_types, dtypes, torch.float32)
    casts = {name: (each.dtype, between) for name, each in given.items() if each.dtype is not between}
    for name in casts:
        arguments[name] = given[name].resolve_neg().to(between, memory_format=torch.contiguous_format)
    return casts if own is between else {**casts, "": (between, own)}


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise the last axes to mean 0 and variance 1, then scale and shift.

    Shapes: input (*, *normalized_shape), weight and bias normalized_shape → input's shape
    Dtype: floating, the same for all; sums are in float32; returns input.dtype. On a CPU, float32 weight and bias may
        scale half precision: it is cast to float32, and the result back, as torch computes.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    Source: arXiv:1607.06450.
    """
    axes = tuple(range(-len(_sizes(normalized_shape)), 0))
    values = input.to(wide(input.dtype))
    centred = values - values.mean(axes, keepdim=True)
    output = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)
    if weight is not None:
        output = output * weight.to(values.dtype)
    if bias is not None:
        output = output + bias.to(values.dtype)
    return output.to(input.dtype)


def _sizes(normalized_shape: int | Sequence[int]) -> Sequence[int]:
    return (normalized_shape,) if isinstance(normalized_shape, (int, torch.SymInt)) else normalized_shape


def _torch_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return functional.layer_norm(input, list(_sizes(normalized_shape)), weight, bias, eps)


def _layer_examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    given: Any = case.params.get("normalized_shape")
    shape = tuple(given or (case.sizes["hidden"],))
    schemas = [TensorSchema(name) for name in ("weight", "bias")]
    made = {each.name: drawn(each, shape, dtype, device, case.sizes, generator) for each in schemas}
    return {**made, "normalized_shape": shape}


LAYER = _declared(
    "layer",
    "Layer normalisation",
    layer_norm,
    ("input: ... last", tensor("weight:", required=False), tensor("bias:", required=False)),
    (Param("normalized_shape", tuple, implied=True), Param("eps", float, 1e-5, example=0.1)),
    work=(2, 8),
    outputs=("output: ... last",),
    examples=_layer_examples,
    complete=lambda sizes: {"last": sizes["hidden"]} if "hidden" in sizes else {"hidden": sizes["last"]},
    fuses=True,
    expression=_torch_layer_norm,
)


def _route_layer(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("layer_norm", arguments)
    given = arguments["normalized_shape"]
    sizes = _sizes(given)
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
    scales = [each for name in ("weight", "bias") if isinstance(each := arguments[name], Tensor)]
    half = isinstance(input_, Tensor) and input_.device.type == "cpu" and input_.dtype in _HALVES
    casts = _cast(arguments, ("weight", "bias")) if half and all(each.dtype is torch.float32 for each in scales) else {}
    return _routed("layer_norm", LAYER, arguments, varies=("...",) if len(shape) == 1 else (), casts=casts)


_HALVES = (torch.float16, torch.bfloat16)


def add_residual_rms_norm_(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Add the input to the residual in place and return the sum, normalised by its root mean square.

    Shapes: input and residual (*, D), the same; weight (D,) → (*, D)
    Dtype: floating, the same for all; the sum is rounded to it, then normalised in float32.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a residual that needs gradients, that
        is an expanded view, or that shares memory with the input or the weight.
    Source: arXiv:1910.07467; fused as in vLLM's fused_add_rms_norm.
    """
    residual.add_(input)  # rounded to its dtype before it is normalised: the next layer reads that
    return rms_norm(residual, weight, eps)


def _torch_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    residual.add_(input)
    return functional.rms_norm(residual, weight.shape, weight, eps)


ADD_RMS = _declared(
    "add_rms",
    "Residual addition in place, then root mean square normalisation",
    add_residual_rms_norm_,
    ("input: ... hidden", tensor("residual: ... hidden", mutated=True), "weight: hidden"),
    RMS.schema.params,
    work=(4, 5),
    outputs=("output: ... hidden",),
    tolerance_reason=TOLERANCE_REASON + "; the rounded sum is what is normalised",
    expression=_torch_add_rms_norm,
)


def add_rms_norm_(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Add the input to the residual in place, and write the sum, normalised by its root mean square, over the input.

    Shapes: input and residual (*, D), the same; weight (D,)
    Dtype: floating, the same for all; the sum is rounded to it, then normalised in float32.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for an input or residual that needs
        gradients as a leaf, that is an expanded view, or that shares memory with the other or with the weight.
    Source: arXiv:1910.07467; vLLM's fused_add_rms_norm.
    """
    input.copy_(add_residual_rms_norm_(input, residual, weight, eps))


def _torch_add_rms_norm_(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    input.copy_(_torch_add_rms_norm(input, residual, weight, eps))


ADD_RMS_INPLACE = _declared(
    "add_rms.inplace",
    "Residual addition and root mean square normalisation, both written in place",
    add_rms_norm_,
    (*(tensor(f"{name}: ... hidden", mutated=True) for name in ("input", "residual")), "weight: hidden"),
    RMS.schema.params,
    work=(4, 5),
    tolerance_reason=ADD_RMS.tolerance_reason,
    expression=_torch_add_rms_norm_,
)


def _route_sum(function: str, operation: Operation, arguments: dict[str, Any], default_layout: str | None) -> Routed:
    """Check a norm of ``residual += input``: what it writes shares no memory with what it reads."""
    check_dense(function, arguments)
    input_, residual = arguments["input"], arguments["residual"]
    if isinstance(input_, Tensor) and isinstance(residual, Tensor):
        problems = []
        if residual.shape != input_.shape:
            wanted, got = tuple(input_.shape), tuple(residual.shape)
            problems.append(f"residual: wanted shape {wanted} like input, got {got}")
        problems += write_problems(arguments, operation.schema.mutated, ("weight",))
        if residual is input_ or overlaps(residual, input_):
            problems.append("residual: wanted memory of its own, got memory that it shares with input")
        refuse(function, problems)
    return _routed(function, operation, arguments)


def _routed(
    function: str,
    operation: Operation,
    arguments: dict[str, Any],
    varies: tuple[str, ...] = ("...",),
    casts: _Casts = MappingProxyType({}),
) -> Routed:
    """Check a call of any norm; its rows may be of any number."""
    problems = operation.schema.validate(**arguments) + eps_problems(arguments)
    if not problems and arguments["input"].ndim and arguments["input"].shape[-1] == 0:
        problems.append(f"input: wanted a last axis above 0, got shape {tuple(arguments['input'].shape)}")
    if problems:
        refuse(function, problems)
    return Routed(operation, arguments, varies=varies, casts=casts)


OPERATIONS = (RMS, LAYER, ADD_RMS, ADD_RMS_INPLACE)
FUNCTIONS = (
    Function("rms_norm", rms_norm, _route_rms, (RMS,), draw=draw.rms_norm),
    Function("layer_norm", layer_norm, _route_layer, (LAYER,), draw=draw.layer_norm),
    Function(
        "add_residual_rms_norm_",
        add_residual_rms_norm_,
        functools.partial(_route_sum, "add_residual_rms_norm_", ADD_RMS),
        (ADD_RMS,),
        draw=draw.add_residual_rms_norm_,
        renamed={"add_rms_norm": "add_residual_rms_norm_"},
    ),
    Function(
        "add_rms_norm_",
        add_rms_norm_,
        functools.partial(_route_sum, "add_rms_norm_", ADD_RMS_INPLACE),
        (ADD_RMS_INPLACE,),
        draw=draw.add_rms_norm_,
    ),
)
