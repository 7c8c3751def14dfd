"""Matrix products with a weight as a file holds it, one operation for each kind of number.

    mlp.linear.quant.group       whole numbers with a scale, and maybe a zero point, for each group of a row
    mlp.linear.quant.group.int8  the same with rows that a kernel may round to eight bits
    mlp.linear.quant.block       float8 with a scale for each block of rows and columns
    mlp.linear.quant.mx          MX numbers and NVFP4
    mlp.linear.quant.codebook    bitsandbytes' nf4 and fp4
    mlp.linear.quant.gguf        GGUF's blocks, whose scales are two-level
    mlp.linear.quant.gguf.int8   the same with rows that a kernel may round to eight bits

The reference dequantises the weight in the dtype that the product is in, float32 or wider, and multiplies. Nothing
flows back to the weight's tensors: their dtypes hold no gradient of any use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Param, Role, TensorSchema
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Operation, Part, Random, Work
from layerzero.core.reasons import ReasonCode
from layerzero.core.values import Check
from layerzero.ops.declaration import operation, tensor, wide
from layerzero.ops.linear import declare
from layerzero.ops.linear.packed import PackedWeight
from layerzero.ops.linear.stock import quantized_linear
from layerzero.ops.quantize.conversion import usual
from layerzero.ops.quantize.gguf import KINDS
from layerzero.ops.quantize.groups import Grouped
from layerzero.ops.quantize.scheme import Scheme
from layerzero.ops.quantize.schemes import LOSSES, SCHEMES, format_problems, scheme_of, taken_instead
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import ARGUMENTS, Fields, WeightFormat, arguments_of, fields_of, rotated

_TENSORS = tuple(ARGUMENTS.values())


def formatted_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    weight_format: str,
    weight_zero: Tensor | None = None,
    group_index: Tensor | None = None,
    second_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    packed: PackedWeight | None = None,
) -> Tensor:
    """The weight's numbers in float32 or wider, and the product with them; rows are rotated as the weight was."""
    of, dtype = WeightFormat.of(weight_format), wide(input.dtype)
    given = Fields(weight, weight_scale, weight_zero, group_index, second_scale)
    with torch.no_grad():
        numbers = scheme_of(of).dequantized(replace(of, rotation=0), given, input.shape[-1], dtype)
    output = functional.linear(rotated(input.to(dtype), of.rotation), numbers, None if bias is None else bias.to(dtype))
    return output.to(out_dtype or input.dtype)


def _terms(arguments: Mapping[str, Any]) -> Tensor:
    """The root of the sum of squares of what is added up: the size of an error whose parts are independent.

    Kernels round the scales and zero points of whole numbers to the dtype of the rows, once: what that moves is one
    part for a whole group. In a row of equal numbers torch's int4 product in bfloat16 was off by 0.074, 1.5 times what
    is allowed without it (AMD EPYC Zen 4, torch 2.13.0, 2026-11-26).
    """
    of = WeightFormat.of(arguments["weight_format"])
    rows = rotated(arguments["input"].double(), of.rotation)
    numbers, scheme = _numbers(arguments), scheme_of(of)
    bias = arguments.get("bias")
    total = functional.linear(rows.square(), numbers.square(), None if bias is None else bias.double().square())
    if isinstance(scheme, Grouped):
        codes = scheme.codes(of, fields_of(arguments), rows.shape[-1])
        order = codes.groups.argsort(stable=True)
        left, right = (torch.split(each[..., order], codes.group, -1) for each in (rows, numbers))
        for group, (part, of_weight) in enumerate(zip(left, right, strict=True)):
            offset = codes.offset(torch.float64)[:, group]
            total += functional.linear(part, of_weight).square() + (part.sum(-1, keepdim=True) * offset).square()
    return total.sqrt()


def _numbers(arguments: Mapping[str, Any]) -> Tensor:
    of, inputs = WeightFormat.of(arguments["weight_format"]), arguments["input"].shape[-1]
    return scheme_of(of).dequantized(replace(of, rotation=0), fields_of(arguments), inputs, torch.float64)


WEIGHT_FACTS = (
    *("weight_scheme", "weight_kind", "weight_bits", "weight_group", "weight_zeros", "weight_permuted"),
    *("weight_dtype", "scale_dtype"),
)


