"""What a schema cannot tell of a case's tensors: weights are as trained ones are, so that results are of order 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from layerzero.core.arguments import TensorSchema
from layerzero.core.operation import Case
from layerzero.ops.calls import drawn


def weight(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """The weight of a case of mlp.linear."""
    return {
        "weight": scaled("weight", (case.sizes["out_features"], case.sizes["in_features"]), dtype, device, generator)
    }


def scaled(
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None,
    least: int = 1,
) -> Tensor:
    """Normal numbers with a deviation of one over the root of the sum's length."""
    made = drawn(TensorSchema(name), shape, dtype, device, {}, generator)
    return made if device.type == "meta" else made.mul_(deviation(shape[1], least))


def deviation(length: int, least: int = 1) -> float:
    """That of weights which sums of so many products are made with; of at least so many for what comes of few."""
    return 1.0 / math.sqrt(max(length, least, 1))
