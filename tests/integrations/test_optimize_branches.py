"""Modules that take another way for some numbers or sizes: ``lz.optimize`` leaves them with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scaled_modules import Gated
from torch import nn
from torch.nn import functional

import layerzero as lz


class Turning(Gated):
    """Takes another way for some numbers, which one random input does not show."""

    large: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.large(x):
            return x
        return super().forward(x)


@pytest.mark.parametrize(("large", "told"), [
    (lambda x: x.max() > 100, "reads numbers of tensors"),
    (lambda x: 100 < max(x.flatten().tolist()), "reads numbers of tensors"),
    (lambda x: x.shape[0] * 2 > 1000, "compares how many rows"),
    (lambda x: int(x.shape[0]) > 1000, "compares how many rows"),
    (lambda x: x.shape[0] / 2 > 1000, "compares how many rows"),
    (lambda x: -x.shape[0] < -1000, "compares how many rows"),
    (lambda x: x.nbytes > 2**30, "compares how many rows"),
    (lambda x: torch.numel(input=x) > 2**30, "compares how many rows"),
    (lambda x: x.ndim == 4, "compares how many rows"),
    (lambda x: not x.is_contiguous(), "compares how many rows"),
])  # fmt: skip
def test_a_module_that_branches_on_numbers_is_left(large: Any, told: str) -> None:
    module = Turning(functional.silu).eval()
    module.large = large
    report = lz.optimize(module, None)
    assert all(each.path for each in report.replaced), "its products may gain"
    assert told in str(report)


class ManyRows(Gated):
    """A block that does something else to later rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.ones(x.shape[-2]).cumsum(0).sub(9).relu().add(1)[:, None]


class Limited(Gated):
    """A block whose gate is limited, as gpt-oss's is: few numbers reach it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.act(self.three(x)).clamp(max=7) * self.one(x))  # type: ignore[no-any-return]


class Clean(Gated):
    """A block that takes no NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.nan_to_num())


@pytest.mark.parametrize(
    ("kind", "told"), [(ManyRows, "compares how many rows"), (Limited, "clamp"), (Clean, "nan_to_num")]
)
def test_a_block_that_computes_something_else_of_other_input_keeps_its_own_code(kind: type[Gated], told: str) -> None:
    report = lz.optimize(nn.Sequential(kind(functional.silu)).eval(), None)
    assert all("." in each.path for each in report.replaced), "its products may gain"
    assert told in str(report)
