"""lz.optimize(model, training=True): the same losses and gradients, what outputs have, and what is left or refused."""

from __future__ import annotations

import copy
import inspect
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import layerzero as lz
from decoders import SIZES, made, tokens, transformers
from layerzero.integrations.optimize.models import training
from layerzero.integrations.optimize.models.training import LOSS, NORM


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    """Whatever a step takes: tests wait for no time."""
    monkeypatch.setattr(training, "_slow", lambda *_: "")


def batch(**more):
    ids = tokens(length=12)
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), **more}


def step(model, given):
    loss = model(**given).loss
    weights = [each for each in model.parameters() if each.requires_grad]
    return loss, torch.autograd.grad(loss, weights, allow_unused=True)


def kinds(report):
    return {each.kind for each in report.replaced}


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Phi3", "Olmo2"])
def test_a_step_has_the_loss_and_the_gradients_of_the_models_own(kind):
    model = made(kind).train()
    for given in (batch(), batch(num_items_in_batch=torch.tensor(7))):
        wanted = step(model, given)
        report = lz.optimize(model, training=True)
        assert kinds(report) == {NORM, LOSS}, str(report)
        got = step(model, given)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        assert model(**given).logits is None
        report.undo()
        assert model(**given).logits is not None


def test_tied_weights_get_the_gradient_of_both_uses():
    model = made().train()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    wanted = step(model, batch())
    lz.optimize(model, training=True)
    torch.testing.assert_close(step(model, batch()), wanted, rtol=1e-4, atol=1e-5)


def test_calls_that_want_logits_get_them():
    model = made().train()
    names = inspect.signature(model.forward)
    lz.optimize(model, training=True)
    assert inspect.signature(model.forward) == names  # by which a Trainer chooses the columns of a dataset
    given = batch()
    assert model(given["input_ids"]).logits.shape == (2, 12, 101)  # no labels
    assert model(**given, output_hidden_states=True).logits.shape == (2, 12, 101)  # another argument
    with torch.no_grad():
        assert model(**given).logits is not None
    assert model.eval()(**given).logits is not None
    assert len(model.train()(**given, return_dict=False)[1]) == 2


