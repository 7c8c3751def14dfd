"""Convolutions of torch's classes under ``lz.optimize``: packed or widened, with results that lie as the modules'."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.integrations.optimize.modules import find
from layerzero.integrations.optimize.modules.find import convolution
from layerzero.integrations.optimize.swaps.candidate import Candidate, compared
from layerzero.integrations.optimize.swaps.swap import MARK

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")

MADE = {
    "large": (lambda: nn.Conv2d(64, 64, 5, padding=2), (2, 64, 4, 4)),
    "small": (lambda: nn.Conv2d(6, 8, 3, stride=2, groups=2, bias=False), (2, 6, 9, 9)),
    "sequence": (lambda: nn.Conv1d(64, 64, 9, padding="same"), (2, 64, 6)),
    "alone": (lambda: nn.Conv2d(64, 64, 5, padding=1), (64, 5, 5)),
}


def put_on(module: nn.Module) -> Candidate:
    found = convolution(module)
    assert isinstance(found, Candidate), found
    assert compared(found) == ""
    found.swap.on()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_it_gives_what_the_module_gives_and_lies_so(name: str, dtype: torch.dtype) -> None:
    make, shape = MADE[name]
    module, x = make().eval().to(dtype), torch.randn(shape).to(dtype)
    with torch.no_grad():
        expected = module(x)
        found = put_on(module)
        for _ in range(2):
            got = module(x)
            assert got.stride() == expected.stride()
            torch.testing.assert_close(got, expected, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-2)
        found.swap.off()
        assert torch.equal(module(x), expected)


@pytest.mark.parametrize("share", [1, 8])
def test_a_weight_is_brought_from_the_share_on_that_the_cpu_packs(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "least_share", lambda *_: share)
    module: Any = nn.Conv2d(64, 64, 3, padding=1).eval()  # a weight of 36,864 numbers and an input of 16,384
    with torch.no_grad():
        put_on(module)
        state, wanted = module.__dict__[MARK], []
        usual = state.forms_for
        monkeypatch.setattr(type(state), "forms_for", lambda self, input: (wanted.append(input), usual(input))[1])
        module(torch.randn(1, 64, 16, 16))
    assert len(wanted) == (share == 1)


@pytest.mark.parametrize("change", ["written", "exchanged", "copied", "stride"])
def test_packed_forms_follow_the_weight(change: str) -> None:
    make, shape = MADE["large"]
    module: Any = make().eval()
    x = torch.randn(shape)
    with torch.no_grad():
        put_on(module)
        module(x)
        if change == "written":
            module.weight.mul_(2)
        elif change == "exchanged":
            module.weight.data = torch.randn_like(module.weight)
        elif change == "copied":
            module = copy.deepcopy(module)
        else:
            module.stride = (2, 2)
        for _ in range(2):
            torch.testing.assert_close(module(x), type(module).forward(module, x), rtol=1e-4, atol=1e-4)
    assert module.__dict__[MARK].packed[0].weight is module.weight


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "padding_mode='reflect'"),
        (lambda: type("Own", (nn.Conv2d,), {"forward": lambda self, x: x})(4, 4, 3), "a forward of its own"),
        (lambda: type("Own", (nn.Conv1d,), {"_conv_forward": lambda self, *_: _[0]})(4, 4, 3), "a forward of its own"),
    ],
)
def test_what_may_compute_something_else_is_left(make: Any, why: str) -> None:
    found = convolution(make().eval())
    assert isinstance(found, str)
    assert why in found


def test_other_modules_are_none() -> None:
    assert convolution(nn.Linear(4, 4)) is None
    assert convolution(nn.Conv3d(4, 4, 3)) is None


def test_the_whole_model_is_optimized_and_taken_back() -> None:
    model = nn.Sequential(MADE["large"][0](), nn.SiLU(), nn.Conv2d(64, 4, 1)).eval()
    x = torch.randn(2, 64, 4, 4)
    with torch.no_grad():
        expected = model(x)
        report = lz.optimize(model)
        packed = [each for each in report.replaced if each.path == "0"]
        assert [each.kind for each in packed] == ["convolution"] * len(packed)
        torch.testing.assert_close(model(x).view(2, -1), expected.view(2, -1), rtol=1e-4, atol=1e-4)
        report.undo()
        assert torch.equal(model(x), expected)
