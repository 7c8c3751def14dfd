"""Two weights that lie one after the other, so that one product computes with both; no second copy of either.

The parameters stay the objects that they were, with their names and values: their memory is now part of a common one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class Joined:
    """The first weight's rows before the second's.

    Attributes:
        weight: both in one tensor, (2 N, K).
    """

    def __init__(self, first: Parameter, second: Parameter) -> None:
        self.first, self.second = first, second
        with torch.no_grad():
            self.weight = torch.cat((first.detach(), second.detach()))
        self._lay(self.weight[: first.shape[0]], self.weight[first.shape[0] :])

    def _lay(self, first: Tensor, second: Tensor) -> None:
        self.first.data, self.second.data = first, second

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy's weights lie by themselves: torch copies each parameter alone."""

    def holds(self, first: Tensor, second: Tensor) -> bool:
        """Whether these are its weights and still lie in it: moving a module, or another dtype, takes them apart."""
        start = self.weight.data_ptr()
        middle = start + self.weight.nbytes // 2
        return first is self.first and first.data_ptr() == start and second.data_ptr() == middle

    def part(self) -> None:
        """Give each weight memory of its own again, with the values that it has now."""
        if self.holds(self.first, self.second):
            self._lay(self.first.detach().clone(), self.second.detach().clone())


def why_apart(first: Parameter, second: Parameter, others: dict[int, int]) -> str:
    """Say why two weights cannot lie in one tensor; ``others`` counts the tensors that each memory holds."""
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return "shapes, dtypes or devices differ"
    for each in (first, second):
        if not each.is_contiguous() or each.untyped_storage().nbytes() != each.nbytes:
            return "one lies in a larger memory"
        if others.get(each.untyped_storage().data_ptr(), 1) > 1:
            return "one shares its memory with another parameter"
        if each.is_inference():
            return "one was made in inference mode"
    return ""
