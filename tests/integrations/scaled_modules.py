"""Modules that tests of single modules make."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import layerzero as lz

number: Any = float
with contextlib.suppress(ImportError):  # with torch alone
    from numpy import float64 as number

PACKED = "packed" in str(lz.which("linear", torch.ones(1, 8), w := torch.ones(8, 8), packed=lz.PackedWeight(w)))


class Scaled(nn.Module):
    """A norm of some kind, whose class says nothing."""

    def __init__(self, size: int, kind: str) -> None:
        super().__init__()
        self.kind, self.tiny = kind, number(1e-5) if kind == "plain" else 1e-5
        self.weight = nn.Parameter(torch.ones(size) if kind != "one plus" else torch.zeros(size))

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if gate is not None:
            x = x * gate
        if self.kind == "mean":
            return functional.layer_norm(x, self.weight.shape, self.weight, None, self.tiny)
        if self.kind == "written":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * self.weight
        unit = x / (x.square().mean(-1, keepdim=True) + self.tiny).sqrt()
        if self.kind == "squared":
            return unit * self.weight.square()
        return unit * (1 + self.weight) if self.kind == "one plus" else unit * self.weight


class Gated(nn.Module):
    """A gated block with names of nobody's."""

    def __init__(self, act: Any, *, doubled: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 24)
        self.act, self.doubled = act, doubled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.act(self.three(x)) * self.one(x))
        return 2 * y if self.doubled else y
