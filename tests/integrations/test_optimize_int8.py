"""Products with weights of int8: those that a caller asks for, and those of other libraries, told by value."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from coded_modules import DTYPES, Blocks, off, taken
from torch import Tensor, nn
from torch.nn import functional

import layerzero as lz
from decoders import made, tokens, transformers
from layerzero.integrations.optimize.modules import int8


def why(report: Any, path: str) -> str:
    return " | ".join(each.why for each in report.left if each.path == path)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"weights": "int3"}, "'int4' or 'int4:32' or 'fp8' or 'mxfp4' or 'nvfp4' or 'auto', got 'int3'"),
        ({"weights": 8}, "'int4' or 'int4:32' or 'fp8' or 'mxfp4' or 'nvfp4' or 'auto', got 8"),
        ({"weights": "int8", "activations": "int4"}, "activations: wanted None or 'int8', got 'int4'"),
        ({"weights": "int8", "accuracy": -0.1}, "accuracy: wanted a number from 0 or None, got -0.1"),
        ({"weights": "int8", "accuracy": True}, "accuracy: wanted a number from 0 or None, got True"),
        ({"accuracy": 0.1}, "accuracy: wanted weights= or activations= with it, got 0.1 alone"),
    ],
)
def test_what_nobody_can_give_is_refused(asked: dict[str, Any], said: str) -> None:
    model = Blocks().eval()
    with pytest.raises(lz.InvalidCallError, match=said):
        lz.optimize(model, **asked)
    assert "forward" not in model.up.__dict__


@DTYPES
@pytest.mark.parametrize("activations", [None, "int8"])
def test_weights_are_quantised_when_asked_for(activations: str | None, dtype: torch.dtype) -> None:
    model = Blocks().eval().to(dtype)
    rows = torch.randn(5, 64).to(dtype)
    names = list(model.state_dict())
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model, weights="int8", activations=activations)
        assert set(taken(report)) == {"up", "down"}
        assert 0.001 < off(model(rows), own) < 0.04
        wanted = [(each.weight, each.bias) for each in (model.up, model.down)]
        text = str(report)
        assert list(model.state_dict()) == names
        report.undo()
        assert torch.equal(model(rows), own)
    assert all(each is not None for pair in wanted for each in pair)
    assert "2 weights in int8" in text
    assert "which stay" in text
    assert "up: 1 lose" in text


def test_compiled_code_runs_the_models_own_in_one_graph() -> None:
    model, rows = Blocks().eval(), torch.randn(5, 64)
    with torch.no_grad():
        own = model(rows)
        lz.optimize(model, weights="int8")
        assert off(model(rows), own) > 0.001
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(rows), own)


def test_nothing_is_quantised_unasked() -> None:
    model = Blocks().eval()
    assert not taken(lz.optimize(model))


def test_what_loses_more_than_allowed_stays(unmeasured: None) -> None:
    """A number 300 times as large as the rest leaves no step for them: seen with the inputs alone."""
    model, rows = Blocks().eval(), torch.randn(40, 64)
    with torch.no_grad():
        model.scale[3] = 3000.0
        model.down.weight[:, 3] = 0.0  # what is large counts for nothing
        report = lz.optimize(model, rows, weights="int8", activations="int8")
    assert "it loses" in why(report, "down")
    assert "accuracy=0.03 allows less" in why(report, "down")
    assert "it loses" not in why(report, "up")
    report.undo()
    exact = lz.optimize(model, weights="int8", accuracy=0)
    assert not taken(exact)
    assert "accuracy=0 allows less" in why(exact, "up")


def test_a_report_says_how_far_the_output_is_from_the_models_own(
    unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerzero.integrations.optimize import selection

    monkeypatch.setattr(selection, "_keep_what_gains", lambda *_: None)
    model, rows = Blocks().eval(), torch.randn(40, 64)
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model, rows, weights="int8", activations="int8")
        relative, cosine = report.distance
        assert relative == pytest.approx(off(model(rows), own), rel=0.2)
    assert cosine == pytest.approx(1 - relative**2 / 2, abs=1e-4)
    assert f"cosine {cosine:.6f}" in str(report)


def test_weights_that_are_written_into_are_followed() -> None:
    model, rows = Blocks().eval(), torch.randn(5, 64)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each in other.parameters():
            each.copy_(torch.randn_like(each))
        report = lz.optimize(model, weights="int8", activations="int8")
        model(rows)
        model.load_state_dict(other.state_dict())
        assert off(model(rows), other(rows)) < 0.04
        model.up.weight.data.mul_(3.0)
        other.up.weight.mul_(3.0)
        assert off(model(rows), other(rows)) < 0.04
        model.up.weight = nn.Parameter(-model.up.weight)
        other.up.weight.neg_()
        assert off(model(rows), other(rows)) < 0.04
        assert 0.001 < off(model(rows), other(rows))
        model.bfloat16()
        assert off(model(rows.bfloat16()), other(rows)) < 0.05
        report.undo()


def test_copies_have_weights_of_their_own_and_gradients_go_the_models_way() -> None:
    model, rows = Blocks().eval(), torch.randn(5, 64)
    stock = copy.deepcopy(model)
    lz.optimize(model, weights="int8", activations="int8")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.up.weight.zero_()
        assert off(model(rows), stock(rows)) < 0.04
        assert off(twin(rows), stock(rows)) > 0.1
        with pytest.warns(lz.LayerZeroWarning, match=r"a pickle .*; call lz\.optimize where it is loaded"):
            pickled = pickle.dumps(model)
        assert torch.equal(pickle.loads(pickled)(rows), stock(rows))  # ours
    model(rows).sum().backward()
    stock(rows).sum().backward()
    assert torch.equal(model.up.weight.grad, stock.up.weight.grad)
    model.train()
    assert torch.equal(model(rows), stock(rows))


def test_nothing_is_put_on_where_no_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "TIMED", frozenset())
    model = nn.Sequential(Compressed(nn.Linear(64, 48)), nn.Linear(48, 8)).eval()
    report = lz.optimize(model, weights="int8")
    assert not taken(report)
    assert all("pass inputs= to measure" in why(report, path) for path in ("0", "1"))


def test_products_with_turned_weights_are_quantised() -> None:
    """Transformers' Conv1D, of which GPT-2 is made."""
    model, ids = transformers.GPT2Model(transformers.GPT2Config(n_embd=48, n_head=3, n_layer=1)).eval(), tokens()
    with torch.no_grad():
        own = model(ids).last_hidden_state
        report = lz.optimize(model, weights="int8", activations="int8")
        assert {each.rpartition(".")[2] for each in taken(report)} == {"c_attn", "c_proj", "c_fc"}
        assert 0.0005 < off(model(ids).last_hidden_state, own) < 0.05
        model.h[0].mlp.c_fc.weight.neg_()
        got = model(ids).last_hidden_state
        report.undo()
        assert off(got, model(ids).last_hidden_state) < 0.05