def facts_of_weight(of: WeightFormat, weight: Tensor, scale: Tensor | None) -> dict[str, object]:
    """The facts ``WEIGHT_FACTS`` of a quantised weight."""
    dtypes = dtype_name(weight.dtype), "none" if scale is None else dtype_name(scale.dtype)
    told = of.scheme, of.kind, of.bits, of.group, of.zeros, of.permuted, *dtypes
    return dict(zip(WEIGHT_FACTS, told, strict=True))


def as_argument(problem: str, names: Mapping[str, str] = ARGUMENTS) -> str:
    """A field's problem by the name of its argument."""
    name, colon, rest = problem.partition(":")
    return f"{names.get(name, name)}{colon}{rest}"


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    of, weight = WeightFormat.of(arguments["weight_format"]), arguments["weight"]
    outputs = scheme_of(of).outputs(of, tuple(weight.shape), arguments["input"].shape[-1])
    return {"out_features": outputs, **facts_of_weight(of, weight, arguments.get("weight_scale"))}


_FACTS = (*WEIGHT_FACTS, "out_features")


def _work(facts: Mapping[str, Any]) -> Work:
    """A multiplication and an addition for each row, input and output; the weight's bits once."""
    rows, inputs, outputs = facts["rows"], facts["in_features"], facts["out_features"]
    of = WeightFormat.of(facts["weight_format"])
    bits = scheme_of(of).bits(of, facts["scale_dtype"])
    moved = rows * inputs * facts["dtype"].itemsize + outputs * inputs * bits / 8
    written = rows * outputs * (facts["out_dtype"] or facts["dtype"]).itemsize
    return Work(2.0 * rows * inputs * outputs, float(moved + written))


def _check_values(*, weight_format: str, weight: Tensor, **given: Any) -> Sequence[str | Check]:
    return value_checks(weight_format, {"weight": weight, **given}, "weight")


def value_checks(text: str, arguments: Mapping[str, Any], weight: str) -> list[str | Check]:
    """Scales that are finite, and places of groups that exist; a QuantizedWeight has looked at more.

    Of a weight of a format, or of a stack.
    """
    given, names = fields_of(arguments, weight), arguments_of(weight)
    checks: list[str | Check] = []
    for field, scale in (("scale", given.scale), ("second_scale", given.second_scale)):
        if scale is not None and scale.is_floating_point():
            wrong = ~scale.to(torch.float32).isfinite().all()
            checks.append(_found(wrong, f"{names[field]}: wanted finite numbers, got one that is not"))
    if given.group_index is not None and given.scale is not None:
        groups = given.scale.shape[-1 if WeightFormat.of(text).scheme == "compressed-tensors" else -2]
        wrong = ((given.group_index < 0) | (given.group_index >= groups)).any()
        checks.append(_found(wrong, f"{names['group_index']}: wanted groups that have a scale, got one that has none"))
    return checks


def _found(wrong: Tensor, text: str) -> Check:
    return Check(wrong, None, lambda _, __: text)


def _example_dtype(scheme: Scheme, kinds: frozenset[torch.dtype]) -> torch.dtype:
    return scheme.scale_dtype if scheme.scale_dtype in kinds else min(kinds, key=dtype_name)


def random_weight(of: WeightFormat, outputs: int, inputs: int, device: Any, generator: Any) -> dict[str, Tensor]:
    """A weight of a format as arguments; of shapes alone on the meta device."""
    scheme = scheme_of(of)
    if torch.device(device).type == "meta":
        shapes = scheme.wanted(of, outputs, inputs)
        made = {
            name: torch.empty(shape, dtype=_example_dtype(scheme, kinds), device="meta")
            for name, (shape, kinds) in shapes.items()
        }
        return {ARGUMENTS[name]: each for name, each in made.items()}
    on_host = generator if generator is not None and generator.device.type == "cpu" else None
    drawn = scheme.random(of, outputs, inputs, on_host)
    return {ARGUMENTS[name]: each.to(device) for name, each in drawn._asdict().items() if each is not None}


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """The weight of a case; of sizes that its format does not have none, which is no call."""
    of = WeightFormat.of(str(case.params["weight_format"]))
    outputs, inputs = case.sizes["out_features"], case.sizes["in_features"]
    if format_problems(of) or scheme_of(of).size_problems(of, outputs, inputs):
        return {"weight": torch.empty(0, 0, dtype=torch.uint8, device=device)}
    return random_weight(of, outputs, inputs, device, generator)


