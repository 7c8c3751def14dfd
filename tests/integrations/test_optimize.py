"""``lz.optimize`` on small random models of Transformers: the same tokens, values and names, and the way back."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from optimized_models import MODELS, made

import layerzero as lz
from decoders import output, tokens
from drawing import mostly, pairs

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

from layerzero.integrations.optimize.attention.transformers import AttentionSwap  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
]


UNLIKE = {"llama", "gemma2", "phi3", "gpt2", "bert", "t5 gated"}
"""The others differ from one of these in a bias, a window or a norm."""

ENCODERS = ("bert", "t5", "t5 gated")
DECODERS = tuple(name for name in MODELS if name not in ENCODERS)

COUNTS = {
    "llama": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "qwen2": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "qwen3": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "gemma2": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "mistral": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "phi3": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "gpt2": {"attention": 1, "block": 2, "linear": 5},
    "bert": {"attention": 1, "layer": 2, "linear": 2, "padding": 1},
    "t5": {"attention": 1, "block": 2, "norm": 5, "linear": 8, "padding": 1},
    "t5 gated": {"attention": 1, "block": 2, "norm": 5, "linear": 8, "padding": 1},
}
"""Replaced without inputs, by kind, with packed products on this CPU."""


@pytest.mark.parametrize("name", MODELS)
def test_modules_are_found_by_what_they_compute(name: str) -> None:
    report = lz.optimize(made(name))
    counts: dict[str, int] = {}
    for each in report.replaced:
        counts[each.kind] = counts.get(each.kind, 0) + 1
    if any("packed" in (each.kernel or "") for each in report.replaced):
        assert counts == COUNTS[name]
    assert all(each.error is None or each.error <= 2e-5 for each in report.replaced)
    assert "replaced" in str(report)


@pytest.mark.parametrize("name", mostly(DECODERS, UNLIKE))
def test_greedy_tokens_are_stocks(name: str) -> None:
    model = made(name)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # on the left
    arguments = {"attention_mask": mask, "max_new_tokens": 32, "do_sample": False}
    expected = model.generate(ids, **arguments)
    lz.optimize(model)
    assert torch.equal(model.generate(ids, **arguments), expected)


@pytest.mark.parametrize(("name", "dtype"), pairs(MODELS, [torch.float32, torch.bfloat16], UNLIKE), ids=str)
def test_results_are_as_near_to_the_truth_as_stocks(name: str, dtype: torch.dtype) -> None:
    model = made(name, dtype)
    truth = output(copy.deepcopy(model).double())
    stock = output(model)
    lz.optimize(model)
    optimized = output(model)
    scale = truth.abs().max()
    allowed = 1.5 * (stock - truth).abs().max() + (1e-5 if dtype is torch.float32 else 8e-3) * scale
    assert (optimized - truth).abs().max() <= allowed


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_what_is_found_does_not_depend_on_the_default_dtype(name: str) -> None:
    model = made(name, torch.bfloat16)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            report = lz.optimize(model)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([(each.path, each.kind) for each in report.replaced])
        report.undo()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", mostly(MODELS, UNLIKE))
def test_undo_gives_back_what_was(name: str) -> None:
    model = made(name)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    expected, before = output(model), [set(vars(each)) for each in model.modules()]
    setting = model.config._attn_implementation
    report = lz.optimize(model)
    assert report.is_on
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    output(model)
    report.undo()
    assert not report.is_on
    assert torch.equal(output(model), expected)
    assert [set(vars(each)) for each in model.modules()] == before
    assert model.config._attn_implementation == setting
    report.undo()  # once more changes nothing
    assert torch.equal(output(model), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_weights_may_be_loaded_moved_and_cast_afterwards(name: str) -> None:
    torch.manual_seed(5)
    other = MODELS[name]().eval()
    model = made(name)
    report = lz.optimize(model)
    output(model)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(output(model), output(other), rtol=1e-4, atol=1e-4)
    model.load_state_dict({key: value.clone() for key, value in made(name).state_dict().items()}, assign=True)
    torch.testing.assert_close(output(model), output(made(name)), rtol=1e-4, atol=1e-4)
    uncapped = name == "gemma2" and model._supports_sdpa  # stock leaves the cap out, with Transformers 5.17
    off = 1e-4 if uncapped else 1e-5
    torch.testing.assert_close(output(model.double()), output(made(name).double()), rtol=off, atol=off)
    wide = output(made(name, torch.bfloat16)).float()
    torch.testing.assert_close(output(model.bfloat16()).float(), wide, rtol=0.05, atol=0.05 * wide.abs().max().item())
    report.undo()
    assert torch.equal(output(model.float()), output(made(name, torch.bfloat16).float()))


def test_training_steps_reach_the_packed_weights() -> None:
    model, stock = made("llama"), made("llama")
    lz.optimize(model)
    output(model)
    for each in (model, stock):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each.train()
        each(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        each.eval()
    torch.testing.assert_close(output(model), output(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_gradients_are_stocks(name: str) -> None:
    model, stock = made(name), made(name)
    lz.optimize(model)
    output(model)
    for each in (model, stock):
        each(tokens(), labels=tokens()).loss.backward()
    for (key, got), expected in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: key + text)


def test_gradients_of_inputs_pass_frozen_weights() -> None:
    grads = []
    for optimized in (False, True):
        model = made("llama").requires_grad_(False)
        if optimized:
            lz.optimize(model)
        inputs = model.get_input_embeddings()(tokens()).detach().requires_grad_()
        model(inputs_embeds=inputs)[0].square().sum().backward()
        grads.append(inputs.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-3 * grads[0].abs().max().item())


def test_a_setting_that_somebody_chose_meanwhile_is_saved() -> None:
    model = made("llama")
    report = lz.optimize(model)
    model.set_attn_implementation("eager")
    twin = pickle.loads(pickle.dumps(model))  # ours
    assert twin.config._attn_implementation == "eager"
    report.undo()
    assert model.config._attn_implementation == "eager"
    assert not any("_layerzero_setting" in vars(each) for each in model.modules())


def test_parts_of_an_optimized_model_are_saved_with_the_stock_setting() -> None:
    model = made("llama")
    report = lz.optimize(model)
    for part in (model, model.model, model.model.layers[0].self_attn, copy.deepcopy(model.model)):
        twin = pickle.loads(pickle.dumps(part))  # ours
        assert twin.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "layerzero"
    report.undo()


def test_a_second_exchange_keeps_what_the_first_wrote_down() -> None:
    model = made("llama")
    first = AttentionSwap(model)
    first.on()
    report = lz.optimize(model)
    assert pickle.loads(pickle.dumps(model)).config._attn_implementation == "sdpa"  # ours
    report.undo()
    assert pickle.loads(pickle.dumps(model)).config._attn_implementation == "sdpa"  # ours
    first.off()


@pytest.mark.parametrize("way", ["deepcopy", "save", "state"])
def test_copies_compute_with_their_own_weights(way: str, tmp_path: Any) -> None:
    model = made("llama")
    expected = output(model)
    report = lz.optimize(model)
    output(model)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
        assert any("_layerzero" in vars(each) for each in twin.modules())
        assert copy.copy(twin.config)._attn_implementation == "layerzero"
    elif way == "save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        assert not any(vars(each).get("_layerzero") for each in twin.modules())
        assert model.config._attn_implementation == "layerzero"
        assert twin.config._attn_implementation == "sdpa"  # of a process that may have no LayerZero
        assert lz.optimize(twin).replaced
    else:
        model.save_pretrained(tmp_path)
        twin = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output(twin), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    stock = made("llama")
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.mul_(0.5)
    torch.testing.assert_close(output(twin), output(stock), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output(model), expected, rtol=1e-4, atol=1e-4)
    report.undo()
    torch.testing.assert_close(output(twin), output(stock), rtol=1e-4, atol=1e-4)


def test_an_undone_model_has_no_references_to_its_weights():
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).eval()
    report = lz.optimize(model)
    if not report.replaced:
        pytest.skip("no kernel here beats torch's own")
    report.undo()
    assert [weakref.getweakrefcount(each) for each in model.parameters()] == [0, 0, 0, 0]  # torch swaps no other
