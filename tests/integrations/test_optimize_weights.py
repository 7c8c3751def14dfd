"""Weights that become something else than torch's parameters after ``lz.optimize``: the modules compute them then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mixtures
import pytest
import torch
from coded_modules import OfCodes
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import layerzero as lz
from decoders import made, tokens, transformers
from drawing import mostly, pairs
from layerzero.integrations.optimize.layers import layer
from layerzero.integrations.optimize.modules.experts import experts
from layerzero.integrations.optimize.modules.norms import norm
from layerzero.integrations.optimize.modules.products import block, linear, linear_then
from layerzero.integrations.optimize.swaps.candidate import Candidate
from layerzero.integrations.optimize.swaps.codes import Made
from layerzero.integrations.optimize.swaps.codes import product as coded
from layerzero.integrations.optimize.swaps.swap import Swap
from layerzero.integrations.optimize.swaps.weights import Budget

WITH_WEIGHTS = nn.Linear, nn.LayerNorm


class InInt8(OfCodes):
    """A weight as a library that quantises has it: an own class, which computes its product with rows by itself."""

    def numbers(self) -> torch.Tensor:
        return self.codes.float() * 0.01


def weights_of(model: Any, kinds: tuple[type, ...] = WITH_WEIGHTS) -> list[Any]:
    return [each for each in model.modules() if isinstance(each, kinds) or "RMSNorm" in type(each).__name__]


def pruned(model: Any, name: str = "weight") -> None:
    for each in weights_of(model):
        if getattr(each, name, None) is not None:
            prune.l1_unstructured(each, name, 0.5)


def pruned_without_hooks(model: Any) -> None:
    for each in weights_of(model):
        weight = each.weight.detach() * 0.5
        del each.weight
        each.weight = weight


def normed(model: Any) -> None:
    for each in weights_of(model, (nn.Linear,)):
        if isinstance(each, nn.Linear):
            parametrizations.weight_norm(each)


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def parametrized(model: Any, name: str = "weight") -> None:
    for each in weights_of(model):
        if getattr(each, name, None) is not None:
            parametrize.register_parametrization(each, name, Twice())


def quantised(model: Any) -> None:
    model.requires_grad_(False)
    for each in model.modules():
        if type(each) is nn.Linear:
            each.weight = nn.Parameter(InInt8((each.weight / 0.01).round().to(torch.int8)), requires_grad=False)


CHANGES: dict[str, Callable[[Any], None]] = {
    "pruned": pruned,
    "biases pruned": lambda model: pruned(model, "bias"),
    "no parameter": pruned_without_hooks,
    "weight norm": normed,
    "parametrised": parametrized,
    "biases parametrised": lambda model: parametrized(model, "bias"),
    "quantised": quantised,
}


class Rooted(nn.Module):
    """A norm by the root mean square, with its weight or with 1 + weight."""

    def __init__(self, plus: float) -> None:
        super().__init__()
        self.weight, self.eps, self.plus = nn.Parameter(torch.randn(16)), 1e-5, plus

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (self.plus + self.weight)


class LlamaRMSNorm(Rooted):
    """Changed as the models' own are."""


FOUND: dict[str, tuple[Callable[[Any], Any], Callable[[], nn.Module]]] = {
    "linear": (linear, lambda: nn.Linear(16, 16)),
    "linear then": (linear_then, lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU())),
    "block": (block, lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))),
    "layer norm": (norm, lambda: nn.LayerNorm(16)),
    "rms norm": (norm, lambda: LlamaRMSNorm(0.0)),
    "rms norm of 1 + weight": (norm, lambda: LlamaRMSNorm(1.0)),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("find", "make"), FOUND.values(), ids=FOUND)
