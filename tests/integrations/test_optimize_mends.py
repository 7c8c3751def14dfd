"""Modules whose own code is wrong on a CPU with AMX get LayerZero's, whatever that takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero as lz
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.integrations.optimize.modules.find import MENDS, convolution
from layerzero.integrations.optimize.swaps import candidate

WRONG = Reason(ReasonCode.CONSTRAINT_FAILED, "in_features", "a multiple of 32", 33)
MADE = {
    "linear": (lambda: nn.Linear(33, 40), (40, 33)),
    "convolution": (lambda: nn.Conv1d(16, 7, 4, stride=4), (2, 16, 40)),
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(MADE[name][0]()).eval().bfloat16()


def truth(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = copy.deepcopy(model).double()(x.double())
    return found


@pytest.mark.parametrize("inputs", [False, True])
def test_they_stay_whatever_their_time(monkeypatch: pytest.MonkeyPatch, inputs: bool) -> None:
    model, x = model_of("linear"), torch.randn(MADE["linear"][1]).bfloat16()
    with lz.scope(locks={"mlp.linear": "torch.linear"}):
        assert not lz.optimize(copy.deepcopy(model)).replaced or candidate.leaking_rows(
            lz.facts("linear", x, model[0].weight)
        )
        monkeypatch.setattr(candidate, "leaking_rows", lambda _: WRONG)
        report = lz.optimize(model, *([(x,)] if inputs else []))
        assert [each.path for each in report.replaced] == ["0"]
        assert report.replaced[0].calls.endswith(MENDS)
        with torch.no_grad():
            torch.testing.assert_close(model(x).double(), truth(model, x), rtol=2e-2, atol=2e-2)
        report.undo()
    assert "forward" not in vars(model[0])


def wrong_in_half(module: nn.Module) -> Any:
    """The forward of its class, which gives twice as much in half precision."""
    return lambda x: type(module).forward(module, x) * (1 if x.dtype is torch.float32 else 2)


@pytest.mark.parametrize("known", [False, True])
def test_own_code_that_is_wrong_is_no_truth(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """A copy in float32 is, but only where own code is known to be wrong."""
    monkeypatch.setattr(candidate, "misread", lambda _: WRONG if known else None)
    monkeypatch.setattr(candidate, "stock_forward", wrong_in_half)
    found = convolution(nn.Conv1d(32, 8, 3).eval().bfloat16())
    assert isinstance(found, candidate.Candidate)
    assert ("was off by" in candidate.compared(found)) != known


@pytest.mark.skipif(
    "amx_bf16" not in lz.Device.detect("cpu").instruction_sets, reason="wanted a CPU with AMX, whose tiles are wrong"
)
@pytest.mark.parametrize("name", MADE)
def test_rows_stay_apart_and_numbers_are_right(name: str) -> None:
    model, x = model_of(name), torch.randn(MADE[name][1]).bfloat16()
    report = lz.optimize(model)
    assert [each.path for each in report.replaced] == ["0"]
    for row in range(len(x)):
        given = x.clone()
        given[row] = torch.nan
        with torch.no_grad():
            got = model(given).double()
        torch.testing.assert_close(got, truth(model, given), rtol=2e-2, atol=5e-2, equal_nan=True)


def test_a_convolution_whose_numbers_are_right_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of pictures of three channels lets a NaN into its own picture alone: it is as fast as it was."""
    monkeypatch.setattr(candidate, "misread", lambda _: WRONG)
    found = convolution(nn.Conv2d(3, 32, 4, stride=4).eval().bfloat16())
    assert isinstance(found, candidate.Candidate)
    assert not candidate.compared(found)
    assert not found.mends
