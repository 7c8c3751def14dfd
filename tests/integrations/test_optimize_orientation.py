"""Products whose modules are none of torch's: told by their values, with a weight that lies (N, K) or (K, N)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import layerzero as lz
from layerzero.integrations.optimize.modules.products import Block, block, linear
from layerzero.integrations.optimize.swaps.candidate import Candidate, compared
from layerzero.integrations.optimize.swaps.swap import MARK
from layerzero.integrations.optimize.swaps.weights import View, turns

PACKED = "packed" in str(lz.which("linear", torch.ones(1, 8), w := torch.ones(8, 8), packed=lz.PackedWeight(w)))


class Turned(nn.Module):
    """As GPT-2's: a weight (K, N)."""

    def __init__(self, outputs: int, inputs: int, after: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        product = product.view(*x.shape[:-1], -1)
        return product if self.after is None else self.after(x, product)


class Written(nn.Linear):
    """As Falcon's: torch's Linear with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden = input @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


class Feed(nn.Module):
    def __init__(self, product: Any) -> None:
        super().__init__()
        self.first, self.act, self.second = product(48, 16), nn.GELU(approximate="tanh"), product(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


def written(outputs: int, inputs: int) -> nn.Module:
    return Written(inputs, outputs)


def put_on(candidate: Any) -> Candidate:
    assert isinstance(candidate, Candidate), candidate
    assert compared(candidate) == ""
    candidate.swap.on()
    return candidate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("made", "turned"),
    [
        (Turned(24, 16), True),
        (Turned(16, 16), True),
        (Written(16, 24), False),
        (Written(16, 16, bias=False), False),
        (nn.Linear(16, 24), False),
        (nn.Embedding(16, 24), None),
        (nn.Bilinear(16, 16, 24), None),
        (Turned(16, 16, lambda _, product: product.clamp(-50, 50)), None),
        (Turned(16, 16, lambda x, product: product + x), None),
        (Turned(16, 16, lambda _, product: product.relu()), None),
        (Turned(16, 16, lambda _, product: (product * 8).round() / 8), None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_product_is_told_by_its_values(made: nn.Module, turned: bool | None, dtype: torch.dtype) -> None:
    assert turns(copy.deepcopy(made).eval().to(dtype)) is turned


@pytest.mark.parametrize(
    "name", ["transformers.pytorch_utils.Conv1D", "transformers.models.falcon.modeling_falcon.FalconLinear"]
)
def test_transformers_own_are_products(name: str) -> None:
    pytest.importorskip("transformers")
    place, _, kind = name.rpartition(".")
    made = getattr(pytest.importorskip(place), kind)(24, 16)
    assert turns(made) is (kind == "Conv1D")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("product", [Turned, written])
def test_it_computes_what_the_module_does_until_it_is_taken_off(product: Any, dtype: torch.dtype) -> None:
    module = product(24, 16).eval().to(dtype)
    x = torch.randn(2, 3, 16).to(dtype)
    with torch.no_grad():
        expected = module(x)
        found = put_on(linear(module))
        torch.testing.assert_close(module(x), expected, rtol=2e-2, atol=2e-2)
        found.swap.off()
        assert torch.equal(module(x), expected)


@pytest.mark.skipif(not PACKED, reason="no kernel of this CPU wants a packed weight")
@pytest.mark.parametrize("change", ["written", "exchanged", "another", "copied"])
def test_packed_forms_follow_a_weight_that_lies_the_other_way(change: str) -> None:
    module = Turned(24, 16).eval()
    x = torch.randn(5, 16)
    with torch.no_grad():
        put_on(linear(module))
        module(x)
        state = module.__dict__[MARK]
        assert state.packed[0].forms == 1
        if change == "written":
            module.weight.mul_(2)
        elif change == "exchanged":
            module.weight.data = torch.randn(16, 24)
        elif change == "another":
            module.weight = nn.Parameter(torch.randn(16, 24))
        else:
            module = copy.deepcopy(module)
            twin = module.__dict__[MARK]
            assert twin is not state
            assert twin.packed[0].weight.data_ptr() == module.weight.data_ptr()
        for _ in range(2):
            torch.testing.assert_close(module(x), functional.linear(x, module.weight.t(), module.bias))
        assert module.__dict__[MARK].packed[0].forms == 1


@pytest.mark.parametrize("product", [Turned, written])
def test_blocks_of_them_are_blocks(product: Any) -> None:
    module = Feed(product).eval()
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        expected = module(x)
        found = put_on(block(module))
        assert isinstance(found.swap.state, Block)
        torch.testing.assert_close(module(x), expected)
        module.first.weight.mul_(2)
        again = copy.deepcopy(module)
        found.swap.off()
        torch.testing.assert_close(again(x), module(x))


def test_gradients_and_training_are_the_modules_own() -> None:
    module = Turned(24, 16).eval()
    put_on(linear(module))
    module(torch.randn(5, 16)).sum().backward()
    assert module.weight.grad is not None


def test_a_view_follows_a_weight_that_lies_otherwise_where_it_lay() -> None:
    weight = nn.Parameter(torch.arange(16.0).view(4, 4))
    view = View(weight)
    assert view.of(weight) is view.of(weight)
    weight.data = weight.data.t()
    assert torch.equal(view.of(weight), weight.t())
