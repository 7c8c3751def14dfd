"""Experts whose weights are quantised, moe.experts.quant, and the function that all kinds of experts share.

``moe.experts.quant.int8`` are those with whole numbers by group whose rows a kernel may round to eight bits.

Weights are stacks of what :mod:`layerzero.ops.quantize.schemes` lays out, each tensor with the experts in front. The
reference makes the numbers of one expert after the other in the dtype that products are in, float32 or wider.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, Role, TensorSchema, told
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Operation, Random, Work
from layerzero.core.reasons import ReasonCode
from layerzero.core.values import Check
from layerzero.ops.declaration import function, operation, tensor
from layerzero.ops.draw import Draw
from layerzero.ops.linear.declare import CODES, SIGMAS, OfRows
from layerzero.ops.linear.fused import TOLERANCE, TOLERANCE_REASON
from layerzero.ops.linear.packed import PackedWeight
from layerzero.ops.linear.weight_formats import WEIGHT_FACTS, as_argument, facts_of_weight, random_weight, value_checks
from layerzero.ops.moe.experts import (
    BIASES,
    EXPERTS,
    PACKED_OF,
    draw_around,
    draw_experts,
    gate_and_up,
    gated,
    moe_experts,
    problems_of,
    sized_case,
    squares,
    stock,
    summed,
    sweep,
    weights_of,
)
from layerzero.ops.quantize.groups import GROUPED
from layerzero.ops.quantize.schemes import SCHEMES, format_problems, scheme_of
from layerzero.ops.quantize.weight import QuantizedWeight, stack_problems
from layerzero.ops.quantize.weight_format import ARGUMENTS, Fields, WeightFormat, arguments_of, fields_of

WEIGHTS = ("gate_up_weight", "down_weight")


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    first, second = weights_of(arguments, torch.float32)
    return {
        "joined_features": first.shape[1],
        "inner_features": second.shape[2],
        **facts_of_weight(first.of, arguments["gate_up_weight"], arguments.get("gate_up_scale")),
        "formats_alike": first.of == second.of and first.given.data.dtype == second.given.data.dtype,
    }


_SIZES = ("gate_up_lines", "gate_up_words", "hidden")
_DERIVED: dict[str, tuple[str, ...]] = {"joined_features": _SIZES, "inner_features": _SIZES}
_DERIVED |= dict.fromkeys((*WEIGHT_FACTS, "formats_alike"), ())


def _work(facts: Mapping[str, Any]) -> Work:
    """As of experts that are not quantised, with the bits of their formats."""
    tokens, chosen = facts["tokens"], facts["tokens"] * facts["top_k"]
    sizes = facts["hidden"] * facts["joined_features"], facts["hidden"] * facts["inner_features"]
    formats = map(WeightFormat.of, (facts["gate_up_format"], facts["down_format"]))
    bits = [scheme_of(of).bits(of, facts["scale_dtype"]) for of in formats]
    weights = min(facts["experts"], chosen) * sum(size * each / 8 for size, each in zip(sizes, bits, strict=True))
    return Work(2.0 * chosen * sum(sizes), weights + float(2 * tokens * facts["hidden"] * facts["dtype"].itemsize))


def _named(weight: str, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a weight under the arguments that it has in a call."""
    names = arguments_of(weight)
    return {names[field]: made[name] for field, name in ARGUMENTS.items() if name in made}


def random_stack(of: WeightFormat, shape: tuple[int, int, int], device: Any, generator: Any) -> dict[str, Tensor]:
    """A stack of a format by the fields' arguments of a single weight; of shapes alone on the meta device."""
    experts, outputs, inputs = shape
    if torch.device(device).type == "meta" or not experts:
        one = random_weight(of, outputs, inputs, device, generator)
        return {name: each.expand(experts, *each.shape).contiguous() for name, each in one.items()}
    few = [random_weight(of, outputs, inputs, device, generator) for _ in range(min(experts, _DRAWN))]
    return {name: torch.stack([few[number % len(few)][name] for number in range(experts)]) for name in few[0]}


_DRAWN = 8
"""Experts with numbers of their own in a drawn stack: 128 of a model's take a minute."""


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """Both weights of a case, and experts that differ; of sizes that a format does not have none, which is no call."""
    experts, joined, inner, hidden = (
        case.sizes[name] for name in ("experts", "joined_features", "inner_features", "hidden")
    )
    made: dict[str, Any] = {}
    for weight, shape in zip(WEIGHTS, ((experts, joined, hidden), (experts, hidden, inner)), strict=True):
        of = WeightFormat.of(str(case.params[arguments_of(weight)["format"]]))
        if format_problems(of) or scheme_of(of).size_problems(of, *shape[1:]):
            made[weight] = torch.empty(0, 0, 0, dtype=torch.uint8, device=device)
        else:
            made |= _named(weight, random_stack(of, shape, device, generator))
    plain = EXPERTS.examples
    assert plain is not None
    small = replace(case, sizes={**case.sizes, "joined_features": 2, "inner_features": 1, "hidden": 1})
    around = plain(small, dtype, device, generator)
    return made | {name: around[name] for name in ("expert_ids", "expert_weights")}


