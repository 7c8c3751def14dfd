"""A token of a Llama with GGUF's blocks by one run of ggml: the same values, and everything else by its own code."""

from __future__ import annotations

import copy
import importlib.util
import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import layerzero as lz
from layerzero.backends import ggml
from layerzero.backends.ggml_decoder import Step
from layerzero.engine.dispatch import ENGINE
from layerzero.integrations.optimize.attention import dynamic_cache
from layerzero.integrations.optimize.models import gguf_steps
from layerzero.ops.quantize.schemes import scheme_of

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="llama-cpp-python is not installed")

KINDS = {"Q4_K": 1e-5, "Q8_0": 0.05, "Q5_1": 0.05}
"""How far steps may be from products one by one: rows of blocks of 32 are rounded by another scale."""


HIDDEN = {"attention_mask": torch.tensor([[0] + 7 * [1]])}
ELSEWHERE = {"cache_position": torch.tensor([3])}
GROWING = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
GROWING |= {"original_max_position_embeddings": 64}
"""Ministral 3's: queries are multiplied from token 64 on, which no example of a few tokens shows."""


class Blocks(nn.Module):
    """A product with blocks of GGUF, which its own code writes out."""

    def __init__(self, linear, kind, seed):
        super().__init__()
        of, (outputs, inputs) = lz.WeightFormat("gguf", kind), linear.weight.shape
        fields = scheme_of(of).random(of, outputs, inputs, torch.Generator().manual_seed(seed))
        self.of, self.ggml_type = of, ggml.NUMBERS_OF[kind]
        self.weight, self.bias = nn.Parameter(fields.data, requires_grad=False), linear.bias
        self.shape = outputs, inputs

    def forward(self, rows):
        weight = lz.QuantizedWeight(self.of, self.shape, self.weight).dequantized(rows.dtype)
        return nn.functional.linear(rows, weight, self.bias)


def llama(kind="Q4_K", cls="Llama", **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{cls}Config")(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=512, **more,
    )  # fmt: skip
    model = getattr(transformers, f"{cls}ForCausalLM")(config).requires_grad_(False)
    seed = 0
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, each in list(parent._modules.items()):
                if isinstance(each, nn.Linear):
                    setattr(parent, name, Blocks(each, kind, seed))
                    seed += 1
    for each in model.modules():
        if "RMSNorm" in type(each).__name__:
            each.weight.uniform_(0.5, 1.5)
    return model.eval()


@pytest.fixture(autouse=True)
def ggmls(monkeypatch, unmeasured):
    """ggml's products are chosen, and its steps take half of the time."""
    compared = gguf_steps._compared
    monkeypatch.setattr(gguf_steps, "_compared", lambda *given: (compared(*given)[0], 0.5))
    with lz.scope(locks={"mlp.linear.quant.gguf.int8": gguf_steps.KERNEL}), torch.no_grad():
        rows = torch.empty(1, 256), lz.QuantizedWeight(*of_a_weight())
        if lz.explain("quantized_linear", *rows, activations="int8").kernel_id != gguf_steps.KERNEL:
            pytest.skip("ggml does not load here")
        yield


def of_a_weight():
    of = lz.WeightFormat("gguf", "Q4_K")
    return of, (64, 256), *scheme_of(of).random(of, 64, 256, torch.Generator())


@pytest.fixture
def runs(monkeypatch):
    """How many tokens ggml computed as a whole."""
    found, run = [], Step.run
    monkeypatch.setattr(Step, "run", lambda self, *given: found.append(self.places) or run(self, *given))
    return found


def optimised(model):
    report = lz.optimize(model, activations="int8", budget_s=None)
    assert [each.path for each in report.replaced if each.kind == gguf_steps.KIND] == ["model"], str(report)
    return report


def why(model):
    report = lz.optimize(model, activations="int8", budget_s=None)
    assert not any(each.kind == gguf_steps.KIND for each in report.replaced)
    return next((each.why for each in report.left if each.path == "model"), "")


def prompted(model, length=7):
    cache = transformers.DynamicCache(config=model.config)
    model(torch.arange(length)[None] % 64, **{dynamic_cache.name_of(model): cache})
    return cache


def stepped(model, cache, count=3, **more):
    """Logits of some tokens, one after the other."""
    named = {dynamic_cache.name_of(model): cache, **more}
    return torch.cat([model(torch.tensor([[number + 3]]), **named).logits for number in range(count)], 1)


