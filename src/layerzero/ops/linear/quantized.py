"""Matrix products with a weight of int8 or float8, whose numbers are multiples of scales.

    mlp.linear.quant            rows as they are: ``input @ (weight * weight_scale)^T + bias``
    mlp.linear.quant.int8       rows quantized first, each by a scale of its own; sums of whole numbers
    mlp.linear.quant.fp8_e4m3   the same in float8

Operations of their own, so that no kernel for weights of the input's dtype is ever offered one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import TensorSchema, told
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Function, Operation, Random, Routed, Work
from layerzero.core.reasons import ReasonCode
from layerzero.ops.calls import drawn
from layerzero.ops.declaration import check_dense, operation, tensor, wide
from layerzero.ops.draw import Draw
from layerzero.ops.linear import declare
from layerzero.ops.linear import route as of_linear
from layerzero.ops.linear.packed import PackedWeight, packed_param, packed_problems
from layerzero.ops.linear.route import as_default, leading, out_dtype_problems
from layerzero.ops.linear.stock import quantized_linear as stock_linear
from layerzero.ops.linear.weight_formats import FORMATTED, as_argument, packed_of, random_weight
from layerzero.ops.quantize.declare import NEAR
from layerzero.ops.quantize.formats import FORMATS, Format, computed_scale, divided, quantize_scaled, rounded, widened
from layerzero.ops.quantize.schemes import SCHEMES, format_problems, instead, scheme_of
from layerzero.ops.quantize.weight_format import WeightFormat, fields_of


def routed_operation(arguments: dict[str, Any]) -> Operation:
    """The operation of a call with a format, whose arguments fit it. Raises: InvalidCallError for any other call."""
    try:
        of = WeightFormat.of(arguments["weight_format"])
    except InvalidCallError as error:
        raise InvalidCallError("quantized_linear", error.problems) from None
    if problems := format_problems(of):
        problems[-1] += f"; {instead(of)}"
        raise InvalidCallError("quantized_linear", problems, ReasonCode.QUANT_FORMAT_UNSUPPORTED)
    activations, name = arguments.pop("activations"), scheme_of(of).operation
    if activations is not None and (activations != "int8" or f"{name}.int8" not in FORMATTED):
        wanted = "None or 'int8'" if f"{name}.int8" in FORMATTED else "None"
        problems.append(f"activations: wanted {wanted} with weight_format={str(of)!r}, got {told(activations)}")
    refuse("quantized_linear", problems)
    found = FORMATTED[name if activations is None else f"{name}.int8"]
    problems = found.schema.validate(**arguments)
    if not problems:
        given, inputs = fields_of(arguments), arguments["input"].shape[-1]
        wrong = scheme_of(of).field_problems(of, given, inputs)
        problems = [as_argument(each) for each in wrong]
        outputs, bias = scheme_of(of).outputs(of, tuple(given.data.shape), inputs), arguments["bias"]
        if not wrong and bias is not None and bias.shape != (outputs,):
            problems.append(f"bias: wanted shape {(outputs,)}, got {tuple(bias.shape)}")
    refuse("quantized_linear", problems)
    arguments["weight_format"] = str(of)
    return found


def draw_formatted(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call with a format of every scheme."""
    of, outputs, inputs = SCHEMES[draw.of(tuple(SCHEMES))].drawn(draw)
    arguments: dict[str, Any] = {
        "input": draw.laid_out(draw.normal((*leading(draw), inputs), dtype)),
        "weight_format": str(of),
        **random_weight(of, outputs, inputs, draw.device, draw.data),
    }
    for name in ("weight", "weight_scale", "weight_zero"):
        given = arguments.get(name)
        if given is not None and not (given.is_floating_point() and given.itemsize == 1):  # torch flips no float8
            arguments[name] = draw.laid_out(given, expand=False)
    if f"{scheme_of(of).operation}.int8" in FORMATTED and draw.chance(0.3):
        arguments["activations"] = "int8"
    arguments |= draw.maybe(0.4, bias=lambda: draw.laid_out(draw.normal((outputs,), dtype)))
    draw.poison(arguments, ("input",))
    arguments |= draw.maybe(0.1, out_dtype=lambda: torch.promote_types(dtype, torch.float32))
    arguments |= draw.maybe(0.3, packed=lambda: packed_of(arguments))
    return arguments