class Handing(nn.Module):
    """Hands on names that it lacks, and arguments that are None, as PEFT's models do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, input_ids=None, labels=None, output_attentions=None, return_dict=None, **more):
        told = {"output_attentions": output_attentions, "return_dict": return_dict}
        return self.model(input_ids=input_ids, labels=labels, **told, **more)


def test_the_loss_within_a_wrapper_is_taken_once():
    model = Handing(Handing(made())).train()
    wanted = step(model, batch())
    report = lz.optimize(model, training=True)
    assert [each.path for each in report.replaced if each.kind == LOSS] == ["model.model"], str(report)
    assert not report.left
    assert "run their own code now" not in str(report), "a proof resets buffers, which the loss does not rest on"
    torch.testing.assert_close(step(model, batch()), wanted, rtol=1e-4, atol=1e-5)
    assert model(**batch()).logits is None
    report.undo()
    model.model.model.lm_head = nn.Sequential(model.lm_head)
    (why,) = (each.why for each in lz.optimize(model, training=True).left)
    assert why == "its output layer is torch.nn.modules.container.Sequential, wanted torch.nn.Linear"


def test_a_hook_or_another_output_layer_is_respected():
    model = made().train()
    lz.optimize(model, training=True)
    seen = []
    hook = model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    assert model(**batch()).logits is not None
    assert seen == [1]
    hook.remove()
    assert model(**batch()).logits is None
    model.lm_head = nn.Sequential(model.lm_head)
    assert model(**batch()).logits is not None


def test_gradient_checkpointing_and_dropout_have_the_same_step():
    model = made().train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its newer name
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(step(model, batch()))
        lz.optimize(model, training=True)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_reentrant_checkpoints_are_left_as_they_are():
    model = made().train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": True})
    report = lz.optimize(model, training=True)
    assert not report.replaced
    assert "use_reentrant=False" in report.left[0].why
    assert model(**batch()).logits is not None


def test_a_norm_within_a_checkpoint_is_computed_twice():
    model = made().train()
    lz.optimize(model, training=True)
    norm, rows = model.model.norm, torch.randn(3, 32, requires_grad=True)
    wanted = torch.autograd.grad(norm(rows).sum(), rows)
    got = torch.autograd.grad(checkpoint(norm, rows, use_reentrant=False).sum(), rows)
    torch.testing.assert_close(got, wanted)


def test_autocast_multiplies_in_its_dtype():
    model = made().train()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(**batch()).loss
        lz.optimize(model, training=True)
        got = model(**batch()).loss
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


def test_a_copy_trains_by_itself():
    model = made().train()
    lz.optimize(model, training=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2.0)
    own = copy.deepcopy(twin)
    assert twin(**batch()).loss == own(**batch()).loss
    assert twin(**batch()).loss != model(**batch()).loss
    assert twin(**batch()).logits is None


def test_no_gradient_is_written_and_modes_and_random_numbers_stay(monkeypatch):
    model = made().train()
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("every device was seeded"))
    model.model.norm.eval()
    state = torch.get_rng_state()
    lz.optimize(model, training=True)
    assert all(each.grad is None for each in model.parameters())
    assert model.training
    assert not model.model.norm.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_kind_that_is_wrong_or_slow_is_left(monkeypatch):
    own = training._loss
    monkeypatch.setattr(training, "_loss", lambda *given: 1.5 * own(*given))
    report = lz.optimize(made(), training=True)
    assert kinds(report) == {NORM}
    assert "loss was off by 0.5 of its largest value in a step" in str(report)
    monkeypatch.setattr(training, "_slow", lambda *_: "a step takes longer")
    assert not lz.optimize(made(), training=True).replaced


def test_time_decides_what_stays(monkeypatch):
    monkeypatch.undo()
    clock = iter(range(10**6))
    monkeypatch.setattr(training.timing, "CLOCK", lambda: next(clock))
    assert kinds(lz.optimize(made(), training=True, rounds=2)) == {NORM, LOSS}  # each step takes one tick
    seconds = {False: [1.0], True: [1.1]}
    monkeypatch.setattr(training.timing, "race", lambda *_: seconds)
    monkeypatch.setattr(training, "_memory", lambda *given: f" and {1 + given[-1]} MiB")
    report = lz.optimize(made(), training=True)
    assert "takes 1.10 times as long with it: 1100.0 ms and 2 MiB, without 1000.0 ms and 1 MiB" in str(report)


def test_a_step_that_has_no_room_is_tried_with_fewer_tokens(monkeypatch):
    """As on a GPU, whose texts are longer; what finds no room beside the gradients to compare with is left."""
    sizes, tensors = [], []
    own = training._step

    def step(root, given):
        assert not [each for each in tensors if each() is not None], "the step that had no room still takes it"
        sizes.append(given["input_ids"].numel())
        if sizes[-1] > 2 * 64 or len(sizes) == 4:
            activations = torch.ones(1)
            tensors.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(root, given)

    monkeypatch.setattr(training, "_step", step)
    own_example = training._example
    monkeypatch.setattr(training, "_example", lambda root, *kind: own_example(root, *kind or ("cuda",)))
    report = lz.optimize(made(), training=True)
    assert sizes == [2048, 128, 128, 128]
    assert kinds(report) == {NORM}
    assert "CUDA out of memory" in str(report)


def test_a_model_without_weights_is_left_as_it_is():
    (left,) = lz.optimize(nn.ReLU(), training=True).left
    assert "wanted inputs=" in left.why


def test_a_norm_whose_weight_waits_elsewhere_is_left():
    model = made()
    last = model.model.norm
    values = last.weight.detach().clone()
    last.weight = nn.Parameter(torch.empty_like(values, device="meta"))  # as accelerate's offloading leaves it
    last.forward = lambda x: nn.functional.rms_norm(x, values.shape, values, last.variance_epsilon)
    report = lz.optimize(model, training=True)
    assert [each.why for each in report.left if each.path == "model.norm"] == [
        "its forward was exchanged on the instance, as accelerate's offloading does"
    ]
    assert {each.path for each in report.replaced if each.kind == NORM} == {
        path for path, each in model.named_modules() if type(each) is type(last) and each is not last
    }


def merged():
    """As with peft's adapters once they are merged: they want gradients, and nothing computes with them."""
    model = made().requires_grad_(False)
    model.lora_A = nn.Parameter(torch.ones(2))
    return model


