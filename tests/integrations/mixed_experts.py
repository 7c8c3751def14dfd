"""Mixtures of experts, and kernels of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerzero.ops.moe.experts import gated

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")
pytest.importorskip("transformers.integrations.moe", reason="needs its interface for experts")


PACKED, EACH = "vllm.cpu.experts_packed", "torch.experts_each"


class Mixed(nn.Module):
    """Experts with names of nobody's.

    Args:
        wide: experts, hidden and inner features.
    """

    def __init__(
        self,
        wide: tuple[int, int, int] = (3, 64, 32),
        activation: str = "silu",
        *,
        transposed: bool = False,
        biased: bool = False,
        numbers: tuple[float, float] = (1.702, 7.0),
    ) -> None:
        super().__init__()
        count, hidden, inner = wide
        self.activation, self.transposed = activation, transposed
        self.alpha, self.limit = numbers
        shapes = [(count, 2 * inner, hidden), (count, hidden, inner)]
        weights = [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes]
        one, two = (nn.Parameter(each.mT.contiguous() if transposed else each) for each in weights)
        self.second, self.first = two, one  # their order says nothing
        self.four, self.three = (
            (nn.Parameter(torch.randn(count, hidden)), nn.Parameter(torch.randn(count, 2 * inner)))
            if biased
            else (None, None)
        )

    def gate(self, joined: torch.Tensor) -> torch.Tensor:
        numbers = (self.alpha, self.limit) if self.activation == "swiglu_oai" else ()
        return gated(joined, self.activation, *numbers)

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(rows)
        for number in range(len(self.first)):
            one, two = (each[number].mT if self.transposed else each[number] for each in (self.first, self.second))
            biases = (None, None) if self.three is None else (self.three[number], self.four[number])
            made = nn.functional.linear(self.gate(nn.functional.linear(rows, one, biases[0])), two, biases[1])
            share = torch.where(ids == number, shares, 0).sum(-1, keepdim=True)
            total = total + (made * share).to(total.dtype)
        return total


def call_of(module: Mixed, rows: int = 7, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    count, hidden = len(module.first), module.first.shape[1 if module.transposed else 2]
    ids = torch.rand(rows, count).argsort(-1)[:, : min(2, count)].contiguous()
    return torch.randn(rows, hidden).to(dtype), ids, torch.rand(rows, ids.shape[1]).to(dtype)
