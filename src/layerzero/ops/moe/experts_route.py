"""``lz.moe_experts``: its signature, the checks of a call, and random calls."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.draw import Draw
from layerzero.ops.linear.draw import FEATURES
from layerzero.ops.linear.examples import deviation
from layerzero.ops.linear.fused import FEW
from layerzero.ops.linear.packed import PackedWeight, packed_problems
from layerzero.ops.moe.experts import EXPERTS, PACKED_OF, choices
from layerzero.ops.moe.products import ALPHA, GATES, LIMIT

NAME = "moe_experts"


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
    packed_gate_up: PackedWeight | None = None,
    packed_down: PackedWeight | None = None,
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
        packed_gate_up, packed_down: the :class:`layerzero.PackedWeight` of each weight; kernels that want weights in
            another order want both. They change no result, and have no effect in compiled code.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a packed weight of another tensor or of
        one that was written into since, and on a CPU, and elsewhere in debug mode, for experts that there are not.
    Source: arXiv:1701.06538; gpt-oss, arXiv:2508.10925.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(NAME, arguments)
    problems = EXPERTS.schema.validate(**arguments)
    if not problems:
        problems = _problems(arguments) + packed_problems(arguments, PACKED_OF)
    if problems:
        raise InvalidCallError(NAME, problems)
    return Routed(EXPERTS, arguments, varies=("tokens",))


def _problems(arguments: dict[str, Any]) -> list[str]:
    joined, inner = arguments["gate_up_weight"].shape[1], arguments["down_weight"].shape[2]
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
    return problems


def draw_experts(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.moe_experts``: experts without tokens, tokens without experts, weights that lie otherwise."""
    tokens = draw.of((0, 1, 2, 5, 17, 40), (1, 6, 3, 3, 3, 2))
    experts, top_k = draw.of((1, 2, 3, 5, 8, 16)), draw.of((1, 2, 3, 8), (2, 4, 3, 1))
    hidden, inner = (min(draw.of(FEATURES), 256) for _ in range(2))

    def weight(*shape: int) -> Tensor:
        made: Tensor = (draw.normal(shape, torch.float32) * deviation(shape[-1], FEW)).to(dtype)
        return made.mT.contiguous().mT if draw.chance(0.2) else draw.laid_out(made, expand=False)

    ids = choices(tokens, experts, top_k, draw.data, "cpu").to(draw.device)
    if draw.chance(0.2) and ids.numel():
        ids = ids.masked_fill(draw.uniform(ids.shape, torch.float32) < 0.3, -1)
    shares = draw.normal((tokens, top_k), torch.float32).softmax(-1)
    arguments: dict[str, Any] = {
        "input": draw.laid_out(draw.normal((tokens, hidden), dtype)),
        "gate_up_weight": weight(experts, 2 * inner, hidden),
        "down_weight": weight(experts, hidden, inner),
        "expert_ids": draw.laid_out(ids.to(draw.of((torch.int32, torch.int64))), expand=False),
        "expert_weights": draw.laid_out(shares.to(draw.of((torch.float32, dtype)))),
    }
    for name, width in (("gate_up_bias", 2 * inner), ("down_bias", hidden)):
        if draw.chance(0.3):
            arguments[name] = draw.laid_out(draw.normal((experts, width), dtype))
    if draw.chance(0.6):
        arguments["activation"] = draw.of(GATES)
        if arguments["activation"] == "swiglu_oai" and draw.chance(0.5):
            arguments |= {"alpha": draw.of((1.0, 1.702)), "limit": draw.of((7.0, 1.5))}
    if draw.chance(0.3):
        arguments |= {packed: PackedWeight(arguments[of]) for packed, of in PACKED_OF.items()}
    draw.poison(arguments, ("input", "expert_weights"))
    return arguments


MOE_EXPERTS = Function(NAME, moe_experts, _route, (EXPERTS,), draw=draw_experts, weight=1, state=frozenset({"matmul"}))