class Told(nn.Linear):
    """Gives its loss in a dict, as a Trainer takes it."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, labels):
        return {"loss": super().forward(x).sum()}


REFUSED = [
    (lambda: nn.DataParallel(made()), "it wraps a model; optimize that before it is wrapped"),
    (lambda: nn.Linear(4, 4), "wanted inputs= as a dict with labels"),
    (lambda: made().requires_grad_(False), "none of its weights wants a gradient"),
    (merged, "a step gives no loss with gradients"),
]


@pytest.mark.parametrize(("model", "why"), REFUSED)
def test_what_cannot_be_proved_is_left(model, why):
    report = lz.optimize(model(), training=True)
    assert not report.replaced
    assert why in str(report)


def test_outputs_without_a_loss_prove_nothing():
    (left,) = lz.optimize(Told(), inputs={"x": torch.ones(2, 4), "labels": None}, training=True).left
    assert left.why.startswith("a step gives no loss with gradients")


def test_a_loss_of_the_callers_own_is_left():
    model = made()
    model.loss_function = lambda logits, labels, **_: logits.sum()
    report = lz.optimize(model, training=True)
    assert kinds(report) == {NORM}
    assert "its loss is another function than Transformers' own" in str(report)


CHANGING = [
    ("Gemma2", {"final_logit_softcapping": 30.0, "head_dim": 8}),
    ("Cohere", {"logit_scale": 0.0625}),
    ("Granite", {"logits_scaling": 8.0}),
]


@pytest.mark.parametrize(("kind", "more"), CHANGING)
def test_logits_that_are_changed_leave_the_loss_to_the_model(kind, more):
    """In bfloat16, with fresh weights, where every loss is near the logarithm of the classes."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "initializer_range": 0.02}, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).train()
    report = lz.optimize(model, training=True)
    assert LOSS not in kinds(report)
    assert "its forward changes or reads its logits" in str(report)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40.0)
    outputs = model(**batch())
    assert outputs.loss == model.loss_function(outputs.logits, batch()["labels"], 101)


def test_logits_that_are_laid_out_in_order_are_as_they_were():
    config = transformers.OPTConfig(**{**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.0})
    model = transformers.OPTForCausalLM(config).train()
    wanted = step(model, batch())
    assert LOSS in kinds(lz.optimize(model, training=True))
    assert model(**batch()).logits is None
    torch.testing.assert_close(step(model, batch()), wanted, rtol=1e-4, atol=1e-5)


def test_a_cap_that_comes_later_is_heeded():
    config = transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=None)
    model = transformers.Gemma2ForCausalLM(config).train()
    report = lz.optimize(model, training=True)
    assert LOSS in kinds(report)
    assert model(**batch()).logits is None
    model.config.final_logit_softcapping = 0.5
    got = step(model, batch())
    report.undo()
    torch.testing.assert_close(got, step(model, batch()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["eps", "forward"])
def test_a_norm_that_changes_later_runs_its_own_code(change, monkeypatch):
    model = made().train()
    stock = copy.deepcopy(model)
    assert NORM in kinds(lz.optimize(model, training=True))
    if change == "forward":
        own = type(model.model.norm).forward
        monkeypatch.setattr(type(model.model.norm), "forward", lambda self, rows: 2.0 * own(self, rows))
    for each in (*model.modules(), *stock.modules()) if change == "eps" else ():
        if hasattr(each, "variance_epsilon"):
            each.variance_epsilon = 0.5
    torch.testing.assert_close(step(model, batch()), step(stock, batch()), rtol=1e-4, atol=1e-5)


def test_what_a_forward_adds_to_its_loss_stays():
    """A mixture's loss of its router, which was off in the proof."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, router_aux_loss_coef=0.5)
    model = transformers.MixtralForCausalLM(config).train()
    report = lz.optimize(model, training=True)
    assert LOSS in kinds(report)
    without = model(**batch())
    model.config.output_router_logits = True
    outputs, got = model(**batch()), step(model, batch())
    assert without.logits is outputs.logits is None
    assert outputs.loss > without.loss + 0.1
    report.undo()
    torch.testing.assert_close(got, step(model, batch()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs.aux_loss, model(**batch()).aux_loss)


def test_inputs_that_do_not_try_the_loss_prove_nothing():
    report = lz.optimize(made(), batch(output_hidden_states=True), training=True)
    assert LOSS not in kinds(report)
    assert "a step with these inputs does not compute its loss" in str(report)


@pytest.mark.parametrize("more", [{"graph": True}, {"weights": "int8"}, {"activations": "int8"}])
def test_what_serves_inference_is_refused_with_training(more):
    with pytest.raises(lz.InvalidCallError, match="training: wanted it without graph=, weights= and activations="):
        lz.optimize(made(), training=True, **more)


def curve(model, steps):
    """Losses of steps on texts that repeat, as training on a small corpus does."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(steps):
        ids = tokens(rows=4, length=16, seed=number % 8)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("steps", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_the_loss_curve_is_the_models_own(steps):
    stock = curve(made().train(), steps)
    model = made().train()
    report = lz.optimize(model, training=True)
    assert kinds(report) == {NORM, LOSS}
    ours = curve(model, steps)
    assert ours[-1] < ours[0]
    torch.testing.assert_close(ours, stock, rtol=2e-3, atol=2e-3)
