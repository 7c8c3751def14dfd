"""One operation with a result that everybody knows, and kernels of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import layerzero as lz

Kernel = Callable[[Tensor, Tensor, float], Any]


def right(data: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.nn.functional.rms_norm(data, weight.shape, weight, eps)


def register(name: str, function: Kernel, priority: int) -> None:
    def kernel(input: Tensor, weight: Tensor, eps: float) -> Any:  # the operation's names
        return function(input, weight, eps)

    lz.register_kernel("norm.rms", name, supported_dtypes=["float32"], priority=priority)(kernel)
