"""Matrix products with a weight: mlp.linear, and what its relatives share: examples, sweeps, pieces, judges.

Math: ``activation(input @ weight^T + bias)``; see :func:`linear`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, TensorSchema
from layerzero.core.facts import Facts
from layerzero.core.judge import Elementwise, Given, Judge, apart
from layerzero.core.operation import Case, Part, Random, Tolerance, Work
from layerzero.ops.activation.formulas import FORMULAS
from layerzero.ops.calls import drawn
from layerzero.ops.declaration import NDIM, ROUNDED_TWICE, operation, tensor, wide
from layerzero.ops.linear.packed import PackedWeight, packed_param
from layerzero.ops.linear.stock import linear as stock_linear

CODES = 127
"""Steps from 0 to a row's largest number; of codes with a zero point 255 from its least to its largest."""

SIGMAS = 8.0
"""Of 2e9 sums of independent errors none is as far from 0, in units of their deviation."""


class OfRows(Judge):
    """Sums of products of rows that may be rounded first; ``sums`` is how exact sums are.

    Its basis: the size of what is added up, what rounding moves, and the rows that are not finite.
    """

    __slots__ = ()
    sums: Elementwise

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return self.sums.dtypes

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:
        """Say which element is farthest off, where rounded rows moved some; of rows that are not finite none is."""
        terms, moved, unsaid = given.basis
        tolerance = self.sums.allowed(given)
        unsaid = unsaid & ~got.isfinite()  # NaN or infinity
        return apart(torch.where(unsaid, want.to(got.dtype), got), want, tolerance, terms + moved / tolerance.rtol)


@dataclass(frozen=True, slots=True)
class OfNarrowRows(OfRows):
    """Sums of products of rows that a kernel rounds to eight bits in its own way, or does not round.

    Attributes:
        sums: how exact sums are.
        terms: the size of what is added up.
        numbers: the weight (N, K).
        reason: why that far.
    """

    sums: Elementwise
    terms: Callable[[Mapping[str, Any]], Tensor]
    numbers: Callable[[Mapping[str, Any]], Tensor]
    reason: str = "libraries round rows by one scale or by one for each group, with a zero point or without"

    def __str__(self) -> str:
        return f"{self.sums}; and {SIGMAS:g} deviations of what rounding rows to eight bits adds"

    def basis(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        rows = arguments["input"].double()
        strange = (~rows.isfinite()).any(-1, keepdim=True)
        rows = rows.nan_to_num(0.0, 0.0, 0.0)
        step = rows.abs().amax(-1, keepdim=True) / CODES
        moved = SIGMAS / math.sqrt(12.0) * step * self.numbers(arguments).square().sum(-1).sqrt()
        return self.terms({**arguments, "input": rows}), moved, strange


def judged_by_products(
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    tolerance: Mapping[torch.dtype, Tolerance],
    reason: str,
    place: int = 0,
) -> Elementwise:
    """A judge of one result of a product with weights, whatever the size of the values is.

    Products whose relative errors are independent add up to ``sqrt(sum((input * weight)**2))`` times such an error,
    which the reference gives of the squares. Of 1024 products of standard normal values that is 32, and torch's own
    float32 product gave 0.04882 for 0.04879 (AMD EPYC, torch 2.13, 2026-11-23).

    Args:
        reference: the operation's. An activation changes a deviation by its slope there, which relu2's can exceed 1.
        place: of the result among those of the reference.
    """

    def deviation(arguments: Mapping[str, Any]) -> Tensor:
        given = {name: value for name, value in arguments.items() if name not in ("activation", "out_dtype")}
        given = {name: value for name, value in given.items() if value is not None and "packed" not in name}
        squares = {
            name: value.square() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in given.items()
        }
        found = reference(**squares)
        size = (found if isinstance(found, Tensor) else found[place]).sqrt()
        if arguments.get("activation") is None:
            return size
        product, step = reference(**given), 1e-3 * size
        assert isinstance(product, Tensor)
        formula = FORMULAS[arguments["activation"]]
        slope = (formula(product + step) - formula(product - step)).abs() / 2e-3
        return torch.maximum(size, slope)

    return Elementwise(tolerance, reason, deviation)


def weight(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """The weight of a case of mlp.linear."""
    return {
        "weight": scaled("weight", (case.sizes["out_features"], case.sizes["in_features"]), dtype, device, generator)
    }


def scaled(
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None,
    least: int = 1,
) -> Tensor:
    """Normal numbers with a deviation of one over the root of the sum's length."""
    made = drawn(TensorSchema(name), shape, dtype, device, {}, generator)
    return made if device.type == "meta" else made.mul_(deviation(shape[1], least))


def deviation(length: int, least: int = 1) -> float:
    """That of weights which sums of so many products are made with; of at least so many for what comes of few."""
    return 1.0 / math.sqrt(max(length, least, 1))


_ROWS = {"cuda": (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096), "cpu": (1, 4, 16, 64, 256, 1024)}
_WEIGHTS = {
    "cuda": ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 6144), (8192, 8192), (1024, 4096)),
    "cpu": ((384, 1536), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096)),
}
"""(in_features, out_features)"""
_MAX_FLOPS = {"cuda": 2.0**43, "cpu": 2.0**33}


