"""PyTorch's own normalisation kernels, on every platform.

Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch_attention import TORCH
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode


def _infinite_float64(facts: Facts) -> Reason | None:
    """On a GPU a float64 row with an infinity ends in NaN, not in 0 beside it (H200, torch 2.11, 2026-11-21)."""
    if facts.device.platform == "cpu" or facts["dtype"] is not torch.float64:
        return None
    return Reason(ReasonCode.DTYPE_UNSUPPORTED, "dtype", "float32, float16 or bfloat16 on a GPU", "float64")


_FINITE = limit.Custom("on a GPU: no float64", ("dtype",), _infinite_float64)
_FLOATS = ("float32", "float64", "float16", "bfloat16")


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    rms_norm = torch.nn.functional.rms_norm
    shape = (facts.size("hidden"),)

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:  # noqa: A002
        return rms_norm(input, shape, weight, eps)

    return run


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    layer_norm = torch.nn.functional.layer_norm

    def run(
        input: Tensor,  # noqa: A002
        *,
        normalized_shape: tuple[int, ...],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float,
    ) -> Tensor:
        return layer_norm(input, normalized_shape, weight, bias, eps)

    return run


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    rms_norm = torch.nn.functional.rms_norm
    shape = (facts.size("hidden"),)

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:  # noqa: A002
        residual.add_(input)
        return rms_norm(residual, shape, weight, eps)

    return run


KERNELS = (
    Kernel(
        id="torch.rms_norm",
        operations=("norm.rms",),
        backend=TORCH,
        load=_load_rms_norm,
        accepts=("eps",),
        limits=(limit.dtype(*_FLOATS), _FINITE),
        grad=True,
        deterministic=True,
        graph_safe=True,
        handles_negated=True,
        device_guard=True,
        sizes_bound=("hidden",),
        priority=10,
    ),
    Kernel(
        id="torch.layer_norm",
        operations=("norm.layer",),
        backend=TORCH,
        load=_load_layer_norm,
        accepts=("normalized_shape", "weight", "bias", "eps"),
        limits=(limit.dtype(*_FLOATS), limit.dim("hidden", min=2)),  # of one element it returns rounding noise
        grad=True,
        deterministic=True,
        graph_safe=True,
        handles_negated=True,
        device_guard=True,
        sizes_bound=(),
        priority=40,
    ),
    Kernel(
        id="torch.add_rms_norm",
        operations=("norm.add_rms",),
        backend=TORCH,
        load=_load_add_rms_norm,
        accepts=("eps",),
        limits=(limit.dtype(*_FLOATS), _FINITE),
        grad=True,
        deterministic=True,
        graph_safe=True,
        handles_negated=True,
        device_guard=True,
        sizes_bound=("hidden",),
        priority=10,
    ),
)
