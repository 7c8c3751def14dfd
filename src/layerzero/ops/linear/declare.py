"""Matrix products with a weight: mlp.linear.

Math: ``activation(input @ weight^T + bias)``; see :func:`linear_reference`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Tolerance, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.activation.formulas import FORMULAS
from layerzero.ops.linear.examples import weight
from layerzero.ops.linear.packed import packed_param
from layerzero.ops.linear.parts import linear_parts, linear_scratch
from layerzero.ops.linear.stock import linear as stock_linear
from layerzero.ops.linear.sums import judged_by_products
from layerzero.ops.linear.sweep import sweep

TOLERANCE = {
    torch.float64: Tolerance(1e-5, 1e-5),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 2e-3),
    torch.bfloat16: Tolerance(1e-2, 2e-2),
}
TOLERANCE_REASON = (
    "twice the rounding of the output; the sums are in float32, of products whose weights are drawn with a deviation "
    "of 1/sqrt(K), so that results are of order 1: a sum of K such products, added one after the other, is off by "
    "about 2^-24 * sqrt(K), 8e-6 at K = 16384, and kernels add in blocks. In half precision cuBLAS may round the sums "
    "of a few blocks before it adds them up (torch's allow_fp16_reduced_precision_reduction, on by default): 1.2e-3 of "
    "1 at K = 2050 on an H200, torch 2.11"
)

ACTIVATIONS = tuple(FORMULAS)

AXES = (
    Axis("rows", scales=True, live=True, apart=True, leading=True),
    Axis("in_features", scales=True),
    Axis("out_features", scales=True),
    Axis("input_ndim", works=False),  # dense rows are the same rows in any number of axes
)

ALIASES = {"m": "rows", "n": "out_features", "k": "in_features"}
"""Letters of matrix products, for rules: ``m: "<=16"``."""

OUT_DTYPE = Param("out_dtype", torch.dtype, None, example=torch.float32)
ACTIVATION = Param("activation", str, None, example="gelu", works=False)


def _case(name: str, rows: int, in_features: int, out_features: int, *, bias: bool = False, **params: object) -> Case:
    sizes = {"rows": rows, "in_features": in_features, "out_features": out_features}
    return Case(name, sizes, params, given=("bias",) if bias else ())


def derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    """Rows are all leading axes together."""
    shape = arguments["input"].shape
    return {"rows": math.prod(shape[:-1]), "input_ndim": len(shape)}


DERIVED_FROM = {"rows": ("...",), "input_ndim": ()}


def wide(dtype: torch.dtype) -> torch.dtype:
    """What the reference computes in."""
    return torch.promote_types(dtype, torch.float32)


def linear_reference(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> Tensor:
    """``activation(input @ weight^T + bias)``.

    Shapes: input (*, K), weight (N, K), bias (N,) → (*, N)
    Dtype: computes in float32 (float64 for float64), the activation included; rounds once, to out_dtype or input.dtype.
    """
    dtype = wide(input.dtype)
    output = functional.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if activation is not None:
        output = FORMULAS[activation](output)
    return output.to(out_dtype or input.dtype)


def _linear_fake(
    input: Tensor,
    weight: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    **_: object,
) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=out_dtype or input.dtype)


def _work(facts: Mapping[str, Any]) -> Work:
    """A multiplication and an addition for each row, input and output; every tensor once."""
    rows, inputs, outputs = facts["rows"], facts["in_features"], facts["out_features"]
    read = (rows * inputs + outputs * inputs) * facts["dtype"].itemsize
    return Work(
        2.0 * rows * inputs * outputs, float(read + rows * outputs * (facts["out_dtype"] or facts["dtype"]).itemsize)
    )


LINEAR = Operation(
    schema=OperationSchema(
        operation="mlp.linear",
        inputs=(
            TensorSchema("input", ("...", "in_features"), FLOATING),
            TensorSchema("weight", ("out_features", "in_features"), FLOATING, resident=True),
            TensorSchema("bias", ("out_features",), FLOATING, required=False),
        ),
        outputs=(TensorSchema("output", ("...", "out_features"), FLOATING, dtype_from="out_dtype"),),
        params=(
            ACTIVATION,
            OUT_DTYPE,
            packed_param(),
        ),
        axes=AXES,
    ),
    summary="Matrix product with a weight, with bias and activation",
    reference=linear_reference,
    fake=_linear_fake,
    cases=(
        _case("small", 33, 96, 64, bias=True),
        _case("small_gelu", 33, 96, 64, bias=True, activation="gelu"),
        _case("small_wide", 33, 96, 64, out_dtype=torch.float32),
        _case("minilm_gelu", 1024, 384, 1536, bias=True, activation="gelu"),
        _case("decode", 1, 2048, 2048),
        _case("batch_decode", 16, 2048, 2048),
        _case("prefill", 512, 1024, 4096),
        _case("llama3_8b_b1", 1, 4096, 14336),
    ),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    judge=judged_by_products(linear_reference, TOLERANCE, TOLERANCE_REASON),
    derive=derive,
    derived=("rows", "input_ndim"),
    derived_from=DERIVED_FROM,
    aliases=ALIASES,
    examples=weight,
    work=_work,
    scratch=linear_scratch,
    parts=linear_parts,
    sweep=sweep,
    stock=stock_linear,
)