def _parts(arguments: Mapping[str, Any], facts: Facts) -> Sequence[Part]:
    of, given, inputs = WeightFormat.of(arguments["weight_format"]), fields_of(arguments), facts.size("in_features")
    scheme = scheme_of(of)

    def cut(outputs: slice) -> dict[str, Any]:
        found = scheme.cut(of, given, inputs, outputs.start, outputs.stop)
        return {ARGUMENTS[name]: each for name, each in found._asdict().items()}

    return declare.linear_parts(arguments, facts, cut, scheme.step(of, inputs))


def _sweep(text: str, device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """The products of a kind of device, with weights of one format."""
    return (replace(each, params={"weight_format": text}) for each in declare.sweep(device, narrow))


def packed_of(arguments: Mapping[str, Any], _capturable: bool = False) -> PackedWeight:
    """The PackedWeight of the weight of a call, which any kernel may take."""
    if arguments.get("weight_format") is None:  # of a call of another operation of the same function
        return PackedWeight(arguments["weight"], dense=True)
    of, inputs = WeightFormat.of(arguments["weight_format"]), arguments["input"].shape[-1]
    outputs = scheme_of(of).outputs(of, tuple(arguments["weight"].shape), inputs)
    return PackedWeight(QuantizedWeight.unchecked(of, (outputs, inputs), fields_of(arguments)), dense=True)


_PACKED = Param("packed", PackedWeight, None, Role.HANDLE, made_of=_TENSORS, make=packed_of, works=False)


def _operation(name: str, summary: str, texts: Mapping[str, tuple[str, int, int, int]]) -> Operation:
    """One operation for the schemes of this name; ``texts`` are its cases: a format, and rows, inputs and outputs."""
    schemes = [each for each in SCHEMES.values() if each.operation == name]
    has_scale = all("scale" in each.wanted(WeightFormat.of(each.example), 1024, 1024) for each in schemes)
    optional = ("weight_zero", "group_index", "second_scale")
    inputs: tuple[str | TensorSchema, ...] = (
        "input: ... in_features",
        tensor("weight", None, same_dtype=False, resident=True),
        tensor("weight_scale", None, same_dtype=False, required=has_scale, resident=True),
        tensor("bias: out_features", required=False),
        *(tensor(each, None, same_dtype=False, required=False, resident=True) for each in optional),
    )
    return operation(
        f"mlp.linear.quant.{name}",
        summary,
        formatted_linear,
        inputs=inputs,
        outputs=(tensor("output: ... out_features", dtype_from="out_dtype"),),
        params=(
            Param("weight_format", str, example=schemes[0].example, code=ReasonCode.QUANT_FORMAT_UNSUPPORTED),
            declare.OUT_DTYPE,
            _PACKED,
        ),
        axes=declare.AXES,
        cases=tuple(
            declare.sized_case(case, *sizes, bias=case == "small", weight_format=text)
            for case, (text, *sizes) in texts.items()
        ),
        tolerance=declare.TOLERANCE,
        tolerance_reason=declare.TOLERANCE_REASON,
        judge=Elementwise(declare.TOLERANCE, declare.TOLERANCE_REASON, _terms),
        fixed={"activations": None},
        derive=_derive,
        derived_from=dict.fromkeys(_FACTS, ()),
        aliases=declare.ALIASES,
        examples=_examples,
        check_values=_check_values,
        work=_work,
        scratch=declare.linear_scratch,
        parts=_parts,
        sweep=functools.partial(_sweep, schemes[0].example),
        stock=quantized_linear,
        advice=taken_instead,
    )


def _timed(text: str, **decodes: str) -> dict[str, tuple[str, int, int, int]]:
    """The cases whose times say something, of a format; and decodes of other formats by the names of their cases."""
    return {
        **{name: (each, 1, 2048, 2048) for name, each in {"decode": text, **decodes}.items()},
        "batch_decode": (text, 16, 2048, 2048),
        "prefill": (text, 512, 1024, 4096),
    }


_INT4 = "gptq:bits=4,group=128,zeros=minus_one"
FORMATTED: dict[str, Operation] = {
    "group": _operation(
        "group",
        "Matrix product with a weight of whole numbers that have a scale for each group",
        {
            "small": ("compressed-tensors:bits=4,group=32", 33, 96, 64),
            "small_permuted": ("gptq:bits=3,group=32,zeros=stored,permuted=True", 5, 96, 64),
            "small_row": ("compressed-tensors:bits=8", 5, 96, 64),
            **_timed(
                _INT4, decode_awq="awq:bits=4,group=128,zeros=stored", decode_int8="compressed-tensors:bits=8,group=128"
            ),
        },
    ),
    "block": _operation(
        "block",
        "Matrix product with a weight of float8 that has a scale for each block",
        {
            "small": ("fp8:group=32,rows=16", 33, 96, 64),
            "small_row": ("fp8:group=32", 5, 96, 64),
            **_timed("fp8:group=128,rows=128"),
        },
    ),
    "mx": _operation(
        "mx",
        "Matrix product with a weight of MX or NVFP4 numbers",
        {
            "small": ("mxfp4", 33, 96, 64),
            "small_8": ("mxfp8", 5, 96, 64),
            "small_nv": ("nvfp4", 5, 96, 64),
            "small_rotated": ("mxfp4:rotation=32", 5, 96, 64),
            **_timed("mxfp4", decode_nv="nvfp4"),
        },
    ),
    "codebook": _operation(
        "codebook",
        "Matrix product with a weight of nf4 or fp4 codes",
        {"small": ("nf4:group=64", 33, 96, 64), "small_fp4": ("fp4:group=64", 5, 96, 64), **_timed("nf4:group=64")},
    ),
    "gguf": _operation(
        "gguf",
        "Matrix product with a weight of GGUF's blocks",
        {
            "small": ("gguf:Q8_0", 33, 96, 64),
            **{f"small_{kind.lower()}": (f"gguf:{kind}", 5, 256, 64) for kind in KINDS},
            **_timed("gguf:Q4_K", decode_q8_0="gguf:Q8_0"),
        },
    ),
}
"""By the last word of their names."""

for _name in ("group", "gguf"):
    FORMATTED[f"{_name}.int8"] = replace(
        FORMATTED[_name],
        schema=replace(FORMATTED[_name].schema, operation=f"mlp.linear.quant.{_name}.int8"),
        summary=f"{FORMATTED[_name].summary}, and rows that may be rounded to eight bits",
        judge=declare.OfNarrowRows(Elementwise(declare.TOLERANCE, declare.TOLERANCE_REASON, _terms), _terms, _numbers),
        fixed={"activations": "int8"},
    )


@dataclass(frozen=True, slots=True)
class FormatExample:
    """A format that ``lz.quantize_weight`` makes, and a product with such a weight.

    Attributes:
        name: as ``lz.quantize_weight`` takes it.
        bits: of a number, with its part of the scales.
        loss: of normal numbers, as a share of their norm.
        numbers: what a device calls them that computes in them.
        rounded: what kernels may round rows to; empty where they may not.
        call: the product, a function's name and its arguments; of tensors without memory.
    """

    name: str
    bits: float
    loss: float
    numbers: str
    rounded: str
    call: tuple[str, Tensor, QuantizedWeight]


def without_memory(of: WeightFormat, shape: tuple[int, int], dtype: torch.dtype) -> QuantizedWeight:
    """A weight of a format on the meta device, as ``lz.quantize_weight`` makes it of numbers of a dtype."""
    found = {
        field: torch.empty(shape, dtype=dtype if dtype in dtypes else min(dtypes, key=str), device="meta")
        for field, (shape, dtypes) in scheme_of(of).wanted(of, *shape).items()
    }
    if of.scheme == "fp8":  # ``quantize_weight`` gives such scales, and calls take them without a format
        found["scale"] = found["scale"].float()
    return QuantizedWeight.unchecked(of, shape, Fields(**found))


def examples_of_formats(rows: int, dtype: torch.dtype, size: int = 4096) -> Iterator[FormatExample]:
    """A product with a square weight in each format, the one that loses least first."""
    for name, loss in LOSSES.items():
        of = usual(name)
        scheme, weight = scheme_of(of), without_memory(of, (size, size), dtype)
        given = torch.empty(rows, size, dtype=dtype, device="meta")
        rounded = "fp8_e4m3" if of.scheme == "fp8" else "int8" if f"{scheme.operation}.int8" in FORMATTED else ""
        numbers = {"fp8": "float8_e4m3"}.get(name, name)
        yield FormatExample(name, scheme.bits(of), loss, numbers, rounded, ("quantized_linear", given, weight))
