"""What experts make of their tokens: the gate between two products, and the reference of moe.experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops.activation.formulas import FORMULAS, swiglu_oai

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


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is summed up in."""
    return torch.promote_types(dtype, torch.float32)


def each_expert(
    visit: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    like: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    expert_ids: Tensor,
    shares: Tensor,
) -> Tensor:
    """The sum over a token's experts of its share times what ``visit`` gives for each expert's product and weight.

    Every expert visits every token, and what was not asked for is left out: no value on the device decides what runs.
    """
    gate_up_weight, down_weight, gate_up_bias, down_bias = weights
    dtype = like.dtype
    total = torch.zeros(like.shape, dtype=dtype, device=like.device)
    for number in range(gate_up_weight.shape[0]):
        of = expert_ids == number
        bias = None if gate_up_bias is None else gate_up_bias[number].to(dtype)
        joined = functional.linear(like, gate_up_weight[number].to(dtype), bias)
        made = visit(joined, down_weight[number].to(dtype), None if down_bias is None else down_bias[number].to(dtype))
        share = torch.where(of, shares, 0.0).sum(-1, keepdim=True)
        total = torch.where(of.any(-1, keepdim=True), total + share * made, total)
    return total


def reference(
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
) -> Tensor:
    """``sum over k of weights[t, k] * down[e](gate(gate_up[e] input[t]))`` with e = experts[t, k]; -1 adds nothing.

    Shapes: input (T, D), gate_up_weight (E, 2 F, D), down_weight (E, D, F), expert_ids and expert_weights (T, k),
    biases (E, 2 F) and (E, D) → (T, D)
    Dtype: computes in float32 (float64 for float64) and rounds once; returns input.dtype.
    Source: arXiv:1701.06538; gpt-oss, arXiv:2508.10925.
    """

    def visit(joined: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(gated(joined, activation, alpha, limit), weight, bias)

    dtype = wide(input.dtype)
    weights = gate_up_weight, down_weight, gate_up_bias, down_bias
    return each_expert(visit, input.to(dtype), weights, expert_ids, expert_weights.to(dtype)).to(input.dtype)


def summed(arguments: Mapping[str, Any]) -> Tensor:
    """The deviation of a result if what lies between products, and what each expert makes, is off by its size."""
    activation = arguments.get("activation", "silu")

    def visit(joined: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gate, up = gate_and_up(joined, activation)
        through = gated(joined, activation, arguments.get("alpha", ALPHA), arguments.get("limit", LIMIT))
        if activation == "swiglu_oai":  # up and one may cancel
            through = gate.abs() * (up.abs() + 1.0)
        made = functional.linear(through, weight, bias)
        return functional.linear(through.square(), weight.square()) + made.square()

    biases = arguments.get("gate_up_bias"), arguments.get("down_bias")
    weights = arguments["gate_up_weight"], arguments["down_weight"], *biases
    shares = arguments["expert_weights"].square()
    return each_expert(visit, arguments["input"], weights, arguments["expert_ids"], shares).sqrt()
