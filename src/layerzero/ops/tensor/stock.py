"""torch's own ways to move numbers, with the arguments of ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def transpose(input: Tensor) -> Callable[[], Tensor]:  # noqa: A002  # torch's name
    """``Tensor.transpose`` and a copy."""
    return lambda: input.transpose(-2, -3).clone(memory_format=torch.contiguous_format)


def split_qkv(qkv: Tensor, *, kv_features: int) -> Callable[[], tuple[Tensor, ...]]:
    """``torch.split`` and copies."""
    sizes = [qkv.shape[-1] - 2 * kv_features, kv_features, kv_features]
    return lambda: tuple(each.clone(memory_format=torch.contiguous_format) for each in torch.split(qkv, sizes, -1))


def copy_slice(destination: Tensor, input: Tensor) -> Callable[[], None]:  # noqa: A002
    """``Tensor.copy_``."""

    def run() -> None:
        destination.copy_(input)

    return run
