"""torch's experts with quantised weights: those that have tokens, one after another, dequantised block by block.

Every format runs on every device; nothing is made of a weight but blocks of it, which stay in a CPU's caches.
With packed weights torch's products of codes of four and eight bits serve each expert: see ``grouped_linear.py``.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerzero.backends.grouped_weights import ACCEPTS, EITHER, IN_FOUR_BITS, TENSORS, Products, experts_of, looped
from layerzero.backends.torch.attention import FLOATS, TORCH, kernel
from layerzero.backends.torch.grouped_linear import int4, int8
from layerzero.backends.torch.weight_formats import dequantizing
from layerzero.backends.torch.widened import many
from layerzero.core import limits as limit
from layerzero.core.emulation import lacks
from layerzero.core.facts import Facts
from layerzero.ops.moe.experts import Stack, weights_of

_SPREAD = many("tokens", of="top_k", over="experts")


def _dtypes(facts: Facts) -> tuple[torch.dtype, torch.dtype]:
    """The dtype that numbers are dequantised in, and that of the products: of few rows on a CPU it is the same."""
    dtype = facts["dtype"]
    assert isinstance(dtype, torch.dtype)
    exact = torch.promote_types(dtype, torch.float32)
    on_cpu = facts["platform"] == "cpu"
    if on_cpu and (dtype is torch.float16 or lacks(facts.device, dtype) or not _SPREAD(facts)):
        return exact, exact
    return exact, dtype


def _load(facts: Facts) -> Callable[..., Any]:
    dtypes, platform, whole = _dtypes(facts), str(facts["platform"]), bool(facts["requires_grad"])

    def products(stack: Stack) -> Products:
        run = dequantizing(stack.of, (stack.shape[1], stack.shape[2]), dtypes, platform, whole=whole)
        return Products(stack.shape[0], lambda rows, number: run(rows, stack.given.of_expert(number)))

    return looped(facts, lambda given: map(products, weights_of(given, given["input"].dtype)))


KERNELS = (
    kernel(
        "torch.experts_dequantized",
        EITHER,
        _load,
        FLOATS,
        accepts=(*ACCEPTS, *TENSORS),
        grad=True,
        graph_safe=False,
        handles_negated=True,
        priority=20,
    ),
    experts_of(
        "torch.experts_int4",
        TORCH,
        int4,
        45,
        limit.cpu_feature("avx2"),
        limit.dtype("bfloat16"),
        IN_FOUR_BITS,
        limit.dim("weight_group", multiple=32),
        limit.dim("hidden", multiple=32),
        limit.dim("inner_features", multiple=32),
    ),
    experts_of(
        "torch.experts_int8",
        TORCH,
        int8,
        45,
        limit.dtype("bfloat16"),
        limit.one_of("weight_bits", 8),
        limit.one_of("weight_zeros", "none"),
        limit.one_of("weight_group", 0),
        limit.dim("hidden", multiple=16),
        limit.dim("inner_features", multiple=16),
    ),
)
