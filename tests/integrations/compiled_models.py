"""A model and compilers that take their time by the test's clock."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clock import Clock
from layerzero.integrations.optimize.models.compilers import Compiler

CLOCK = Clock()


def second() -> None:
    """Let one pass."""
    CLOCK.now += 1.0


class Model(nn.Module):
    """A model that takes a second a call on the test's clock, whatever it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), 1.0
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: Tensor, *, mask: Tensor | None = None, twice: bool = False) -> dict[str, Any]:
        second()
        rows = torch.sin(self.inner(x) + self.shift[:8]) * self.scale
        rows = rows if mask is None else rows * mask[..., None]
        return {"rows": rows * 2 if twice else rows, "none": None, "sum": rows.sum(-1)}


class Library:
    """Stands for a compiler: what it gives takes so long, and is wrong in a way of the test's."""

    def __init__(self, seconds: float, spoil: Callable[[Sequence[Tensor], Any], Any] | None = None) -> None:
        self.seconds, self.spoil, self.compiled, self.calls = seconds, spoil, 0, 0

    def __call__(self, module: nn.Module, example: Sequence[Tensor]) -> Any:
        self.compiled += 1
        twin = copy.deepcopy(module)
        shapes = [each.shape for each in example]

        def run(tensors: Sequence[Tensor]) -> Any:
            assert [each.shape for each in tensors] == shapes
            self.calls += 1
            before = CLOCK.now
            found = twin(*tensors)
            CLOCK.now = before + self.seconds
            return found if self.spoil is None else self.spoil(tensors, found)

        return run

    @property
    def compiler(self) -> Compiler:
        return Compiler("torch.inductor", (), 10.0, 0.0, self)
