"""What the chosen experts make of each token: moe.experts, two products with a gate between, weighed and added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, TensorSchema, told
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Random, Work
from layerzero.ops.activation.formulas import FORMULAS, swiglu_oai
from layerzero.ops.calls import drawn
from layerzero.ops.declaration import operation, tensor, wide
from layerzero.ops.draw import Draw
from layerzero.ops.linear.declare import deviation
from layerzero.ops.linear.fused import FEW, TOLERANCE, TOLERANCE_REASON
from layerzero.ops.linear.packed import PackedWeight, packed_param, packed_problems
from layerzero.ops.linear.route import FEATURES
from layerzero.ops.quantize.schemes import scheme_of
from layerzero.ops.quantize.weight_format import Fields, WeightFormat, fields_of

ALPHA, LIMIT = 1.702, 7.0
"""Those of gpt-oss."""

GATES = ("silu", "gelu", "gelu_tanh", "swiglu_oai")
"""What a gate may be; the last reads gate and up by turns, the others one after the other."""


def gate_and_up(joined: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Both parts of the first product, as views. Shapes: (*, 2 F) → (*, F), (*, F)."""
    if activation == "swiglu_oai":
        return joined[..., ::2], joined[..., 1::2]
    middle = joined.shape[-1] // 2
    return joined[..., :middle], joined[..., middle:]


def gated(
    joined: Tensor,
    activation: str,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    formulas: Mapping[str, Callable[[Tensor], Tensor]] = FORMULAS,
) -> Tensor:
    """The gate's activation times what it lets through. Shapes: (*, 2 F) → (*, F)."""
    gate, up = gate_and_up(joined, activation)
    if activation == "swiglu_oai":
        return swiglu_oai(gate, up, alpha, limit)
    return formulas[activation](gate) * up


class Stack:
    """Quantised weights of experts, whose numbers are made one expert after the other: what indexing gives.

    Attributes:
        of, given: the format and the tensors of all.
        shape: (E, N, K).
        dtype: of the numbers.
    """

    def __init__(self, of: WeightFormat, given: Fields, inputs: int, dtype: torch.dtype) -> None:
        self.of, self.given, self.dtype = of, given, dtype
        data = tuple(given.data.shape)
        self.shape = data[0], scheme_of(of).outputs(of, data[1:], inputs), inputs

    def __getitem__(self, number: int) -> Tensor:
        """The numbers of an expert. Shapes: → (N, K)."""
        wide = torch.promote_types(self.dtype, torch.float32)
        with torch.no_grad():
            given = self.given.of_expert(number)
            return scheme_of(self.of).dequantized(self.of, given, self.shape[2], wide).to(self.dtype)


