"""What every route asks first: that the tensors are of the kind whose shapes and strides mean something."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from layerzero.core.errors import InvalidCallError


def check_dense(function: str, arguments: Mapping[str, object]) -> None:
    """Raise InvalidCallError for nested and sparse tensors: they have no strides, and some not even a shape."""
    problems = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided):
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            problems.append(f"{name}: wanted a dense tensor, got a {kind} one")
    if problems:
        raise InvalidCallError(function, problems)


def overlaps(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors may touch the same memory: they lie in one storage and their ranges meet."""
    if left.numel() == 0 or right.numel() == 0 or left.untyped_storage()._cdata != right.untyped_storage()._cdata:
        return False
    return _first(left) <= _last(right) and _first(right) <= _last(left)


def _first(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _last(tensor: torch.Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + reach