_AXES = ("rows", "in_features", "out_features")
_MLPS = {"cuda": ((4096, 14336), (8192, 28672), (1024, 2816)), "cpu": ((384, 1536), (1024, 2816), (2048, 5632))}
"""(in_features, inner_features)"""

Sweep = Callable[[str, Mapping[str, Sequence[int]]], Iterator[Case]]


def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Every product of a kind of device that does not take seconds; of the wanted sizes."""
    kind = device if device in _ROWS else "cpu"
    if not narrow.keys() <= set(_AXES):
        return
    for inputs, outputs in _pairs(_WEIGHTS[kind], narrow.get("in_features"), narrow.get("out_features")):
        for rows in narrow.get("rows", _ROWS[kind]):
            if narrow or 2.0 * rows * inputs * outputs <= _MAX_FLOPS[kind]:
                sizes = {"rows": rows, "in_features": inputs, "out_features": outputs}
                yield Case(f"{rows}x{inputs}x{outputs}", sizes)


def mlp_sweep(device: str, narrow: Mapping[str, Sequence[int]], *, joined: bool) -> Iterator[Case]:
    """The same of two products with as many outputs as inputs."""
    kind = device if device in _ROWS else "cpu"
    if not narrow.keys() <= {"rows", "in_features", "inner_features"}:
        return
    for inputs, inner in _pairs(_MLPS[kind], narrow.get("in_features"), narrow.get("inner_features")):
        for rows in narrow.get("rows", _ROWS[kind]):
            if narrow or 6.0 * rows * inputs * inner <= _MAX_FLOPS[kind]:
                sizes = {"rows": rows, "in_features": inputs, "inner_features": inner, "out_features": inputs}
                sizes |= {"joined_features": 2 * inner} if joined else {}
                yield Case(f"{rows}x{inputs}x{inner}", sizes)


def _pairs(
    usual: Sequence[tuple[int, int]], first: Sequence[int] | None, second: Sequence[int] | None
) -> Iterator[tuple[int, int]]:
    """The usual pairs of sizes; every pair of the wanted ones, squares where one of the two was."""
    if first is None and second is None:
        yield from usual
    elif first is None or second is None:
        yield from ((each, each) for each in first or second or ())
    else:
        yield from itertools.product(first, second)


ROWS, OUTPUTS = 32, 256


def linear_scratch(sizes: Mapping[str, int]) -> int:
    """Input, weight and output, all of which the reference widens."""
    rows, inputs, outputs = sizes["rows"], sizes["in_features"], sizes["out_features"]
    return rows * inputs + inputs * outputs + rows * outputs


def linear_parts(
    arguments: Mapping[str, Any], facts: Facts, cut: Callable[[slice], Mapping[str, Any]] | None = None, step: int = 1
) -> Sequence[Part]:
    """The first rows and outputs, and the last; ``cut`` cuts the weight where a multiple of ``step`` outputs begins."""
    rows, outputs = facts.size("rows"), facts.size("out_features")
    bias, found = arguments.get("bias"), []
    for row, output in ((0, 0), (max(rows - ROWS, 0), max(outputs - OUTPUTS, 0) // step * step)):
        stop = outputs if output else min(-(-OUTPUTS // step) * step, outputs)
        of_rows, of_outputs = slice(row, row + ROWS), slice(output, stop)
        changed = {"weight": arguments["weight"][of_outputs]} if cut is None else {**cut(of_outputs)}
        changed |= {"bias": None if bias is None else bias[of_outputs], "packed": None}
        lone = facts["input_ndim"] == 1
        changed["input"] = arguments["input"] if lone else arguments["input"].flatten(0, -2)[of_rows]
        text = f"rows from {row}, outputs from {output}"
        found.append(Part(text, {**arguments, **changed}, _place(of_rows, of_outputs)))
    return found


def _place(rows: slice, outputs: slice) -> Callable[[Tensor], Tensor]:
    """What cuts these rows and outputs out of a product."""
    return lambda tensor: tensor[outputs] if tensor.ndim == 1 else tensor.flatten(0, -2)[rows, outputs]


TOLERANCE = ROUNDED_TWICE | {torch.float16: Tolerance(1e-3, 2e-3), torch.bfloat16: Tolerance(1e-2, 2e-2)}
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
    NDIM,
)

ALIASES = {"m": "rows", "n": "out_features", "k": "in_features"}
"""Letters of matrix products, for rules: ``m: "<=16"``."""

OUT_DTYPE = Param("out_dtype", torch.dtype, None, example=torch.float32)
ACTIVATION = Param("activation", str, None, example="gelu", works=False)


def sized_case(
    name: str, rows: int, in_features: int, out_features: int, *, bias: bool = False, **params: object
) -> Case:
    """A case of so many rows times a weight."""
    sizes = {"rows": rows, "in_features": in_features, "out_features": out_features}
    return Case(name, sizes, params, given=("bias",) if bias else ())


def linear(
    input: Tensor,
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
    dtype = wide(input.dtype)
    output = functional.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if activation is not None:
        output = FORMULAS[activation](output)
    return output.to(out_dtype or input.dtype)


def _work(facts: Mapping[str, Any]) -> Work:
    """A multiplication and an addition for each row, input and output; every tensor once."""
    rows, inputs, outputs = facts["rows"], facts["in_features"], facts["out_features"]
    read = (rows * inputs + outputs * inputs) * facts["dtype"].itemsize
    return Work(
        2.0 * rows * inputs * outputs, float(read + rows * outputs * (facts["out_dtype"] or facts["dtype"]).itemsize)
    )


LINEAR = operation(
    "mlp.linear",
    "Matrix product with a weight, with bias and activation",
    linear,
    inputs=(
        "input: ... in_features",
        tensor("weight: out_features in_features", resident=True),
        tensor("bias: out_features", required=False),
    ),
    outputs=(tensor("output: ... out_features", dtype_from="out_dtype"),),
    params=(ACTIVATION, OUT_DTYPE, packed_param()),
    axes=tuple(replace(each, shared=each.name in ("in_features", "out_features")) for each in AXES),
    cases=(
        sized_case("small", 33, 96, 64, bias=True),
        sized_case("small_gelu", 33, 96, 64, bias=True, activation="gelu"),
        sized_case("small_wide", 33, 96, 64, out_dtype=torch.float32),
        sized_case("minilm_gelu", 1024, 384, 1536, bias=True, activation="gelu"),
        sized_case("decode", 1, 2048, 2048),
        sized_case("batch_decode", 16, 2048, 2048),
        sized_case("prefill", 512, 1024, 4096),
        sized_case("llama3_8b_b1", 1, 4096, 14336),
    ),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    judge=judged_by_products(linear, TOLERANCE, TOLERANCE_REASON),
    aliases=ALIASES,
    examples=weight,
    work=_work,
    scratch=linear_scratch,
    parts=linear_parts,
    sweep=sweep,
    stock=stock_linear,
)
