"""Queries, keys and values of torch's products: three products, or one whose parts are the results.

Each is there for three weights and for a joined one. Joining three weights copies them, which only many rows repay;
three products with parts of a joined weight give dense results, and cost two launches more.
On the CPU the same of oneDNN with packed weights.
Library: torch >= 2.10, BSD-3-Clause; oneDNN 3, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FLOATS, kernel
from layerzero.backends.torch.linear import own
from layerzero.backends.torch.varlen import linear_for
from layerzero.backends.torch.widened import many, widened
from layerzero.core.facts import Facts
from layerzero.ops.linear.qkv import BIASES, Three, pieces


def load_three(facts: Facts, product: Callable[..., Tensor] | None = None) -> Callable[..., Any]:
    """Three products, of three weights or of parts of a joined one."""
    linear = product or linear_for(facts)

    def apart(
        input: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        v_weight: Tensor,
        *,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        v_bias: Tensor | None = None,
    ) -> Three:
        return linear(input, q_weight, q_bias), linear(input, k_weight, k_bias), linear(input, v_weight, v_bias)

    def joined(input: Tensor, q_weight: Tensor, *, kv_features: int, q_bias: Tensor | None = None) -> Three:
        sizes = [q_weight.shape[0] - 2 * kv_features, kv_features, kv_features]
        biases = (None, None, None) if q_bias is None else torch.split(q_bias, sizes)
        query, key, value = map(linear, (input,) * 3, torch.split(q_weight, sizes), biases)
        return query, key, value

    return joined if facts["operation"] == "mlp.qkv.joined" else apart


def _load_one(facts: Facts, product: Callable[..., Tensor] | None = None) -> Callable[..., Any]:
    linear = product or linear_for(facts)

    def joined(input: Tensor, q_weight: Tensor, *, kv_features: int, q_bias: Tensor | None = None) -> Three:
        return pieces(linear(input, q_weight, q_bias), kv_features)

    return joined


def _load_joining(facts: Facts) -> Callable[..., Any]:
    linear, cat = linear_for(facts), torch.cat

    def run(
        input: Tensor,
        *weights: Tensor,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        v_bias: Tensor | None = None,
    ) -> Three:
        sizes = [each.shape[0] for each in weights]
        given = q_bias, k_bias, v_bias
        bias = None
        if any(each is not None for each in given):
            zeros = (input.new_zeros(size) if each is None else each for each, size in zip(given, sizes, strict=True))
            bias = cat(tuple(zeros))
        product = linear(input, cat(weights), bias)
        query, key, value = (
            product.narrow(-1, first, size)
            for first, size in zip((0, sizes[0], sizes[0] + sizes[1]), sizes, strict=True)
        )
        return query, key, value

    return run


_KINDS = (
    ("torch.qkv_linear", ("mlp.qkv",), load_three, BIASES, 50),
    ("torch.qkv_linear.joined", ("mlp.qkv.joined",), _load_one, ("kv_features", "q_bias"), 50),
    ("torch.qkv_linear_apart.joined", ("mlp.qkv.joined",), load_three, ("kv_features", "q_bias"), 30),
    ("torch.qkv_linear_joining", ("mlp.qkv",), _load_joining, BIASES, 15),
)

_OWN = [
    kernel(
        name, operations, load, FLOATS, accepts=accepts, grad=True, handles_negated=True, priority=priority, stock=own
    )
    for name, operations, load, accepts, priority in _KINDS
]

KERNELS = (*_OWN, *(widened(each, many("rows"), each.load) for each in _OWN[:2]))