def _case(
    name: str, tokens: int, model: tuple[int, int, int, int], *given: str, formats: str, **params: object
) -> Case:
    first, _, second = formats.partition(" ")
    return sized_case(name, tokens, model, *given, gate_up_format=first, down_format=second or first, **params)


_SWEPT = ("compressed-tensors:bits=4,group=128", "mxfp4", "fp8:group=128,rows=128")


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    for each in sweep(device, narrow):
        for text in _SWEPT:
            of = WeightFormat.of(text)
            params = {**each.params, "gate_up_format": text, "down_format": text}
            yield replace(each, name=f"{each.name}_{of.scheme}", params=params)


def packed_of(weight: str) -> Param:
    """The argument that brings a stack's packed form."""
    names = arguments_of(weight)

    def make(arguments: Mapping[str, Any], _capturable: bool) -> PackedWeight:
        if arguments.get(names["format"]) is None:  # of a call of the other operation
            return PackedWeight(arguments[weight])
        first, second = weights_of(arguments, torch.float32)
        mine = first if weight == WEIGHTS[0] else second
        return PackedWeight(QuantizedWeight.unchecked(mine.of, mine.shape, mine.given))

    made_of = tuple(names[each] for each in Fields._fields)
    return Param(names["packed"], PackedWeight, None, Role.HANDLE, made_of=made_of, make=make, works=False)


def _tensors(weight: str) -> tuple[TensorSchema, ...]:
    names = arguments_of(weight)
    return tuple(
        tensor(names[each], None, same_dtype=False, required=False, resident=True) for each in Fields._fields[1:]
    )


def _check_values(*, gate_up_format: str, down_format: str, **tensors: Any) -> Sequence[str | Check]:
    texts = zip(WEIGHTS, (gate_up_format, down_format), strict=True)
    return [each for weight, text in texts for each in value_checks(text, tensors, weight)]


def _format(weight: str) -> Param:
    name, code = arguments_of(weight)["format"], ReasonCode.QUANT_FORMAT_UNSUPPORTED
    return Param(name, str, example="mxfp4", code=code)


_PLAIN = {each.name: each for each in EXPERTS.schema.inputs}
_INT4 = "compressed-tensors:bits=4,group=32"


def _when_off(arguments: Mapping[str, Any], joined: Tensor, off: Tensor) -> Tensor:
    """How far what lies between the products moves when the first is off: squares, of gate and up either way."""
    given, of_gate = _gate(arguments), torch.zeros_like(joined)
    gate_and_up(of_gate, given["activation"])[0].fill_(1.0)
    through = gated(joined, **given)
    moved = torch.zeros_like(through)
    for part, sign in itertools.product((of_gate, 1.0 - of_gate), (1.0, -1.0)):
        moved += (gated(joined + sign * part * off, **given) - through).square()
    return moved


def _gate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"activation": "silu"} | {name: arguments[name] for name in _GATE if name in arguments}


_GATE = ("activation", "alpha", "limit")
_STEP = 0.01


