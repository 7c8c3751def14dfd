"""torch's activations, called below ``torch.nn.functional``, and what it has no operator for as expressions.

An expression rounds the activation before it multiplies. Where nobody records gradients the product is written over
the activation: 0.9 of the time for 512 x 2816, as long for a few rows (AMD EPYC, CPU time of one thread, torch 2.13.0,
2026-11-22). gpt-oss's gate has four roundings in a row: half precision computes it in float32.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import TORCH
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.activation.declare import halves, turns
from layerzero.ops.activation.formulas import relu2, swiglu_oai

_FLOATS = ("float32", "float64", "float16", "bfloat16")


def _load_gelu(facts: Facts) -> Callable[..., Any]:
    operator: Callable[..., Any] = torch._C._nn.gelu
    return operator


def _load_silu(facts: Facts) -> Callable[..., Any]:
    operator: Callable[..., Any] = torch._C._nn.silu
    return operator


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


def _load_silu_mul(facts: Facts) -> Callable[..., Any]:
    return _times(facts, torch._C._nn.silu)


def _load_gelu_mul(facts: Facts) -> Callable[..., Any]:
    return _times(facts, torch._C._nn.gelu)


def _load_swiglu_oai(facts: Facts) -> Callable[..., Any]:
    dtype: Any = facts["dtype"]
    wide = torch.promote_types(dtype, torch.float32)

    def apart(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
        return swiglu_oai(gate.to(wide), up.to(wide), alpha, limit).to(dtype)

    def by_turns(input: Tensor, *, alpha: float, limit: float) -> Tensor:
        gate, up = turns(input)
        return apart(gate, up, alpha=alpha, limit=limit)

    return apart if "up" in facts.tensors else by_turns


KERNELS = tuple(
    Kernel(
        id=f"torch.{name}",
        operations=operations,
        backend=TORCH,
        load=load,
        accepts=accepts,
        limits=(limit.dtype(*_FLOATS),),
        grad=True,
        handles_empty=True,
        handles_negated=True,
        priority=45,
        stock=name in ("gelu", "silu"),  # the others are several functions of torch
    )
    for name, operations, load, accepts in (
        ("gelu", ("activation.gelu",), _load_gelu, ("approximate",)),
        ("silu", ("activation.silu",), _load_silu, ()),
        ("relu2", ("activation.relu2",), _load_relu2, ()),
        ("silu_mul", ("mlp.silu_mul", "mlp.silu_mul.joined"), _load_silu_mul, ()),
        ("gelu_mul", ("mlp.gelu_mul", "mlp.gelu_mul.joined"), _load_gelu_mul, ("approximate",)),
        ("swiglu_oai", ("mlp.swiglu_oai", "mlp.swiglu_oai.interleaved"), _load_swiglu_oai, ("alpha", "limit")),
    )
)