def weights_of(arguments: Mapping[str, Any], dtype: torch.dtype, kind: Callable[..., Any] = Stack) -> tuple[Any, Any]:
    """Both weights of a call, tensors as they are and quantised ones as stacks."""
    gate_up, down = arguments["gate_up_weight"], arguments["down_weight"]
    if arguments.get("gate_up_format") is None:
        return gate_up, down
    of, given = WeightFormat.of(arguments["gate_up_format"]), fields_of(arguments, "gate_up_weight")
    first = kind(of, given, arguments["input"].shape[1], dtype)
    of, given = WeightFormat.of(arguments["down_format"]), fields_of(arguments, "down_weight")
    return first, kind(of, given, first.shape[1] // 2, dtype)


def each_expert(
    visit: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    like: Tensor,
    weights: tuple[Any, Any, Tensor | None, Tensor | None],
    expert_ids: Tensor,
    shares: Tensor,
) -> Tensor:
    """The sum over a token's experts of its share times what ``visit`` gives for an expert's product and weights.

    Every expert visits every token, and what was not wanted is left out: no value on the device decides what runs.
    """
    gate_up_weight, down_weight, gate_up_bias, down_bias = weights
    dtype = like.dtype
    total = torch.zeros(like.shape, dtype=dtype, device=like.device)
    experts = gate_up_weight.shape[0]
    # on the meta device shapes follow from one: 32 took 0.6 of conformance's time
    for number in range(min(experts, 1) if like.is_meta else experts):
        of = expert_ids == number
        bias = None if gate_up_bias is None else gate_up_bias[number].to(dtype)
        first, down = gate_up_weight[number].to(dtype), down_weight[number].to(dtype)
        joined = functional.linear(like, first, bias)
        made = visit(joined, first, down, None if down_bias is None else down_bias[number].to(dtype))
        share = torch.where(of, shares, 0.0).sum(-1, keepdim=True)
        total = torch.where(of.any(-1, keepdim=True), total + share * made, total)
    return total


def squares(arguments: Mapping[str, Any], joined: Tensor, _: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """How far an expert's rows move if what lies between products, and what it makes, is off by its size: squares."""
    activation = arguments.get("activation", "silu")
    gate, up = gate_and_up(joined, activation)
    through = gated(joined, activation, arguments.get("alpha", ALPHA), arguments.get("limit", LIMIT))
    if activation == "swiglu_oai":  # up and one may cancel
        through = gate.abs() * (up.abs() + 1.0)
    made = functional.linear(through, weight, bias)
    return functional.linear(through.square(), weight.square()) + made.square()


def summed(arguments: Mapping[str, Any], visit: Callable[..., Tensor] = squares) -> Tensor:
    """How far a result deviates if each expert's rows do; an expert that a token has twice deviates the same way."""
    weights = *weights_of(arguments, torch.float64), arguments.get(BIASES[0]), arguments.get(BIASES[1])
    ids, sizes = arguments["expert_ids"], arguments["expert_weights"].abs()
    together = torch.where(ids.unsqueeze(-1) == ids.unsqueeze(-2), sizes.unsqueeze(-2), 0.0).sum(-1)
    return each_expert(lambda *each: visit(arguments, *each), arguments["input"], weights, ids, sizes * together).sqrt()


BIASES = ("gate_up_bias", "down_bias")
IDS = frozenset({torch.int32, torch.int64})
PACKED_OF = {"packed_gate_up": "gate_up_weight", "packed_down": "down_weight"}
"""The packed weights of a call, and what each is made of."""


def moe_experts(
    input: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    activations: str | None = None,
    packed_gate_up: PackedWeight | None = None,
    packed_down: PackedWeight | None = None,
    gate_up_format: str | None = None,
    gate_up_scale: Tensor | None = None,
    gate_up_zero: Tensor | None = None,
    gate_up_group_index: Tensor | None = None,
    gate_up_second_scale: Tensor | None = None,
    down_format: str | None = None,
    down_scale: Tensor | None = None,
    down_zero: Tensor | None = None,
    down_group_index: Tensor | None = None,
    down_second_scale: Tensor | None = None,
) -> Tensor:
    """Send each token through its experts, and add up what they make of it by their weights.

    ``sum over k of expert_weights[t, k] * down[e](activation(gate[e] x) * up[e] x)``, with x = input[t] and
    e = expert_ids[t, k].

    Shapes: input (T, D), gate_up_weight (E, 2 F, D), down_weight (E, D, F), expert_ids and expert_weights (T, k) as
        :func:`layerzero.moe_route` gives them, gate_up_bias (E, 2 F), down_bias (E, D) → (T, D). Rows of gate_up_weight
        are the gate's, then up's; for ``"swiglu_oai"`` by turns, as gpt-oss has them. Weights that lie the other way
        round are passed as ``weight.mT``.
    Dtype: floating, the same for all but expert_weights, which may have another; expert_ids int32 or int64. Sums are in
        float32, those over the experts, too; returns input.dtype.
    Args:
        expert_ids: from 0 to E - 1; -1 is an expert that is elsewhere (on another rank) and adds nothing.
        activation: ``"silu"``, ``"gelu"`` (by erf), ``"gelu_tanh"`` or ``"swiglu_oai"``.
        alpha, limit: of ``"swiglu_oai"``, as for :func:`layerzero.swiglu_oai`.
        activations: ``"int8"``, with weights of whole numbers by group, lets kernels round the rows of both products to
            eight bits; no gradient is promised.
        packed_gate_up, packed_down: the :class:`layerzero.PackedWeight` of each weight; kernels that want weights in
            another order want both. They change no result, and have no effect in compiled code.
        gate_up_format, down_format: of quantised weights, such as ``"mxfp4"``. A :class:`layerzero.QuantizedWeight` of
            all experts, (E, N, K), in place of a weight brings this and the tensors below.
        gate_up_scale, ..., down_second_scale: with a format, the tensors that it has besides. Nothing flows back to
            these, nor to the weights then.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a packed weight of another tensor or of
        one that was written into since, and on a CPU, and elsewhere in debug mode, for experts that there are not.
    Source: arXiv:1701.06538; gpt-oss, arXiv:2508.10925.
    """

    def visit(joined: Tensor, _: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(gated(joined, activation, alpha, limit), weight, bias)

    given, dtype = locals(), wide(input.dtype)
    weights = *weights_of(given, dtype), gate_up_bias, down_bias
    return each_expert(visit, input.to(dtype), weights, expert_ids, expert_weights.to(dtype)).to(input.dtype)


def stock(
    input: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = ALPHA,
    limit: float = LIMIT,
    **others: Any,
) -> Callable[[], Tensor]:
    """A loop over the experts that have tokens, as models' code has it."""
    named = {**others, "input": input, "gate_up_weight": gate_up_weight, "down_weight": down_weight}
    gate_up_weight, down_weight = weights_of(named, input.dtype)

    def run() -> Tensor:
        total = torch.zeros_like(input)
        for number in torch.unique(expert_ids).tolist():
            if number >= 0:
                tokens, slots = (expert_ids == number).nonzero(as_tuple=True)
                bias = None if gate_up_bias is None else gate_up_bias[number]
                joined = functional.linear(input[tokens], gate_up_weight[number], bias)
                bias = None if down_bias is None else down_bias[number]
                made = functional.linear(gated(joined, activation, alpha, limit), down_weight[number], bias)
                made = made * expert_weights[tokens, slots].unsqueeze(-1)
                total.index_add_(0, tokens, made.to(total.dtype))
        return total

    return run


def _work(facts: Mapping[str, Any]) -> Work:
    """Three products of an expert for each choice; each expert that may be chosen read once."""
    tokens, chosen = facts["tokens"], facts["tokens"] * facts["top_k"]
    each = facts["hidden"] * (facts["joined_features"] + facts["inner_features"])
    moved = min(facts["experts"], chosen) * each + 2 * tokens * facts["hidden"]
    return Work(2.0 * chosen * each, float(moved * facts["dtype"].itemsize))


def choices(tokens: int, experts: int, top_k: int, generator: torch.Generator | None, device: Any) -> Tensor:
    """Experts of each token, no one twice where there are enough; -1 where there are none."""
    if experts < top_k:
        return torch.randint(-1, max(experts, 0), (tokens, top_k), generator=generator, device=device)
    return torch.rand((tokens, experts), generator=generator, device=device).argsort(-1)[:, :top_k]


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """Weights whose products are of order 1, and experts that differ, each with a share."""
    names = "experts joined_features inner_features hidden tokens top_k"
    experts, joined, inner, hidden, tokens, top_k = map(case.sizes.__getitem__, names.split())
    made: dict[str, Tensor] = {}
    for name, shape in (("gate_up_weight", (experts, joined, hidden)), ("down_weight", (experts, hidden, inner))):
        made[name] = drawn(TensorSchema(name), shape, dtype, device, {}, generator)
        if device.type != "meta":
            made[name] = made[name].mul_(deviation(shape[-1], FEW))
    if device.type == "meta":
        whole = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
        return made | {"expert_ids": whole, "expert_weights": torch.empty((tokens, top_k), device=device)}
    where = device if generator is None else generator.device
    shares = torch.randn((tokens, top_k), generator=generator, device=where).softmax(-1)
    made["expert_ids"] = choices(tokens, experts, top_k, generator, where).to(device, torch.int32)
    return made | {"expert_weights": shares.to(device)}


def sized_case(name: str, tokens: int, model: tuple[int, int, int, int], *given: str, **params: object) -> Case:
    """A case of a model: its experts, hidden and inner features, experts of a token."""
    experts, hidden, inner, top_k = model
    sizes = {"tokens": tokens, "experts": experts, "top_k": top_k, "hidden": hidden, "inner_features": inner}
    return Case(name, sizes | {"joined_features": 2 * inner}, params, given)


_MODELS = {
    "cuda": {"mixtral": (8, 4096, 14336, 2), "qwen3": (128, 2048, 768, 8), "gpt_oss": (32, 2880, 2880, 4)},
    "cpu": {"olmoe": (64, 2048, 1024, 8), "small": (8, 512, 1024, 2)},
}
"""Experts, hidden and inner features, experts of a token: Mixtral 8x7B, Qwen3-30B-A3B, gpt-oss 20B, OLMoE 7B."""
_TOKENS = {"cuda": (1, 8, 64, 512, 4096), "cpu": (1, 4, 16, 128)}


def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Models that are worth measuring on a kind of device."""
    kind = device if device in _MODELS else "cpu"
    for name, model in _MODELS[kind].items() if narrow.keys() <= {"tokens"} else ():
        for tokens in narrow.get("tokens", _TOKENS[kind]):
            yield sized_case(f"{name}_t{tokens}", tokens, model)


EXPERTS = operation(
    "moe.experts",
    "What the chosen experts make of each token, added up",
    moe_experts,
    inputs=(
        "input: tokens hidden",
        tensor("gate_up_weight: experts joined_features hidden", resident=True),
        tensor("down_weight: experts hidden inner_features", resident=True),
        tensor("expert_ids: tokens top_k", IDS, same_dtype=False, indexes=("experts",), holes=True),
        tensor("expert_weights: tokens top_k", same_dtype=False, one_by_one=True),
        tensor("gate_up_bias: experts joined_features", required=False),
        tensor("down_bias: experts hidden", required=False),
    ),
    outputs=("output: tokens hidden",),
    params=(
        Param("activation", str, "silu", example="gelu_tanh", works=False),
        Param("alpha", float, ALPHA, works=False),
        Param("limit", float, LIMIT, works=False),
        *(packed_param(each, of) for each, of in PACKED_OF.items()),
    ),
    axes=(
        Axis("tokens", scales=True, live=True, apart=True),
        Axis("experts", scales=True),
        Axis("top_k", scales=True),
        Axis("hidden", scales=True),
        Axis("joined_features", scales=True, implied=True),
        Axis("inner_features", scales=True),
    ),
    cases=(
        sized_case("small", 17, (5, 64, 96, 2)),
        sized_case("biased", 9, (4, 64, 32, 3), *BIASES, activation="swiglu_oai", limit=2.0),
        sized_case("gelu", 9, (4, 64, 32, 2), "gate_up_bias", activation="gelu_tanh"),
        sized_case("qwen3_t1", 1, (128, 2048, 768, 8)),
        sized_case("mixtral_t16", 16, (8, 4096, 14336, 2)),
    ),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    judge=Elementwise(TOLERANCE, TOLERANCE_REASON, summed),
    fixed={"activations": None},
    complete=lambda sizes: {"inner_features": sizes["joined_features"] // 2},
    examples=_examples,
    work=_work,
    scratch=lambda sizes: sizes["hidden"] * sizes["joined_features"] * 2 + sizes["tokens"] * sizes["joined_features"],
    sweep=sweep,
    stock=stock,
)


def problems_of(arguments: dict[str, Any], joined: int, inner: int) -> list[str]:
    """What is wrong with sizes, the gate and packed weights."""
    activation, alpha, limit = (arguments[name] for name in ("activation", "alpha", "limit"))
    problems = []
    if joined != 2 * inner:
        wanted = f"{2 * inner} rows an expert, a gate and an up for each of the {inner} that down_weight reads"
        problems.append(f"gate_up_weight: wanted {wanted}, got {joined}")
    if activation not in GATES:
        problems.append(f"activation: wanted one of {', '.join(GATES)}, got {told(activation)}")
    elif activation != "swiglu_oai" and (alpha, limit) != (ALPHA, LIMIT):
        problems.append(f"alpha, limit: wanted them with swiglu_oai alone, got them with {activation}")
    if not math.isfinite(alpha):
        problems.append(f"alpha: wanted a finite number, got {alpha}")
    if not limit > 0:
        problems.append(f"limit: wanted a number above 0, got {limit}")
    return problems + packed_problems(arguments, PACKED_OF)


def _weight(draw: Draw, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    made: Tensor = (draw.normal(shape, torch.float32) * deviation(shape[-1], FEW)).to(dtype)
    return made.mT.contiguous().mT if draw.chance(0.2) else draw.laid_out(made, expand=False)


def draw_experts(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.moe_experts``: experts without tokens, tokens without experts, weights that lie otherwise."""
    hidden, inner = (min(draw.of(FEATURES), 256) for _ in range(2))
    experts = draw.of((1, 2, 3, 5, 8, 16))
    weights: dict[str, Any] = {
        "gate_up_weight": _weight(draw, dtype, (experts, 2 * inner, hidden)),
        "down_weight": _weight(draw, dtype, (experts, hidden, inner)),
    }
    if draw.chance(0.3):
        weights |= {packed: PackedWeight(weights[of]) for packed, of in PACKED_OF.items()}
    return draw_around(draw, dtype, (experts, hidden, inner), weights)


def draw_around(
    draw: Draw, dtype: torch.dtype, sizes: tuple[int, int, int], weights: Mapping[str, Any]
) -> dict[str, Any]:
    """A call around weights of these experts, hidden and inner features."""
    tokens = draw.of((0, 1, 2, 5, 17, 40), (1, 6, 3, 3, 3, 2))
    top_k, (experts, hidden, inner) = draw.of((1, 2, 3, 8), (2, 4, 3, 1)), sizes
    ids = choices(tokens, experts, top_k, draw.data, "cpu").to(draw.device)
    if draw.chance(0.2) and ids.numel():
        ids = ids.masked_fill(draw.uniform(ids.shape, torch.float32) < 0.3, -1)
    shares = draw.normal((tokens, top_k), torch.float32).softmax(-1)
    arguments: dict[str, Any] = {
        "input": draw.laid_out(draw.normal((tokens, hidden), dtype)),
        **weights,
        "expert_ids": draw.laid_out(ids.to(draw.of((torch.int32, torch.int64))), expand=False),
        "expert_weights": draw.laid_out(shares.to(draw.of((torch.float32, dtype)))),
    }
    for name, width in (("gate_up_bias", 2 * inner), ("down_bias", hidden)):
        if draw.chance(0.3):
            arguments[name] = draw.laid_out(draw.normal((experts, width), dtype))
    if draw.chance(0.6):
        arguments["activation"] = draw.of(GATES)
        if arguments["activation"] == "swiglu_oai" and draw.chance(0.5):
            arguments |= {"alpha": draw.of((1.0, 1.702)), "limit": draw.of((7.0, 3.0))}
    return draw.poison(arguments, ("input", "expert_weights"))
