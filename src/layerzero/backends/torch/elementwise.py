"""torch's own operators on every element; each computes in float32 where its tensors are narrower, and rounds once.

But for a scaled addition on a CPU: torch 2.13 rounds the factor to the tensors' dtype there, so that it is written out.
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
from layerzero.ops.elementwise.declare import OPERATIONS


def _load_add_bias(facts: Facts) -> Callable[..., Any]:
    operator: Callable[..., Any] = torch.add
    return operator


def _load_add(facts: Facts) -> Callable[..., Any]:
    def run(residual: Tensor, input: Tensor) -> None:
        residual.add_(input)

    return run


def _load_scaled_add(facts: Facts) -> Callable[..., Any]:
    dtype: Any = facts["dtype"]
    wide = torch.promote_types(dtype, torch.float32)
    exact = wide is dtype or facts.device.platform != "cpu"

    def run(
        residual: Tensor,
        input: Tensor,
        *,
        scale_by_row: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        if scale_by_row is not None:
            residual.addcmul_(input, scale_by_row.unsqueeze(-1))
        elif scale is not None and exact:
            residual.add_(input, alpha=scale)
        elif scale is not None:
            residual.add_(input.to(wide) * scale)

    return run


def _load_softmax(facts: Facts) -> Callable[..., Any]:
    dtype: Any = facts["dtype"]
    wide = torch.promote_types(dtype, torch.float32)

    def run(input: Tensor, *, temperature: float | None = None) -> Tensor:
        if temperature is None:
            return torch.softmax(input, -1)
        return torch.softmax(input.to(wide) / temperature, -1).to(dtype)

    return run


def _load_cast(facts: Facts) -> Callable[..., Any]:
    dtype: Any = facts["out_dtype"]

    def run(input: Tensor, **_: Any) -> Tensor:
        return input.to(dtype, copy=True, memory_format=torch.contiguous_format)

    return run


_LOADS = {"add_bias": _load_add_bias, "add": _load_add, "scaled_add": _load_scaled_add, "softmax": _load_softmax}

KERNELS = tuple(
    Kernel.of_expression(
        operation,
        id=f"torch.{name}",
        backend=TORCH,
        limits=(limit.dtype("float32", "float64", "float16", "bfloat16"),),
        load=_LOADS.get(name),
        handles_negated=True,
        priority=40,
        stock=True,
    )
    for operation in OPERATIONS
    for name in (operation.name.partition(".")[2],)
)