@pytest.mark.parametrize("kind", ["Conv1D", "FalconLinear"])
def test_products_are_told_by_what_they_compute(kind: str) -> None:
    from transformers.models.falcon.modeling_falcon import FalconLinear

    product = transformers.pytorch_utils.Conv1D(32, 48) if kind == "Conv1D" else FalconLinear(48, 32)
    hooked = copy.deepcopy(product)
    hooked.register_forward_hook(lambda *_: None)
    model, rows = nn.ModuleList([product, hooked]).eval(), torch.randn(5, 48)
    with torch.no_grad():
        own = product(rows)
        report = lz.optimize(model, weights="int8")
        assert set(taken(report)) == {"0"}
        assert "it has hooks" in why(report, "1")
        assert 0 < off(product(rows), own) < 0.02


def test_a_model_without_products_says_so() -> None:
    report = lz.optimize(nn.Sequential(nn.ReLU(), nn.LayerNorm(4)).eval(), weights="int8")
    assert why(report, "") == "weights='int8': it has no Linear with a floating weight of its own"


@pytest.mark.slow
def test_the_output_of_a_decoder_is_looked_at_with_inputs_alone(unmeasured: None) -> None:
    model, ids = made(), tokens()
    with torch.no_grad():
        own = model(ids).logits
        report = lz.optimize(model, weights="int8", activations="int8", accuracy=0.05)
        found = taken(report)
        assert any(each.endswith("down_proj") for each in found)
        assert any(each.endswith("q_proj") for each in found)
        assert not any(each.kind in {"layer", "block"} for each in report.replaced)
        assert "it gives the model's output" in why(report, "lm_head")
        assert 0.001 < off(model(ids).logits, own) < 0.15
        report.undo()
        assert torch.equal(model(ids).logits, own)
        seen = lz.optimize(model, {"input_ids": ids}, weights="int8", activations="int8", accuracy=0.05)
        assert "it gives the model's output" not in why(seen, "lm_head")
        seen.undo()


