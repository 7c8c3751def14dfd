"""The same values in memory that kernels misread: steps, transposed axes, gaps, odd addresses; NaN around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from layerzero.ops import FUNCTIONS
from layerzero.testing import compare
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import tensors


def _room(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory around a tensor's own: NaN where there is one, so that results show reads of it."""
    return tensor.new_full(tuple(shape), math.nan if tensor.is_floating_point() else 1)


def _strided(tensor: Tensor) -> Tensor:
    return _room(tensor, (*tensor.shape, 2))[..., 0].copy_(tensor)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _padded(tensor: Tensor) -> Tensor:
    return _room(tensor, (*tensor.shape[:-1], tensor.shape[-1] + 8))[..., : tensor.shape[-1]].copy_(tensor)


def _offset(tensor: Tensor) -> Tensor:
    return _room(tensor, (tensor.numel() + 2,))[1:-1].view(tensor.shape).copy_(tensor)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": _strided,
    "transposed": _transposed,
    "padded rows": _padded,
    "misaligned": _offset,
}
"""What is done to a tensor, by the name that reports use."""


def reshaped(call: RandomCall, form: str) -> Iterator[tuple[str, RandomCall]]:
    """The call with one tensor after the other in another form, and with all of them; each with what was changed.

    One alone matters where a limit keeps the others as they are.
    """
    able = [
        name
        for name, tensor in tensors(call).items()
        if tensor.numel() > 1 and (tensor.ndim > 1 or form != "transposed")
    ]
    for names in [able, *([name] for name in able if len(able) > 1)]:
        if names:
            changed = {name: FORMS[form](call.arguments[name]) for name in names}
            text = f"{form} {' and '.join(names)}"
            yield text, RandomCall(call.function, {**call.arguments, **changed}, f"{call.name}, {text}")


def poisoned(call: RandomCall, name: str, place: int, value: float) -> RandomCall:
    """The call with one element of one tensor replaced."""
    tensor = call.arguments[name].clone()
    tensor.view(-1)[place % tensor.numel()] = value
    return RandomCall(call.function, {**call.arguments, name: tensor}, f"{call.name} with {value} in {name}")


def other_values(call: RandomCall) -> RandomCall:
    """The same call with other numbers: every tensor's axes run backwards; places, counts and masks stay.

    Of bytes, in a row of which scales may lie among codes, the rows alone change places.
    """
    schemas = [operation.schema for operation in FUNCTIONS[call.function].operations]
    places = {tensor.name for schema in schemas for tensor in schema.inputs if tensor.is_index}
    changed = {
        name: compare.flipped(tensor, tuple(range(tensor.ndim)[: 1 if tensor.dtype is torch.uint8 else None]))
        for name, tensor in tensors(call).items()
        if name not in places and tensor.dtype is not torch.bool
    }
    return RandomCall(call.function, {**call.arguments, **changed}, f"{call.name}, other values")