def _summed(arguments: Mapping[str, Any]) -> Tensor:
    """What ``summed`` gives, and how far a result moves for each weight of the first product that is off by its size.

    Kernels round what they make of codes to the call's dtype. A gate that is a small sum of large terms moves by more
    than its size. Results of bfloat16 were off by 1.2 times the tolerance, as far as rounding weights moves them (torch
    2.11 and 2.13, an H200 and a Xeon, 2026-12-01).
    """
    rows = arguments["input"]

    def visit(_: Any, joined: Tensor, first: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
        off = functional.linear(rows.square(), first.square()).sqrt()
        between = _when_off(arguments, joined, _STEP * off) / (2.0 * _STEP**2)
        return squares(arguments, joined, first, down, bias) + functional.linear(between, down.square())

    return summed(arguments, visit)


QUANTIZED: Operation = operation(
    "moe.experts.quant",
    "What chosen experts with quantised weights make of each token, added up",
    moe_experts,
    inputs=(
        _PLAIN["input"],
        tensor("gate_up_weight: experts gate_up_lines gate_up_words", None, same_dtype=False, resident=True),
        tensor("down_weight: experts down_lines down_words", None, same_dtype=False, resident=True),
        *(_PLAIN[name] for name in ("expert_ids", "expert_weights", "gate_up_bias", "down_bias")),
        *(each for weight in WEIGHTS for each in _tensors(weight)),
    ),
    outputs=("output: tokens hidden",),
    params=(
        *(each for each in EXPERTS.schema.params if each.name not in PACKED_OF),
        *map(_format, WEIGHTS),
        *map(packed_of, WEIGHTS),
    ),
    axes=(
        *EXPERTS.schema.axes,
        *(Axis(f"{part}_{of}", scales=True, implied=True) for part in ("gate_up", "down") for of in ("lines", "words")),
    ),
    cases=(
        _case("small", 17, (5, 64, 96, 2), formats=_INT4),
        _case("small_zeros", 9, (4, 64, 32, 2), formats="awq:bits=4,group=32,zeros=stored"),
        _case("small_permuted", 5, (3, 64, 32, 2), formats="gptq:bits=4,group=32,zeros=stored,permuted=True"),
        _case("small_int8", 9, (4, 64, 64, 2), formats="compressed-tensors:bits=8"),
        _case("small_fp8", 9, (4, 64, 64, 2), "gate_up_bias", formats="fp8"),
        _case("small_blocks", 9, (4, 64, 32, 2), formats="fp8:group=32,rows=32"),
        _case("small_mxfp4", 9, (4, 64, 64, 3), *BIASES, formats="mxfp4", activation="swiglu_oai", limit=2.0),
        _case("small_nvfp4", 9, (4, 64, 64, 2), formats="nvfp4"),
        _case("small_gguf", 5, (3, 256, 32, 2), formats="gguf:Q4_K gguf:Q8_0"),
        _case("small_nf4", 5, (3, 64, 32, 2), formats="nf4:group=64"),
        _case("decode", 1, (16, 2048, 768, 8), formats="compressed-tensors:bits=4,group=128"),
        _case("batch_decode", 16, (8, 1024, 512, 2), formats="compressed-tensors:bits=4,group=128"),
        _case("batch_decode_fp8", 16, (8, 1024, 512, 2), formats="fp8:group=128,rows=128"),
    ),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    judge=Elementwise(TOLERANCE, TOLERANCE_REASON, _summed),
    fixed={"activations": None},
    derive=_derive,
    derived_from=_DERIVED,
    check_values=_check_values,
    examples=_examples,
    work=_work,
    scratch=EXPERTS.scratch,
    sweep=_sweep,
    stock=stock,
)


def _moved(arguments: Mapping[str, Any], rows: Tensor) -> Tensor:
    """What rounding the rows of both products to eight bits adds, as a deviation for each element."""
    first, second = weights_of(arguments, torch.float64)
    biases = arguments.get("gate_up_bias"), arguments.get("down_bias")
    step = rows.abs().amax(-1, keepdim=True) / (CODES * math.sqrt(12.0))
    total = torch.zeros_like(rows)
    for number in range(first.shape[0]):
        weight, down = first[number], second[number]
        joined = functional.linear(rows, weight, None if biases[0] is None else biases[0][number])
        moved = gated(joined, **_gate(arguments)).abs().amax(-1, keepdim=True).square() / (12.0 * CODES**2)
        moved = moved + _when_off(arguments, joined, step * weight.square().sum(-1).sqrt())
        share = torch.where(arguments["expert_ids"] == number, arguments["expert_weights"], 0.0).sum(-1, keepdim=True)
        total += share.square() * functional.linear(moved, down.square())
    return total.sqrt()


@dataclass(frozen=True, slots=True)
class OfNarrowExperts(OfRows):
    """Experts whose rows a kernel rounds to eight bits before both products, or does not round."""

    sums: Elementwise
    reason: str = "libraries round the rows of both products by one scale for each, or leave them as they are"

    def __str__(self) -> str:
        return f"{self.sums}; and {SIGMAS:g} deviations of what rounding the rows of both products to eight bits adds"

    def basis(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        rows, shares = arguments["input"].double(), arguments["expert_weights"].double()
        strange = (~rows.isfinite()).any(-1, keepdim=True) | (~shares.isfinite()).any(-1, keepdim=True)
        given = {**arguments, "expert_weights": shares.nan_to_num(0.0, 0.0, 0.0)}
        given["input"] = rows = rows.nan_to_num(0.0, 0.0, 0.0)
        return summed(given), SIGMAS * _moved(given, rows), strange


_OF_CODES = [each for each in QUANTIZED.cases if str(each.params["gate_up_format"]).partition(":")[0] in GROUPED]
ROUNDED = replace(
    QUANTIZED,
    schema=replace(QUANTIZED.schema, operation="moe.experts.quant.int8"),
    summary="What chosen experts make of each token, with weights by group and rows that may be rounded to eight bits",
    judge=OfNarrowExperts(Elementwise(TOLERANCE, TOLERANCE_REASON, summed)),
    cases=tuple(_OF_CODES),
    fixed={"activations": "int8"},
)


def _chosen(arguments: dict[str, Any]) -> Operation:
    """The operation of a call; those of experts have no such argument as ``activations``."""
    formats = [arguments[name] for name in ("gate_up_format", "down_format")]
    activations, arguments["activations"] = arguments["activations"], None
    if activations is None:
        return EXPERTS if formats == [None, None] else QUANTIZED
    unfit = [each for each in formats if str(each).partition(":")[0] not in GROUPED]
    if activations != "int8":
        refuse("moe_experts", [f"activations: wanted None or 'int8', got {told(activations)}"])
    if unfit:
        wanted = "None, or 'int8' with weights of whole numbers by group"
        refuse("moe_experts", [f"activations: wanted {wanted}, got 'int8' with {told(unfit[0])}"])
    return ROUNDED


def _problems(arguments: dict[str, Any]) -> list[str]:
    if arguments.get("gate_up_format") is None:
        return problems_of(arguments, arguments["gate_up_weight"].shape[1], arguments["down_weight"].shape[2])
    experts, hidden = len(arguments["gate_up_weight"]), arguments["input"].shape[1]
    first, inputs = _format_problems(arguments, "gate_up_weight", hidden, experts)
    joined = inputs
    second, outputs = _format_problems(arguments, "down_weight", joined // 2, experts) if not first else ([], hidden)
    problems = first + second
    if problems:
        return problems
    if outputs != hidden:
        problems.append(f"down_weight: wanted {hidden} rows an expert, those of input, got {outputs}")
    for name, width in (("gate_up_bias", joined), ("down_bias", hidden)):
        bias = arguments.get(name)
        if bias is not None and tuple(bias.shape) != (experts, width):
            problems.append(f"{name}: wanted shape {(experts, width)}, got {tuple(bias.shape)}")
    return problems or problems_of(arguments, joined, joined // 2)


def _format_problems(arguments: dict[str, Any], weight: str, inputs: int, experts: int) -> tuple[list[str], int]:
    """What is wrong with a weight of so many columns, and its rows."""
    names = arguments_of(weight)
    try:
        of = WeightFormat.of(arguments[names["format"]])
    except InvalidCallError as error:
        raise InvalidCallError(
            "moe_experts", [each.replace("format", names["format"], 1) for each in error.problems]
        ) from None
    if problems := format_problems(of):
        raise InvalidCallError(
            "moe_experts", [f"{names['format']}: {each}" for each in problems], ReasonCode.QUANT_FORMAT_UNSUPPORTED
        )
    arguments[names["format"]] = str(of)
    given = fields_of(arguments, weight)
    wrong = [as_argument(each, names) for each in stack_problems(of, given, inputs, experts)]
    return wrong, scheme_of(of).outputs(of, tuple(given.data.shape[1:]), inputs)


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: as many with weights of every format as with plain ones."""
    if draw.chance(0.5):
        return draw_experts(draw, dtype)
    of, outputs, inputs = SCHEMES[draw.of(tuple(SCHEMES))].drawn(draw)
    unit = 32 if of.scheme in ("gptq", "awq", "marlin") else 1
    hidden, inner, experts = inputs, max(outputs // (2 * unit), 1) * unit, draw.of((1, 2, 3, 5))
    second = of if not scheme_of(of).size_problems(of, hidden, inner) else WeightFormat("fp8", rows=draw.of((0, 1)))
    weights: dict[str, Any] = {}
    for weight, each, shape in (
        ("gate_up_weight", of, (experts, 2 * inner, hidden)),
        ("down_weight", second, (experts, hidden, inner)),
    ):
        made = random_stack(each, shape, draw.device, draw.data)
        weights |= _named(weight, made) | {arguments_of(weight)["format"]: str(each)}
    arguments = draw_around(draw, dtype, (experts, hidden, inner), weights)
    if draw.chance(0.3):
        for param in map(packed_of, WEIGHTS):
            assert param.make is not None
            arguments[param.name] = param.make(arguments, False)
    if {of.scheme, second.scheme} <= GROUPED.keys() and draw.chance(0.4):
        arguments["activations"] = "int8"
    return arguments


MOE_EXPERTS = function(
    "moe_experts",
    EXPERTS,
    QUANTIZED,
    ROUNDED,
    varies=("tokens",),
    choose=_chosen,
    fits=_problems,
    draw=_draw,
    weight=1,
    state=frozenset({"matmul"}),
)