@pytest.mark.parametrize(
    ("kind", "weights"), [("Llama", "int8"), ("Qwen2", "int4:32"), ("Qwen3", "fp8"), ("Gemma2", "int8")]
)
def test_layers_compute_around_weights_that_are_codes(
    kind: str, weights: str, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values are one product of codes that lie one after the other, and so are gate and up."""
    from layerzero.integrations.optimize import selection

    monkeypatch.setattr(selection, "_keep_what_gains", lambda *_: True)
    model, ids = made(kind), tokens()
    with torch.no_grad():
        own = model(ids).logits
        report = lz.optimize(model, {"input_ids": ids}, weights=weights, graph=False, accuracy=1.0)
        layers = [each for each in report.replaced if each.kind == "layer"]
        codes = [each for each in report.replaced if each.kind in {"int8", "int4", "fp8"}]
        assert layers
        assert any(each.path.startswith(f"{layers[0].path}.") for each in codes)
        for each in codes:
            each.swap.state.own_at = ()  # as where codes are faster for any number of rows
        together = model(ids).logits
        state = layers[0].swap.state
        for part, products in ((state.heads, state.heads.products[:-1]), (state.block, (state.block.products[0],) * 2)):
            assert len(part.coded.state.pair[0]) == sum(each.weight.shape[0] for each in products)
        for each in layers:
            each.exchange.off()
        assert off(together, model(ids).logits) < 1e-3
        assert 1e-4 < off(together, own) < 0.3
        for each in layers:
            each.exchange.on()
        state.heads.products[1].weight.neg_()  # keys
        twin = copy.deepcopy(model)
        changed = model(ids).logits
        assert off(changed, together) > 1e-3
        assert torch.equal(twin(ids).logits, changed)
        for each in layers:
            each.exchange.off()
        assert off(changed, model(ids).logits) < 1e-3
        state.heads.products[1].weight.neg_()
        report.undo()
        assert torch.equal(model(ids).logits, own)


class Compressed(nn.Linear):
    """As compressed-tensors keeps one: codes and scales are parameters, and the product is its own."""

    def __init__(self, linear: nn.Linear, *, rounds: bool = False, times: float = 1.0) -> None:
        super().__init__(linear.in_features, linear.out_features)
        codes, scale = lz.quantize(linear.weight.detach(), "int8", per="row")
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
        self.rounds, self.times = rounds, times

    def forward(self, input: Tensor) -> Tensor:
        weight = (self.weight * self.weight_scale).to(input.dtype)
        if self.rounds:
            codes, scale = lz.quantize(input.float(), "int8", per="row")
            input = (codes * scale).to(input.dtype)
        return functional.linear(input, weight, self.bias) * self.times


@DTYPES
@pytest.mark.parametrize(("rounds", "how"), [(False, "rows as they are"), (True, "rows int8")])
def test_codes_of_other_libraries_are_told_by_value(rounds: bool, how: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(Compressed(nn.Linear(64, 48).to(dtype), rounds=rounds)).eval()
    rows = torch.randn(7, 64).to(dtype)
    with torch.no_grad():
        own = model(rows)
        report = lz.optimize(model)
        assert taken(report) == {"0": f"lz.quantized_linear with int8 weights and {how}"}
        assert off(model(rows), own) < 0.012
        model[0].weight.neg_()
        model[0].weight_scale.mul_(2.0)
        got = model(rows)
        report.undo()
        assert off(got, model(rows)) < 0.012


class Mixed(Compressed):
    """Takes rows in bfloat16 with a bias in float32, as torchao's dynamic int8; others it computes otherwise."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype is not torch.bfloat16:
            return super().forward(input) * 1.5
        product = functional.linear(input.double(), self.weight.double() * self.weight_scale.double())
        return (product + self.bias.double()).to(input.dtype)


def test_rows_of_another_dtype_than_the_bias_are_left_and_nothing_is_raised() -> None:
    report = lz.optimize(nn.Sequential(Mixed(nn.Linear(64, 48))).eval())
    assert not taken(report)
    assert "bias" in why(report, "0")


class PerTensor(Compressed):
    """One scale for all rows, as torch's dynamic quantisation has it."""

    def forward(self, input: Tensor) -> Tensor:
        codes, scale = lz.quantize(input, "int8", per="tensor")
        return functional.linear(codes * scale, self.weight * self.weight_scale, self.bias)


@pytest.mark.parametrize("other", [lambda each: Compressed(each, times=1.01), PerTensor], ids=["scaled", "one scale"])
def test_other_products_of_int8_stay(other: Any) -> None:
    report = lz.optimize(nn.Sequential(other(nn.Linear(64, 48))).eval())
    assert not taken(report)
    assert "its output is no product of its int8 weight" in why(report, "0")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_torchs_dynamic_int8_stays_and_says_why() -> None:
    model = torch.ao.quantization.quantize_dynamic(Blocks().eval(), {nn.Linear}, dtype=torch.qint8)
    report = lz.optimize(model)
    assert not report.replaced
    assert "one scale and a zero point" in why(report, "up")
    asked = lz.optimize(model, weights="int8")
    assert "no Linear with a floating weight" in why(asked, "")