def test_modules_compute_what_became_of_their_weights(
    find: Callable[[Any], Any], make: Callable[[], nn.Module], change: Callable[[Any], None]
) -> None:
    torch.manual_seed(0)
    stock, rows = make().eval(), torch.randn(3, 16)
    for each in stock.parameters():
        nn.init.normal_(each)
    model = copy.deepcopy(stock)
    find(model).swap.on()
    model(rows)
    for each in (stock, model):
        change(each)
    torch.testing.assert_close(model(rows), stock(rows), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("change", "kind"), pairs(CHANGES, ["Llama", "GPTNeoX", "Gemma"], CHANGES))
def test_layers_and_blocks_compute_what_became_of_their_weights(kind: str, change: str) -> None:
    stock, ids = made(kind), tokens()
    model = copy.deepcopy(stock)
    report = lz.optimize(model)
    assert {"layer", "block"} & {each.kind for each in report.replaced}
    outputs = []
    for each in (stock, model):
        CHANGES[change](each)
        cache = transformers.DynamicCache(config=each.config)
        outputs.append([each(part, past_key_values=cache).logits for part in (ids, ids[:, :1])])
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3, equal_nan=True)  # a row of zeros has no norm
    report.undo()
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, equal_nan=True)


@torch.no_grad()
def test_a_layer_whose_successors_norm_is_computed_leaves_it_alone() -> None:
    stock, ids = made(), tokens()
    model = copy.deepcopy(stock)
    lz.optimize(model)
    for each in (stock, model):
        parametrize.register_parametrization(each.model.layers[1].input_layernorm, "weight", Twice())
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_experts_compute_what_became_of_their_weights() -> None:
    """As adapters on the experts' parameters do."""
    stock, ids = mixtures.made("Qwen3Moe"), mixtures.tokens()
    model = copy.deepcopy(stock)
    for each in mixtures.experts_of(model):
        experts(each).swap.on()
    for each in (stock, model):
        for inner in mixtures.experts_of(each):
            parametrize.register_parametrization(inner, "down_proj", Twice())
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
@pytest.mark.usefixtures("layer_clock")
def test_a_layer_reads_sinks_that_were_exchanged() -> None:
    """They are a parameter that attention is told, of no product or norm."""
    stock, ids = mixtures.made("GptOss"), mixtures.tokens()
    model = copy.deepcopy(stock)
    report = lz.optimize(model)
    assert "layer" in {each.kind for each in report.replaced}
    for each in (stock, model):
        each.load_state_dict({name: 1.5 * value for name, value in each.state_dict().items()}, assign=True)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    for each in (stock, model):
        for name, parameter in each.requires_grad_(False).named_parameters():
            parameter.requires_grad_(name.endswith("sinks"))
        each(ids).logits.sum().backward()
    for mine, own in zip(model.model.layers, stock.model.layers, strict=True):
        torch.testing.assert_close(mine.self_attn.sinks.grad, own.self_attn.sinks.grad, rtol=1e-3, atol=1e-3)


def sparse(model: Any) -> None:
    model.requires_grad_(False)
    for each in model.modules():
        if type(each) is nn.Linear:
            each.weight = nn.Parameter(each.weight.to_sparse_csr(), requires_grad=False)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("change", [*CHANGES.values(), sparse], ids=[*CHANGES, "sparse"])
@pytest.mark.parametrize("kind", mostly(["Llama", "GPTNeoX", "Qwen3Moe"], {"GPTNeoX"}))
def test_weights_that_were_something_else_before_are_left(kind: str, change: Callable[[Any], None]) -> None:
    model = mixtures.made(kind) if kind == "Qwen3Moe" else made(kind)
    ids, parameters = tokens(), dict(model.named_parameters())
    change(model)
    now = dict(model.named_parameters())
    changed = [*now] != [*parameters] or any(now[name] is not each for name, each in parameters.items())
    expected = model(ids).logits
    report = lz.optimize(model)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-3)
    if changed and change is not pruned_without_hooks:  # which are nobody's parameters; some models have no biases
        assert any(each.module.endswith("Linear") for each in report.left)
    report.undo()
    torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("odd", ["a bias of one number", "a bias of float32", "a negated weight"])