WEIGHTS = frozenset({torch.int8, torch.float8_e4m3fn, torch.float8_e5m2})
"""What a weight may hold in place of floating numbers."""

ACTIVATIONS: dict[str | None, frozenset[torch.dtype]] = {
    None: WEIGHTS,
    "int8": frozenset({torch.int8}),
    "fp8_e4m3": frozenset({torch.float8_e4m3fn}),
}
"""What rows are quantized to, and the weights that they are multiplied with then."""


def of_outputs(weight_scale: Tensor) -> Tensor:
    """One number, or one for each output in a row: what products are multiplied with."""
    return weight_scale.reshape(()) if weight_scale.numel() == 1 else weight_scale.reshape(-1)


def quantized_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activations: str | None = None,
    out_dtype: torch.dtype | None = None,
    packed: PackedWeight | None = None,
    weight_format: str | None = None,
    weight_zero: Tensor | None = None,
    group_index: Tensor | None = None,
    second_scale: Tensor | None = None,
) -> Tensor:
    """Multiply with a quantised weight: ``input @ (weight * weight_scale)^T + bias``.

    ``weight, weight_scale = lz.quantize(linear.weight, "int8", per="row")`` makes both. A weight as a file holds it is
    a :class:`layerzero.QuantizedWeight`: ``lz.quantized_linear(x, weight)``, or its tensors with ``weight_format``.

    Shapes: input (*, K), weight (N, K), weight_scale (), (1,), (N,) or (N, 1), bias (N,) → (*, N); with a format, the
        tensors of the weight have the shapes of that
    Dtype: input and bias floating, the same; weight int8, float8_e4m3fn or float8_e5m2; weight_scale float32; sums are
        in float32, or of whole numbers; returns out_dtype or input.dtype.
    Args:
        activations: None multiplies the rows as they are. ``"int8"`` with a weight of int8, or ``"fp8_e4m3"`` with one
            of float8_e4m3fn, quantizes each row first, as ``lz.quantize(input, activations, per="row")``. That is
            faster, less exact, and nothing flows back to the input. A row that is not finite has no finite result. With
            a format of whole numbers by group ``"int8"`` lets kernels round rows to eight bits in their own way: by a
            scale for each row or group, with a zero point or without.
        out_dtype: dtype of the result: the input's, or float32 for float16 and bfloat16.
        packed: the :class:`layerzero.PackedWeight` of this weight, so that kernels that want it in another order make
            that once. It changes no result, and has no effect in compiled code.
        weight_format: of a weight as a file holds it, such as ``"gptq:bits=4,group=128,zeros=minus_one"``.
        weight_zero, group_index, second_scale: with a format, the tensors that it has besides. Nothing flows back to
            these, nor to weight and weight_scale then.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and for a packed weight of another tensor or
        of one that was written into since.
    """
    assert weight_scale is not None
    dtype, scales = wide(input.dtype), of_outputs(weight_scale)
    if activations is None:
        rows, scales = input.to(dtype), scales.to(dtype)
    else:
        codes, scale = quantize_scaled(input, FORMATS[activations], per="row")
        rows, scales = widened(codes, FORMATS[activations], dtype), scale.to(dtype) * scales.to(dtype)
        rows = rows.masked_fill(input.isnan(), torch.nan)  # no code of int8 says it
    output = functional.linear(rows, weight.to(dtype)) * scales
    return (output if bias is None else output + bias.to(dtype)).to(out_dtype or input.dtype)


def _terms(arguments: Mapping[str, Any]) -> Tensor:
    """The root of the sum of squares of what is added up: the size of an error whose parts are independent."""
    squares = {name: arguments[name].double().square() for name in ("input", "weight", "weight_scale")}
    bias = arguments.get("bias")
    return quantized_linear(**squares, bias=None if bias is None else bias.square()).sqrt()


