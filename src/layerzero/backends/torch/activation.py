"""torch's activations, called below ``torch.nn.functional``, and what it has no operator for as expressions.

An expression rounds the activation before it multiplies. Where no gradient is recorded the product is written over the
activation: 0.9 of the time for 512 x 2816, as long for a few rows (AMD EPYC, CPU time of one thread, torch 2.13.0,
2026-11-22). gpt-oss's gate has four roundings in a row: half precision computes it in float32.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FLOATS, TORCH, always
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.activation.declare import ALONE, GATED, halves, turns
from layerzero.ops.activation.formulas import relu2, swiglu_oai


def _load_relu2(facts: Facts) -> Callable[..., Any]:
    if facts["requires_grad"]:
        return relu2
    relu = torch.relu

    def run(input: Tensor) -> Tensor:
        return relu(input).square_()

    return run


def _times(facts: Facts, activation: Callable[..., Tensor]) -> Callable[..., Any]:
    """The activation of a gate times up, two tensors or the halves of one."""
    in_place = not facts["requires_grad"]

    def apart(gate: Tensor, up: Tensor, **params: Any) -> Tensor:
        output = activation(gate, **params)
        return output.mul_(up) if in_place else output * up

    def together(input: Tensor, **params: Any) -> Tensor:
        gate, up = halves(input)
        return apart(gate, up, **params)

    return apart if "up" in facts.tensors else together


def _load_swiglu_oai(facts: Facts) -> Callable[..., Any]:
    dtype: Any = facts["dtype"]
    wide = torch.promote_types(dtype, torch.float32)

    def apart(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
        return swiglu_oai(gate.to(wide), up.to(wide), alpha, limit).to(dtype)

    def by_turns(input: Tensor, *, alpha: float, limit: float) -> Tensor:
        gate, up = turns(input)
        return apart(gate, up, alpha=alpha, limit=limit)

    return apart if "up" in facts.tensors else by_turns


_LOADS = {
    "gelu": always(torch._C._nn.gelu),
    "silu": always(torch._C._nn.silu),
    "relu2": _load_relu2,
    "silu_mul": functools.partial(_times, activation=torch._C._nn.silu),
    "gelu_mul": functools.partial(_times, activation=torch._C._nn.gelu),
    "swiglu_oai": _load_swiglu_oai,
}
"""What is better than the expression; others are loaded as that."""


def _alike(facts: Facts) -> bool:
    """A GPU computes each element alike; a CPU computes what no vector fills by another exponential."""
    return facts.device.platform != "cpu"


KERNELS = tuple(
    Kernel.of_expression(
        *operations,
        id=f"torch.{name}",
        backend=TORCH,
        limits=(FLOATS,),
        load=_LOADS.get(name),
        handles_empty=True,
        batch_invariant=_alike,
        handles_negated=True,
        priority=45,
        stock=name in ("gelu", "silu"),  # the others are several functions of torch
    )
    for operations in (*((each,) for each in ALONE), *GATED)
    for name in (operations[0].name.partition(".")[2],)
)
