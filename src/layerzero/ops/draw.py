"""The two streams of random numbers behind a call, and tensors in every memory layout that torch allows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Case, Function, Operation
from layerzero.ops.calls import accepted, arguments_of, dtype_for, routed

Form = Callable[[Tensor, random.Random], Tensor]
"""Puts the values of a tensor into other memory."""


class Draw:
    """The two streams of one call, and tensors in every memory layout."""

    def __init__(self, name: str, data: int, device: torch.device | str) -> None:
        self.stream = random.Random(name)  # noqa: S311  # reproducible, not secret
        data_seed = random.Random(f"{name}:{data}").getrandbits(62)  # noqa: S311
        self.data = torch.Generator().manual_seed(data_seed)
        self.device = device

    def of(self, values: Sequence[Any], weights: Sequence[int] | None = None) -> Any:
        """One of the values."""
        return self.stream.choices(values, weights)[0]

    def chance(self, probability: float) -> bool:
        """Whether something happens."""
        return self.stream.random() < probability

    def maybe(self, probability: float, **made: Callable[[], Any]) -> dict[str, Any]:
        """Arguments that a call brings with this probability, or none."""
        return {name: make() for name, make in made.items()} if self.chance(probability) else {}

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Unit normal numbers."""
        return torch.randn(tuple(shape), generator=self.data).to(self.device, dtype)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers from 0 to 1."""
        return torch.rand(tuple(shape), generator=self.data).to(self.device, dtype)

    def integers(self, shape: Sequence[int], high: int, dtype: torch.dtype) -> Tensor:
        """Whole numbers from 0 to ``high``, both inclusive."""
        return torch.randint(0, high + 1, tuple(shape), generator=self.data).to(self.device, dtype)

    def leading(
        self, counts: Sequence[int], weights: Sequence[int], sizes: Sequence[int] = (1, 2, 3, 5, 17)
    ) -> tuple[int, ...]:
        """Sizes of so many leading axes; now and then there is one without elements before them."""
        found = tuple(self.of(sizes) for _ in range(self.of(counts, weights)))
        return (0, *found) if self.chance(0.02) else found

    def laid_out(self, tensor: Tensor, *, expand: bool = True) -> Tensor:
        """The same values in other memory: permuted, padded, stepped, offset, with loose strides, or expanded."""
        if self.chance(0.6) or tensor.ndim == 0:
            return tensor
        form: Form = self.of(_FORMS)
        return (_offset if form is _expanded and not expand else form)(tensor, self.stream)

    def poison(self, arguments: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Put one NaN into one of the named tensors, now and then; return all arguments."""
        tensor = arguments[self.of(names)]
        if self.chance(0.04) and tensor.numel() and not tensor.is_neg():
            tensor[tuple(self.stream.randrange(size) for size in tensor.shape)] = float("nan")
        return arguments


def _garbage(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory around a tensor's own: NaN where there is one, so that results show reads of it."""
    return tensor.new_full(tuple(shape), float("nan") if tensor.is_floating_point() else 1)


def _permuted(tensor: Tensor, stream: random.Random) -> Tensor:
    order = list(range(tensor.ndim))
    stream.shuffle(order)
    inverse = sorted(range(tensor.ndim), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(inverse)


def _padded(tensor: Tensor, stream: random.Random) -> Tensor:
    axis = stream.randrange(tensor.ndim)
    shape = list(tensor.shape)
    shape[axis] += stream.choice((1, 3, 8))
    return _garbage(tensor, shape).narrow(axis, shape[axis] - tensor.shape[axis], tensor.shape[axis]).copy_(tensor)


def _stepped(tensor: Tensor, stream: random.Random) -> Tensor:
    return _garbage(tensor, (*tensor.shape, 2))[..., 0].copy_(tensor)


def _offset(tensor: Tensor, stream: random.Random) -> Tensor:
    offset = stream.choice((1, 2, 3, 5))
    return _garbage(tensor, (tensor.numel() + offset + 1,))[offset:-1].view(tensor.shape).copy_(tensor)


def _loose(tensor: Tensor, stream: random.Random) -> Tensor:
    """Strides of axes with one element mean nothing and can be anything."""
    strides = [7 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


def _expanded(tensor: Tensor, stream: random.Random) -> Tensor:
    axis = stream.randrange(tensor.ndim)
    return tensor.narrow(axis, 0, min(1, tensor.shape[axis])).expand(tensor.shape)


def _negated(tensor: Tensor, stream: random.Random) -> Tensor:
    return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor


_FORMS = (_permuted, _padded, _stepped, _offset, _loose, _expanded, _negated)


_SIZES = (1, 2, 3, 7, 8, 16, 33)
_MOST_ELEMENTS = 2**18
_TRIES = 50


def drawn_of_cases(function: Function, draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Random arguments of a function that says nothing about how to draw them: its cases with other sizes.

    Axes that have one size in every case go together. Parameters take their examples and optional tensors are there now
    and then; what the function refuses is drawn again, the case itself last.
    """
    operation = draw.of(function.operations)
    allowed = operation.schema.dtype_tensor.dtype_constraint
    dtype = dtype if allowed is None or dtype in allowed else dtype_for(operation.schema.dtype_tensor, dtype)
    case = draw.of(operation.cases)
    for attempt in range(_TRIES):
        changed = case if attempt == _TRIES - 1 else _other_sizes(operation, case, draw)
        arguments = accepted(function, arguments_of(operation, changed, dtype, draw.device, generator=draw.data))
        for name, value in arguments.items():
            schema = next((each for each in operation.schema.inputs if each.name == name), None)
            if schema is not None and value.is_floating_point():
                arguments[name] = draw.laid_out(value, expand=not schema.mutated)
        try:
            routed(function, arguments)
        except InvalidCallError:
            continue
        return arguments
    return arguments


def _other_sizes(operation: Operation, case: Case, draw: Draw) -> Case:
    groups: dict[tuple[int, ...], list[str]] = {}
    for axis in case.sizes:
        groups.setdefault(tuple(each.sizes[axis] for each in operation.cases), []).append(axis)
    sizes: dict[str, int] = {}
    for axes in groups.values():
        small = min(case.sizes[axes[0]], 64)
        sizes |= dict.fromkeys(axes, draw.of((*_SIZES, small)))
    if math.prod(sizes.values()) > _MOST_ELEMENTS:
        sizes = {axis: min(size, 8) for axis, size in sizes.items()}
    schema = operation.schema
    params = {each.name: each.example for each in schema.params if each.example is not None and draw.chance(0.3)}
    given = tuple(each.name for each in schema.optional if draw.chance(0.3))
    return Case("drawn", sizes, {**case.params, **params}, given)