@dataclass(frozen=True, slots=True)
class OfRoundedRows(declare.OfRows):
    """Sums of products of rows that were quantized: as of other sums, and what rows that lie between two numbers add.

    Attributes:
        format: what rows are quantized to.
        sums: how exact the sums are.
        reason: why that far.
    """

    format: Format
    sums: Elementwise
    reason: str = "a number that lies between two of the format may become either, and moves its products by that step"

    def __str__(self) -> str:
        return f"{self.sums}; a number of a row within {NEAR:g} of the middle between two may become either"

    def basis(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        numbers = arguments["input"].double()
        scale = computed_scale(numbers, self.format, "row", None).double()
        quotients = divided(numbers, scale)
        slack = quotients.abs() * NEAR
        low, high = (
            widened(rounded(each, self.format), self.format, torch.float64)
            for each in (quotients - slack, quotients + slack)
        )
        weight = arguments["weight"].double().abs() * arguments["weight_scale"].double().abs().reshape(-1, 1)
        moved = functional.linear((high - low).abs().nan_to_num(0.0) * scale, weight)
        strange = ~numbers.isfinite() if self.format.is_whole else torch.zeros_like(numbers, dtype=torch.bool)
        return _terms({**arguments, "input": numbers.nan_to_num(0.0)}), moved, strange.any(-1, keepdim=True)


def _examples(weights: frozenset[torch.dtype]) -> Callable[..., dict[str, Tensor]]:
    """A weight whose products are of order 1, a scale for each output; mostly in the dtype that is named first."""
    first = next(each for each, of in FORMATS.items() if of.dtype in weights)

    def examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
        name = "fp8_e4m3" if case.name in _OF_FLOAT8 else first
        shape = case.sizes["out_features"], case.sizes["in_features"]
        if device.type == "meta":  # the first product of meta tensors imports torch's compiler, for a second or two
            made = torch.empty(shape, dtype=FORMATS[name].dtype, device=device)
            return {"weight": made, "weight_scale": made.new_empty(shape[0], dtype=torch.float32)}
        numbers = drawn(TensorSchema("weight"), shape, torch.float32, device, {}, generator) * declare.deviation(
            shape[1]
        )
        if not shape[1]:
            return {"weight": numbers.to(FORMATS[name].dtype), "weight_scale": numbers.new_ones(shape[0])}
        weight, scale = quantize_scaled(numbers, FORMATS[name], per="row")
        return {"weight": weight, "weight_scale": scale.reshape(-1)}

    return examples


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    scales = "one" if arguments["weight_scale"].numel() == 1 else "outputs"
    return {"weight_dtype": dtype_name(arguments["weight"].dtype), "weight_scales": scales}


def _work(facts: Mapping[str, Any]) -> Work:
    """A multiplication and an addition for each row, input and output; a byte a number of the weight."""
    rows, inputs, outputs = facts["rows"], facts["in_features"], facts["out_features"]
    written = rows * outputs * (facts["out_dtype"] or facts["dtype"]).itemsize
    return Work(
        2.0 * rows * inputs * outputs, float(rows * inputs * facts["dtype"].itemsize + outputs * inputs + written)
    )


_OF_FLOAT8 = ("small_fp8", "decode_fp8")
"""Cases with a weight of float8 where one of int8 is no less legal."""


def _operation(activations: str | None) -> Operation:
    sums = Elementwise(declare.TOLERANCE, declare.TOLERANCE_REASON, _terms)
    weights = ACTIVATIONS[activations]
    rows = "" if activations is None else f" and rows quantized to {activations}"
    return operation(
        "mlp.linear.quant" + ("" if activations is None else f".{activations}"),
        f"Matrix product with a weight of int8 or float8{rows}",
        quantized_linear if activations is None else functools.partial(quantized_linear, activations=activations),
        inputs=(
            "input: ... in_features",
            tensor("weight: out_features in_features", weights, same_dtype=False, resident=True),
            tensor("weight_scale", frozenset({torch.float32}), same_dtype=False),
            tensor("bias: out_features", required=False),
        ),
        outputs=(tensor("output: ... out_features", dtype_from="out_dtype"),),
        params=(declare.OUT_DTYPE, packed_param(dense=True)),
        axes=declare.AXES,
        cases=(
            declare.sized_case("small", 33, 96, 64, bias=True),
            declare.sized_case("small_wide", 33, 96, 64, out_dtype=torch.float32),
            declare.sized_case("decode", 1, 2048, 2048),
            *(
                []
                if activations
                else [declare.sized_case("small_fp8", 33, 96, 64), declare.sized_case("decode_fp8", 1, 2048, 2048)]
            ),
            declare.sized_case("batch_decode", 16, 2048, 2048),
            declare.sized_case("prefill", 512, 1024, 4096),
        ),
        tolerance=declare.TOLERANCE,
        tolerance_reason=declare.TOLERANCE_REASON,
        judge=sums if activations is None else OfRoundedRows(FORMATS[activations], sums),
        fixed={"activations": activations},
        derive=_derive,
        derived_from={"weight_dtype": (), "weight_scales": ()},
        aliases=declare.ALIASES,
        examples=_examples(weights),
        work=_work,
        scratch=declare.linear_scratch,
        sweep=declare.sweep,
        stock=stock_linear,
    )


QUANTIZED: dict[str | None, Operation] = {each: _operation(each) for each in ACTIVATIONS}
"""By what rows are quantized to."""

OPERATIONS = (*QUANTIZED.values(), *FORMATTED.values())


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("quantized_linear", arguments)
    if arguments["weight_format"] is not None:
        operation = routed_operation(arguments)
        return _finished(operation, arguments, [])
    formatted = ("weight_format", "weight_zero", "group_index", "second_scale")
    alone = [name for name in formatted if arguments.pop(name) is not None]
    if alone:
        wanted = "wanted None without weight_format, got one; pass weight_format= or a QuantizedWeight"
        raise InvalidCallError("quantized_linear", [f"{name}: {wanted}" for name in alone])
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
            problems.append(f"weight_scale: wanted shape {wanted}, got {tuple(scale.shape)}{_by_blocks(arguments)}")
        if activations is not None and arguments["weight"].shape[1] == 0:
            problems.append(f"input: wanted numbers in its rows, got {tuple(arguments['input'].shape)}")
    return _finished(operation, arguments, problems)


def _by_blocks(arguments: Mapping[str, Any]) -> str:
    """What to do with scales of blocks of a row; empty for any other scales."""
    weight, scale = arguments["weight"], arguments["weight_scale"]
    if scale.ndim != 2 or len(scale) != len(weight):
        return ""
    inputs, blocks = weight.shape[1], scale.shape[1]
    if not 2 <= blocks <= inputs or inputs % blocks:
        return ""
    block = inputs // blocks
    if weight.dtype is torch.int8:
        return f"; lz.quantize_weight(numbers, 'int8', group_size={block}) makes a weight with a scale for each block"
    return f"; of blocks of {block} numbers: lz.QuantizedWeight.from_fp8(weight, weight_scale, (1, {block}))"


def _finished(operation: Operation, arguments: dict[str, Any], problems: list[str]) -> Routed:
    problems += packed_problems(arguments)
    problems += out_dtype_problems(arguments)
    refuse("quantized_linear", problems)
    as_default(arguments)
    return Routed(operation, arguments, varies=("...",))


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: every weight, scales of every shape, with and without quantized rows; or one of every format."""
    if draw.chance(0.7):
        return draw_formatted(draw, dtype)
    inputs, outputs = (draw.of((1, 2, 7, 16, 31, 32, 48, 64, 96, 128, 160)) for _ in range(2))
    activations = draw.of(tuple(ACTIVATIONS))
    format_name = activations or draw.of(("int8", "fp8_e4m3", "fp8_e5m2"))
    numbers = of_linear.random_weight(draw, (outputs, inputs), torch.float32)
    weight, scale = quantize_scaled(numbers, FORMATS[format_name], per=draw.of(("row", "tensor")))
    scale = scale.reshape(draw.of(((outputs,), (outputs, 1)))) if scale.ndim else scale.reshape(draw.of(((), (1,))))
    arguments: dict[str, Any] = {
        "input": draw.laid_out(draw.normal((*of_linear.leading(draw), inputs), dtype)),
        "weight": draw.laid_out(weight, expand=False) if weight.dtype is torch.int8 else weight,
        "weight_scale": draw.laid_out(scale),
        "activations": activations,
    }
    arguments |= draw.maybe(0.5, bias=lambda: draw.laid_out(draw.normal((outputs,), dtype)))
    draw.poison(arguments, ("input",))
    arguments |= draw.maybe(0.1, out_dtype=lambda: torch.promote_types(dtype, torch.float32))
    arguments |= draw.maybe(0.4, packed=lambda: PackedWeight(arguments["weight"], dense=draw.chance(0.5)))
    return arguments


FUNCTIONS = (
    Function("quantized_linear", quantized_linear, _route, OPERATIONS, draw=_draw, state=frozenset({"matmul"})),
)
