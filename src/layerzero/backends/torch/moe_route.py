"""torch's choice of experts: scores, the best of them, and their weights, as models write it.

Where a softmax is followed by nothing that changes the order, the best logits are searched first and weighed
afterwards: an exponential of k numbers in place of all.
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
from layerzero.ops.moe.routing import routed

Pair = tuple[Tensor, Tensor]


def _load_route(facts: Facts) -> Callable[..., Pair]:
    dtype = torch.promote_types(facts.tensors["logits"].dtype, torch.float32)

    def route(logits: Tensor, *, bias: Tensor | None = None, **params: Any) -> Pair:
        weights, places = routed(logits.to(dtype), bias=None if bias is None else bias.to(dtype), **params)
        return weights.float(), places.int()

    return route


def _load_chosen(facts: Facts) -> Callable[..., Pair]:
    dtype = torch.promote_types(facts.tensors["logits"].dtype, torch.float32)

    def route(logits: Tensor, *, top_k: int, renormalize: bool, scale: float) -> Pair:
        best, places = logits.topk(top_k, -1)
        if renormalize:
            weights = best.softmax(-1, dtype)
        else:
            weights = (best.to(dtype) - logits.to(dtype).logsumexp(-1, keepdim=True)).exp()
        return (weights if scale == 1.0 else weights * scale).float(), places.int()

    return route


_COMMON: dict[str, Any] = {
    "operations": ("moe.route",),
    "backend": TORCH,
    "grad": True,
    "handles_negated": True,
}

KERNELS = (
    Kernel(
        id="torch.moe_route",
        load=_load_route,
        accepts=("bias", "top_k", "scoring", "renormalize", "expert_groups", "top_groups", "scale"),
        limits=(limit.dtype("float32", "float64", "float16", "bfloat16"),),
        priority=50,
        stock=True,
        **_COMMON,
    ),
    Kernel(
        id="torch.moe_route.chosen",
        load=_load_chosen,
        accepts=("top_k", "renormalize", "scale"),
        limits=(limit.dtype("float32", "float64", "float16", "bfloat16"),),
        priority=30,
        **_COMMON,
    ),
)