def test_products_that_no_operation_takes_are_left(odd: str, weights: str | None) -> None:
    """Each ended lz.optimize with an error, though torch broadcasts such a bias and reads such a weight."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval().requires_grad_(False)
    if odd == "a bias of float32":
        model[0].weight.data = model[0].weight.data.bfloat16()
    elif odd == "a bias of one number":
        model[0].bias.data = torch.ones(1)
    else:
        model[0].weight.data = torch._neg_view(model[0].weight.data)
    report = lz.optimize(model, weights=weights)
    assert "0" not in {each.path for each in report.replaced}


@torch.no_grad()
def test_layers_serve_whatever_the_order_of_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes a pruning back puts the weight behind the bias, which is None in most models."""
    model, ids = made(), tokens()
    for each in model.modules():
        if type(each) is nn.Linear:
            prune.remove(prune.identity(each, "weight"), "weight")
    assert [*model.model.layers[0].self_attn.q_proj._parameters] == ["bias", "weight"]
    expected, computed, compute = model(ids).logits, [], layer.Layer.compute
    lz.optimize(model)
    monkeypatch.setattr(layer.Layer, "compute", lambda *given: (computed.append(1), compute(*given))[1])
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert len(computed) == len(model.model.layers)


@torch.no_grad()
@pytest.mark.parametrize("plus", [0.0, 1.0])
def test_norms_that_have_no_bias_are_not_asked_for_one(plus: float) -> None:
    """A module takes ten times as long to say that it has none as the rest of the question does."""

    class Silent(LlamaRMSNorm):
        def __getattr__(self, name: str) -> Any:
            assert name != "bias"
            return super().__getattr__(name)

    module, rows = Silent(plus).eval(), torch.randn(3, 16)
    expected, found = module(rows), norm(module)
    assert isinstance(found, Candidate)
    found.swap.on()
    torch.testing.assert_close(module(rows), expected, rtol=1e-4, atol=1e-4)


def test_a_thread_gets_no_codes_of_a_weight_that_was_written_before() -> None:
    """What they were made of is noted last: while one thread exchanges codes, another one makes its own."""
    product = nn.Linear(64, 32, bias=False).eval()
    state = Made(product.weight, "int8")
    Swap(product, coded, state).on()
    rows, exchange, got = torch.randn(3, 64), state.exchange, list[torch.Tensor]()

    def exchanging(of: Any) -> None:
        if not got:
            got.append(torch.empty(0))
            got.append(product(rows))
        exchange(of)

    with torch.no_grad():
        product(rows)
        product.weight.fill_(0.01)
        state.exchange = exchanging  # type: ignore[method-assign]
        last = product(rows)
    torch.testing.assert_close(got[1], last)


def test_what_is_written_while_a_weight_is_quantised_counts_at_the_next_call() -> None:
    product = nn.Linear(64, 32, bias=False).eval()
    state = Made(product.weight, "int8")
    Swap(product, coded, state).on()
    rows, quantised = torch.randn(3, 64), state._quantised

    def writing(weight: torch.Tensor) -> Any:
        made = quantised(weight)
        product.weight.fill_(0.02)
        return made

    with torch.no_grad():
        product.weight.fill_(0.01)
        state._quantised = writing  # type: ignore[method-assign]
        product(rows)
        state._quantised = quantised  # type: ignore[method-assign]
        torch.testing.assert_close(
            product(rows), torch.nn.functional.linear(rows, product.weight), rtol=1e-2, atol=1e-3
        )


def test_memory_is_summed_up_while_another_thread_packs() -> None:
    class Counted:
        entered = 0

        def __enter__(self) -> None:
            self.entered += 1

        def __exit__(self, *_: object) -> None:
            pass

    budget = Budget(2**20)
    budget.lock = lock = Counted()  # type: ignore[assignment]
    made = budget.packed(torch.ones(8, 8), lambda: None)
    assert lock.entered == 1
    assert made in budget._weights
