"""Activations of one tensor as formulas, by the names that parameters and operations use."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def relu2(input: Tensor) -> Tensor:
    """``max(x, 0)^2``. Source: arXiv:2109.08668."""
    return functional.relu(input).square()


def gelu(input: Tensor) -> Tensor:
    """``x / 2 * (1 + erf(x / sqrt(2)))``; NaN of an infinity. Source: arXiv:1606.08415.

    Kernels give infinity or NaN there, torch's one or the other by dtype and strides: no one can rely on either.
    """
    return functional.gelu(input).masked_fill(input.isinf(), math.nan)


def gelu_tanh(input: Tensor) -> Tensor:
    """``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))``. Source: arXiv:1606.08415."""
    return functional.gelu(input, approximate="tanh")


def silu(input: Tensor) -> Tensor:
    """``x / (1 + exp(-x))``. Source: arXiv:1702.03118."""
    return functional.silu(input)


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """``g * sigmoid(alpha * g) * (u + 1)``, g the gate up to the limit, u within it on both sides.

    Source: gpt-oss, arXiv:2508.10925.
    """
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


FORMULAS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "relu2": relu2,
}
"""What may follow a product, by name; each runs in the dtype that it is given."""

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {**FORMULAS, "gelu": functional.gelu}
"""The same as torch has them."""

IN_PLACE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "gelu": torch.ops.aten.gelu_.default,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_.default, approximate="tanh"),
    "silu": functools.partial(functional.silu, inplace=True),
    "relu2": lambda x: torch.relu_(x).square_(),
}
"""The same, written over what they are given."""

GATED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "silu": ("silu_mul", {}),
    "gelu": ("gelu_mul", {}),
    "gelu_tanh": ("gelu_mul", {"approximate": "tanh"}),
}
"""Those that libraries have in one kernel with the multiplication by what a gate lets through: function, arguments."""
