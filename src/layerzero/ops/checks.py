"""What every route asks first: that the tensors are of the kind whose shapes and strides mean something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from layerzero.core.arguments import out_of_range, told
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import refuse


def check_dense(function: str, arguments: Mapping[str, object]) -> None:
    """Raise InvalidCallError for what no route can look at.

    Nested and sparse tensors have no strides, and some not even a shape; integers that no float holds make any
    comparison of numbers raise.
    """
    problems = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided):
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            problems.append(f"{name}: wanted a dense tensor, got a {kind} one")
        elif type(value) is int and out_of_range(value, floating=True):
            problems.append(f"{name}: wanted a number that a float can hold, got {told(value)}")
    if problems:
        refuse(function, problems)


def shape_problems(arguments: Mapping[str, Any], names: tuple[str, ...], ndim: int) -> list[str]:
    """Tensors that are none, or have another number of axes."""
    problems = []
    for name in names:
        tensor = arguments[name]
        if not isinstance(tensor, torch.Tensor):
            problems.append(f"{name}: wanted a tensor, got {type(tensor).__name__}")
        elif tensor.ndim != ndim:
            problems.append(f"{name}: wanted a {ndim}D tensor, got {tensor.ndim}D {tuple(tensor.shape)}")
    return problems


def number_problems(name: str, tensor: object, ndim: int, shape: str) -> list[str]:
    """What is wrong with int32 numbers as a tensor; ``shape`` says in words what was wanted."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.int32 and tensor.ndim == ndim:
        return []
    got = type(tensor).__name__
    if isinstance(tensor, torch.Tensor):
        got = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
    return [f"{name}: wanted an int32 tensor {shape}, got {got}"]


def overlaps(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors may touch the same memory: they lie in one storage and their ranges meet."""
    if torch.compiler.is_compiling():  # storages are not there yet
        return False
    if left.numel() == 0 or right.numel() == 0:
        return False
    try:
        if left.untyped_storage()._cdata != right.untyped_storage()._cdata:
            return False
    except NotImplementedError:  # a transform's tensors hide their memory; torch itself refuses what it cannot write
        return False
    return _first(left) <= _last(right) and _first(right) <= _last(left)


def _first(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _last(tensor: torch.Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + reach


def write_problems(arguments: Mapping[str, Any], written: tuple[str, ...], read: tuple[str, ...]) -> list[str]:
    """What forbids writing into these tensors."""
    problems = []
    for name in written:
        tensor = arguments[name]
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            problems.append(f"{name}: wanted a tensor that may be updated in place, got a leaf that requires gradients")
        expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if expanded and tensor.numel():
            problems.append(f"{name}: wanted memory of its own, got an expanded view with strides {tensor.stride()}")
        compiling = torch.compiler.is_compiling()  # Dynamo cannot ask what follows, and compiles outside that mode
        if not compiling and tensor.is_inference() and not torch.is_inference_mode_enabled():
            problems.append(f"{name}: wanted a tensor that may be updated in place, got one made in inference mode")
        shared = [
            each for each in read if isinstance(arguments[each], torch.Tensor) and overlaps(tensor, arguments[each])
        ]
        problems += [f"{name}: wanted memory of its own, got memory that it shares with {each}" for each in shared]
    return problems
