"""Weights that lie one after the other, so that one product computes with all of them; no second copy of any.

The parameters stay the objects that they were, with their names and values: their memory is now part of a common one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PACKING = frozenset({"cpu"})
"""Devices whose kernels want a weight in an order of their own; those of others read it as it lies."""


def wants_packed(weight: Tensor) -> bool:
    """Whether kernels want another form of this weight."""
    return weight.device.type in PACKING


class Joined:
    """The rows of the first, then those of the second, and so on.

    Attributes:
        weight: all in one tensor, (N_1 + N_2 + ..., K); of biases (N_1 + N_2 + ...,).
    """

    def __init__(self, *parts: Parameter) -> None:
        self.parts = parts
        with torch.no_grad():
            self.weight = torch.cat([each.detach() for each in parts])
        self._lay(torch.split(self.weight, [each.shape[0] for each in parts]))
        self._starts = tuple(each.data_ptr() for each in parts)

    def _lay(self, tensors: Sequence[Tensor]) -> None:
        for each, tensor in zip(self.parts, tensors, strict=True):
            each.data = tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy's weights lie by themselves: torch copies each parameter alone."""

    def holds(self, *parts: Tensor | None) -> bool:
        """Whether these are its weights and still lie in it: moving a module, or another dtype, takes them apart."""
        for each, part, start in zip(self.parts, parts, self._starts, strict=True):
            if part is not each or part.data_ptr() != start:
                return False
        return True

    def part(self) -> None:
        """Give each weight memory of its own again, with the values that it has now."""
        if self.holds(*self.parts):
            self._lay([each.detach().clone() for each in self.parts])


def why_apart(parts: Sequence[Parameter], others: Mapping[int, int]) -> str:
    """Say why weights cannot lie in one tensor; ``others`` counts the tensors that each memory holds."""
    if len({(each.shape[1:], each.dtype, each.device) for each in parts}) > 1:
        return "shapes, dtypes or devices differ"
    for each in parts:
        if not each.is_contiguous() or each.untyped_storage().nbytes() != each.nbytes:
            return "one lies in a larger memory"
        if others.get(each.untyped_storage().data_ptr(), 1) > 1:
            return "one shares its memory with another parameter"
        if each.is_inference():
            return "one was made in inference mode"
    return ""