def own(model, cache, count=3, **more):
    """The same by the products one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_steps.GgufSteps, "step", lambda *_: None)
        return stepped(model, cache, count, **more)


def off(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize(
    ("cls", "kind"), [("Llama", "Q4_K"), ("Llama", "Q5_1"), ("Qwen2", "Q4_K"), ("Qwen2", "Q8_0"), ("Mistral", "Q8_0")]
)
def test_steps_give_what_the_products_give_one_by_one(cls, kind, runs):
    model = llama(kind, cls, **({"sliding_window": None} if cls == "Mistral" else {}))
    for each in model.modules():  # Qwen2's
        if isinstance(each, Blocks) and each.bias is not None:
            each.bias.normal_()
    optimised(model)
    wanted = own(model, prompted(model))
    runs.clear()
    got = stepped(model, prompted(model))
    assert len(runs) == 3
    assert off(got, wanted) < KINDS[kind]


def test_the_models_own_code_goes_on_with_the_cache():
    model = llama()
    optimised(model)
    one, other = prompted(model), prompted(model)
    stepped(model, one)
    own(model, other)
    for first, second in zip(one.layers, other.layers, strict=True):
        assert first.keys.shape == second.keys.shape == (1, 2, 10, 64)
        assert off(first.keys, second.keys) < 1e-5
        assert off(first.values, second.values) < 1e-5
    assert off(own(model, one), own(model, other)) < 1e-5


def test_generation_gives_the_same_tokens_past_the_memory_of_a_graph(runs):
    model, ids = llama(), torch.arange(100)[None] % 64
    told = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    optimised(model)
    runs.clear()
    got = model.generate(ids, attention_mask=torch.ones_like(ids), **told)
    assert len(runs) == 199
    assert len(set(runs)) > 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_steps.GgufSteps, "step", lambda *_: None)
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **told)
    assert torch.equal(got[:, :120], wanted[:, :120])  # later ones may part where two are as likely


@pytest.mark.parametrize("named", [{"output_hidden_states": True}, {"use_cache": False}, HIDDEN, ELSEWHERE])
def test_other_calls_run_the_models_own_code(named, runs):
    model = llama()
    optimised(model)
    token, name = torch.tensor([[3]]), dynamic_cache.name_of(model)
    runs.clear()
    got, wanted = (model(token, **{name: prompted(model)}, **named) for _ in range(2))
    assert torch.equal(got[0], wanted[0])
    assert not runs


@pytest.mark.parametrize("tokens", [torch.tensor([[3, 4]]), torch.tensor([[3], [4]])], ids=["two", "two sequences"])
def test_other_tokens_run_the_models_own_code(tokens, runs):
    model = llama()
    optimised(model)
    cache, name = transformers.DynamicCache(config=model.config), dynamic_cache.name_of(model)
    model(torch.arange(5).repeat(len(tokens), 1), **{name: cache})
    runs.clear()
    assert model(tokens, **{name: cache}).logits.isfinite().all()
    assert not runs


def test_settings_that_leave_ggml_out_hold_for_steps(runs):
    model = llama()
    optimised(model)
    cache = prompted(model)
    stepped(model, cache)
    runs.clear()
    with lz.scope(enabled=False):
        stepped(model, cache)
    assert not runs
    stepped(model, cache, 1)
    assert len(runs) == 1


def test_hooks_and_training_run_the_models_own_code(runs):
    model = llama()
    optimised(model)
    cache, heard = prompted(model), []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: heard.append(1))
    runs.clear()
    stepped(model, cache, 2)
    assert (len(heard), len(runs)) == (2, 0)
    hook.remove()
    stepped(model.train(), cache, 1)
    assert not runs
    stepped(model.eval(), cache, 1)
    assert len(runs) == 1


def test_weights_are_followed_where_they_are_written_and_exchanged(runs):
    model = llama()
    optimised(model)
    before = stepped(model, prompted(model))
    product, other = model.model.layers[1].mlp.up_proj, Blocks(nn.Linear(256, 512), "Q4_K", 77).weight
    for change in (
        lambda: product.weight.copy_(other),
        lambda: setattr(product, "weight", nn.Parameter(other.roll(1, 0), requires_grad=False)),
        lambda: model.model.layers[0].input_layernorm.weight.mul_(1.5),
    ):
        change()
        runs.clear()
        got = stepped(model, prompted(model))
        assert len(runs) == 3
        assert off(got, own(model, prompted(model))) < 1e-5
        assert off(got, before) > 1e-3
        before = got


def test_weights_written_before_settings_change_are_followed(runs):
    model = llama()
    optimised(model)
    stepped(model, prompted(model))
    cache, weight = prompted(model), model.model.layers[1].mlp.up_proj.weight
    weight.copy_(weight.roll(1, 0))
    ENGINE.bump()
    runs.clear()
    got = stepped(model, cache)
    assert len(runs) == 2  # the first token ran the products' own code, which takes the new numbers
    assert off(got, own(model, prompted(model))) < 1e-5


def test_weights_that_ggml_cannot_read_run_the_models_own_code(runs):
    model = llama()
    report = optimised(model)
    wanted, norm = own(model, prompted(model)), model.model.layers[0].input_layernorm
    old = StorageWeakRef(norm.weight.untyped_storage())
    norm.weight = nn.Parameter(torch.stack((norm.weight, norm.weight), 1)[:, 0], requires_grad=False)
    runs.clear()
    assert off(stepped(model, prompted(model)), wanted) < 1e-5
    assert not runs
    assert old.expired()
    assert "3 steps ran as they are: ggml reads other weights, weight of LlamaRMSNorm: wanted a contig" in str(report)


def test_a_step_reads_weights_to_its_end_that_another_thread_exchanges(monkeypatch):
    model = llama()
    optimised(model)
    weight, run, gone = model.model.layers[0].input_layernorm.weight, Step.run, []
    old = StorageWeakRef(weight.untyped_storage())

    def exchanging(self, *given):
        weight.data = weight.data.clone()
        gone.append(old.expired())
        return run(self, *given)

    monkeypatch.setattr(Step, "run", exchanging)
    stepped(model, prompted(model), 2)
    assert gone == [False, True]  # the second step follows the new ones, and lets the old ones go


def test_weights_of_another_size_at_the_same_address_run_the_models_own_code(runs):
    model = llama()
    optimised(model)
    weight = model.model.layers[0].input_layernorm.weight
    weight.data = weight.data.view(torch.bfloat16)[:256]
    runs.clear()
    got = stepped(model, prompted(model))
    assert not runs
    assert off(got, own(model, prompted(model))) < 1e-5


def test_undo_gives_the_models_own_forward_back(runs):
    model = llama()
    wanted = stepped(model, prompted(model))
    report = optimised(model)
    report.undo()
    runs.clear()
    assert torch.equal(stepped(model, prompted(model)), wanted)
    assert "forward" not in vars(model.model)
    assert not runs


def test_copies_compute_with_their_own_weights(runs):
    model = llama()
    optimised(model)
    twin = copy.deepcopy(model)
    twin.model.layers[0].mlp.up_proj.weight.copy_(twin.model.layers[1].mlp.up_proj.weight)
    runs.clear()
    got = stepped(twin, prompted(twin))
    assert len(runs) == 3
    assert off(got, own(twin, prompted(twin))) < 1e-5
    assert off(got, stepped(model, prompted(model))) > 1e-3


def test_copies_have_hooks_and_modes_of_their_own(runs):
    model = llama()
    optimised(model)
    stepped(model, prompted(model), 1)
    twin, cache, heard = copy.deepcopy(model), prompted(model), []
    hook = twin.model.layers[0].mlp.register_forward_hook(lambda *_: heard.append(1))
    runs.clear()
    stepped(twin, cache, 2)
    assert (len(heard), len(runs)) == (2, 0)
    hook.remove()
    stepped(twin.train(), cache, 1)
    assert not runs


def test_inference_mode_and_others_share_a_model(runs):
    model = llama()
    optimised(model)
    cache, wanted = prompted(model), own(model, prompted(model), 6)
    runs.clear()
    with torch.inference_mode():
        first = stepped(model, prompted(model))
    assert off(first, wanted[:, :3]) < 1e-5
    assert off(stepped(model, cache), wanted[:, :3]) < 1e-5
    assert len(runs) == 6


def test_threads_with_caches_of_their_own_do_not_mix():
    model = llama()
    optimised(model)
    lengths = {length: own(model, prompted(model, length), 20) for length in (3, 7, 60, 130)}
    wrong = []

    def work(length):
        with torch.no_grad(), lz.scope(locks={"mlp.linear.quant.gguf.int8": gguf_steps.KERNEL}):
            if off(stepped(model, prompted(model, length), 20), lengths[length]) > 1e-4:
                wrong.append(length)

    threads = [threading.Thread(target=work, args=(length,)) for length in lengths]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_two_caches_in_turn_do_not_mix():
    model = llama()
    optimised(model)
    wanted = own(model, prompted(model, 5)), own(model, prompted(model, 50))
    caches = prompted(model, 5), prompted(model, 50)
    got = [[], []]
    for number in range(3):
        for each, cache in zip(got, caches, strict=True):
            name = dynamic_cache.name_of(model)
            each.append(model(torch.tensor([[number + 3]]), **{name: cache}).logits)
    for each, want in zip(got, wanted, strict=True):
        assert off(torch.cat(each, 1), want) < 1e-5


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: llama(hidden_act="gelu"), "no silu"),
        (lambda: llama(cls="Mistral", sliding_window=64), "window"),
        (lambda: llama(cls="Qwen3", head_dim=64), "other parts"),
        (lambda: llama(cls="Ministral3", sliding_window=None, rope_parameters=GROWING, head_dim=64), "queries grow"),
        (lambda: llama().to(torch.bfloat16), "float32"),
    ],
    ids=["gelu", "window", "norms of heads", "growing queries", "bfloat16"],
)
def test_other_stacks_stay_and_the_report_says_why(model, text):
    assert text in why(model())


def test_steps_that_are_slower_or_off_stay(monkeypatch):
    monkeypatch.setattr(gguf_steps, "_compared", lambda *_: (0.0, 1.2))
    assert "took 1.20 of its own code's time" in why(llama())
    monkeypatch.setattr(gguf_steps, "_compared", lambda *_: (float("nan"), 0.5))
    assert "is nan of its size" in why(llama())
