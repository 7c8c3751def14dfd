"""Optimised models as they are used later: prompts and tokens, adapters, other versions, inputs that mean nothing."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import layerzero as lz
from decoders import SIZES, greedy, made, output, tokens, transformers
from layerzero.integrations.optimize import entrance
from layerzero.integrations.optimize.swaps.trial import told_apart
from layerzero.integrations.optimize.times.report import Optimized, Replaced

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
    pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning"),
]


def test_prefill_and_decode_get_kernels_of_their_own() -> None:
    """Of one attention: a kernel that is liked for prompts runs there, another one for tokens."""
    model = made()
    lz.optimize(model)
    ids = tokens(1, 9)

    def run() -> None:
        cache = transformers.DynamicCache(config=model.config)
        output(model, ids, past_key_values=cache)
        output(model, ids[:, :1], past_key_values=cache)

    with torch.no_grad():
        found = lz.trace(model, ids)
        operations = {row.operation for row in found.rows if row.function == "attention"}
        cache = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        later = lz.trace(model, ids[:, :1], past_key_values=cache)
    run()
    operations |= {row.operation for row in later.rows if row.function == "attention"}
    assert operations == {"attention.gqa.prefill", "attention.gqa.decode"}


def test_self_and_cross_attention_are_chosen_apart() -> None:
    config = transformers.BartConfig(
        vocab_size=101, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartModel(config).eval()
    given = {"input_ids": tokens(2, 11), "decoder_input_ids": tokens(2, 5), "use_cache": False}
    with torch.no_grad():
        expected = model(**given)[0]
        report = lz.optimize(model)
        assert "attention" in {each.kind for each in report.replaced}, report
        torch.testing.assert_close(model(**given)[0], expected, rtol=1e-4, atol=1e-4)
        found = lz.trace(model, **given)
    shapes = {}
    for row in found.rows:
        if row.function == "attention":
            shapes[row.layer] = dict(row.shapes)
    kinds = {"encoder.layers.0", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"}
    assert set(shapes) == kinds
    lengths = {path: (each["query"][-3], each["key"][-3]) for path, each in shapes.items()}
    assert len({str(each) for each in shapes.values()}) == 3, lengths


def test_undo_after_a_state_dict_was_loaded_keeps_what_was_loaded() -> None:
    model, other = made(), made()
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(0.7)
    report = lz.optimize(model, graph=True)
    greedy(model, tokens(), 4)
    model.load_state_dict(other.state_dict())
    report.undo()
    assert torch.equal(output(model, tokens()), output(other, tokens()))
    assert not any("_layerzero" in vars(each) for each in model.modules())
    again = lz.optimize(model)
    assert again.replaced
    torch.testing.assert_close(output(model, tokens()), output(other, tokens()), rtol=1e-4, atol=1e-4)


def test_an_adapter_around_a_layers_product_is_never_passed_over() -> None:
    """As peft wraps products: before, and put in after the model was optimized."""

    class Adapted(nn.Module):
        def __init__(self, inside: nn.Linear) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.base_layer = inside
            self.down = nn.Linear(inside.in_features, 2, bias=False)
            self.up = nn.Linear(2, inside.out_features, bias=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.base_layer(rows) + self.up(self.down(rows))
            return result

    def wrap(model: Any) -> Any:
        heads = model.model.layers[0].self_attn
        heads.q_proj = Adapted(heads.q_proj)
        model.model.layers[1].mlp.up_proj = Adapted(model.model.layers[1].mlp.up_proj)
        return model.eval()

    plain = output(made(), tokens())
    expected = output(wrap(made()), tokens())
    assert not torch.allclose(plain, expected, rtol=1e-2)
    before = wrap(made())
    report = lz.optimize(before, graph=True)
    torch.testing.assert_close(output(before, tokens()), expected, rtol=1e-4, atol=1e-4)
    report.undo()
    assert torch.equal(output(before, tokens()), expected)
    later = made()
    report = lz.optimize(later, graph=True)
    tokens_before = greedy(later, tokens(), 6)
    wrap(later)
    torch.testing.assert_close(output(later, tokens()), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(greedy(later, tokens(), 6), greedy(wrap(made()), tokens(), 6))
    assert tokens_before.shape == (2, 15)
    report.undo()
    assert torch.equal(output(later, tokens()), expected)


def test_an_adapter_is_named_as_why_a_layer_is_left() -> None:
    class Adapted(nn.Module):
        def __init__(self, inside: nn.Linear) -> None:
            super().__init__()
            self.base_layer = inside
            self.lora_A = nn.ModuleDict({"default": nn.Linear(inside.in_features, inside.out_features, bias=False)})

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.base_layer(rows) + self.lora_A["default"](rows)
            return result

    Adapted.__module__ = "peft.tuners.stand_in"
    model = made()
    model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)
    left = {each.path: each.why for each in lz.optimize(model.eval(), graph=True).left}
    assert left["model.layers.0"] == "as a whole: self_attn.q_proj is an adapter (Adapted); merge and unload that first"
    assert "model.layers.0.self_attn.q_proj.base_layer" in left
    assert "model.layers.0.self_attn.q_proj.lora_A" not in left, "a list is not what is left"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_an_adapter_merges_past_torchs_count_are_packed_anew(dtype: torch.dtype) -> None:
    """As peft merges, and takes back: through .data, which torch does not count as a write."""

    def add(model: Any, factor: float) -> None:
        generator = torch.Generator().manual_seed(3)
        for each in model.modules():
            if isinstance(each, nn.Linear):
                delta = torch.randn(each.weight.shape, generator=generator) * 0.1 * factor
                each.weight.data += delta.to(dtype)

    model, other = made().to(dtype), made().to(dtype)
    report = lz.optimize(model)
    before = output(model, tokens())
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for factor in (1.0, -1.0):
        add(model, factor)
        add(other, factor)
        expected = output(other, tokens())
        error = (output(model, tokens()) - expected).abs().max() / expected.abs().max()
        assert error < tolerance
        assert factor < 0 or (before - expected).abs().max() / expected.abs().max() > 2 * tolerance
    report.undo()


@pytest.mark.parametrize("version", ["5.3.0", "6.0.1"])
def test_internals_of_another_version_of_transformers_are_not_known(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()
    expected = output(model, tokens())
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=rf"wanted transformers .*got {version}; pip install 'transformers"):
        lz.register_with_transformers()
    report = lz.optimize(model, graph=True)
    assert any(f"whose internals are known, got {version}" in each.why for each in report.left), report
    assert not {each.kind for each in report.replaced} & {"attention", "layer", "step"}
    torch.testing.assert_close(output(model, tokens()), expected, rtol=1e-4, atol=1e-4)
    report.undo()
    assert torch.equal(output(model, tokens()), expected)


def test_a_model_on_the_meta_device_is_left_with_a_reason() -> None:
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=1
        )
        model = transformers.LlamaForCausalLM(config).eval()
    report = lz.optimize(model, graph=True)
    assert any("meta" in each.why for each in report.left), report
    assert not any("_layerzero" in vars(each) for each in model.modules())
    assert not report.is_on


@pytest.mark.usefixtures("unmeasured")
def test_optimized_on_one_prompt_it_serves_whatever_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an unpadded prefill; then left padding, tokens after it, gradients, another dtype: equal to stock."""
    monkeypatch.setattr("layerzero.integrations.optimize.selection.LEAST", -1e9)  # all is kept, however slow
    model, stock = made("Qwen3"), made("Qwen3")
    report = lz.optimize(model, {"input_ids": tokens(1, 9)}, rounds=1, isolate=False)
    assert {"attention", "layer"} <= {each.kind for each in report.replaced}
    assert all(each.error is None or each.error < 1e-4 for each in report.replaced)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :5], mask[1, :2] = 0, 0
    seen = mask.bool()
    got, expected = (output(each, tokens(3, 12), attention_mask=mask)[seen] for each in (model, stock))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    given = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(tokens(3, 12), **given), stock.generate(tokens(3, 12), **given))
    for each in (model, stock):
        each(tokens(), labels=tokens()).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
    wide = [output(each.double(), tokens()) for each in (model, stock)]
    torch.testing.assert_close(*wide, rtol=1e-6, atol=1e-6)
    half = [output(each.bfloat16(), tokens()).float() for each in (model, stock)]
    truth = wide[1].float()
    off = [(each - truth).square().mean().sqrt() for each in half]  # the farthest logit alone is 0.7 to 1.5 of stock's
    assert off[0] <= 1.5 * off[1]
    report.undo()
    assert torch.equal(output(model, tokens()), output(stock, tokens()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rounds": 0}, "rounds: wanted"),
        ({"memory_limit": "1GB"}, "memory_limit: wanted"),
        ({"memory_limit": 1.5}, "wanted bytes"),
        ({"budget_s": "10"}, "budget_s: wanted seconds from 0 or None, got '10'"),
        ({"budget_s": float("nan")}, "budget_s: wanted seconds"),
        ({"budget_s": -1.0}, "budget_s: wanted seconds"),
        ({"graph": "no"}, "graph: wanted True or False, got 'no'"),
        ({"isolate": None}, "isolate: wanted True or False"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_before_anything_is_looked_at(given, said):
    with pytest.raises(lz.InvalidCallError, match=said):
        lz.optimize(torch.nn.Linear(4, 4), **given)


def test_memory_of_forms_that_are_yet_to_be_made_is_told_as_such() -> None:
    model = made()
    report = lz.optimize(model)
    assert not report.extra_bytes
    assert "made when a kernel first wants one" in str(report)
    greedy(model, tokens(), 2)
    assert ("made when a kernel first wants one" in str(report)) == (not report.extra_bytes)


def test_long_lists_are_folded_between_their_entries() -> None:
    kernels = ", ".join(f"library.kernel_{number}" for number in range(7))
    report = Optimized([Replaced("layers.0", "Layer", "layer", "lz.linear", kernels, 0.5)], [])
    lines = str(report).splitlines()[:5]
    assert max(map(len, lines)) < 90
    assert lines[1].split()[0] == "layers.0"
    assert lines[1].endswith("5.0e-01")
    assert " ".join(line.split("lz.linear")[-1].removesuffix("5.0e-01").strip() for line in lines[1:]) == kernels


def test_whoever_passes_inputs_that_the_model_does_not_take_is_told_how_it_was_called() -> None:
    with pytest.raises(TypeError, match="positional arguments") as caught:
        lz.optimize(nn.Sequential(nn.Linear(4, 4)).eval(), ["one text", "another", "a third"])
    (note,) = caught.value.__notes__
    assert note.startswith("lz.optimize ran model(*inputs); inputs may be a function")


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("cast_later", [False, True])
def test_a_model_in_float64_gives_what_its_own_code_gives(cast_later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' norms compute in float32 there, which exact ones are 1e-6 of the logits from."""
    monkeypatch.setattr(entrance, "time_random_rows", lambda *_, **__: None)
    model, stock = made(), made().double()
    report = lz.optimize(model if cast_later else model.double())
    assert report.is_on
    if not cast_later:
        (why,) = {each.why for each in report.left if each.module == "LlamaRMSNorm"}
        assert why.startswith("norms in float64 run their own code")
    torch.testing.assert_close(output(model.double(), tokens()), output(stock, tokens()), rtol=1e-12, atol=1e-12)


class Gated(nn.Module):
    """A block whose products are declared in an order and used in another."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down, self.act, self._gate = nn.Linear(48, 32), nn.SiLU(), first

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        one, two = self.first(rows), self.second(rows)
        return self.down(self.act(one) * two if self._gate == "first" else one * self.act(two))


NEW: dict[str, tuple[str, dict[str, Any]]] = {
    "a block without output": ("LlamaForCausalLM", {"zeros": "down_proj"}),
    "attention without output": ("LlamaForCausalLM", {"zeros": "o_proj"}),
    "columns of zeros": ("GPT2LMHeadModel", {"zeros": "c_proj"}),
    "heads that are normalised behind the rotation": ("HunYuanDenseV1ForCausalLM", {"head_dim": 8}),
    "norms in another order": ("HyperCLOVAXForCausalLM", {"use_post_norm": True}),
}
"""What a new model's weights do not tell: zeros hide what comes before, and norms of ones are all alike."""


@pytest.mark.parametrize("name", NEW)
def test_a_new_model_that_gets_its_weights_later_gives_what_stock_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, more = NEW[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    monkeypatch.setattr(entrance, "time_random_rows", lambda *_: None)  # whatever is found stays
    cls, zeros = getattr(transformers, kind), more.get("zeros")
    torch.manual_seed(0)
    stock = cls(cls.config_class(**SIZES, **{each: value for each, value in more.items() if each != "zeros"})).eval()
    with torch.no_grad():
        for path, each in stock.named_parameters():
            if zeros is not None and zeros in path:
                each.zero_()
    model = copy.deepcopy(stock)
    before = {path: (each, each._version) for path, each in model.named_parameters()}
    report = lz.optimize(model)
    assert all(before[path] == (each, each._version) for path, each in model.named_parameters())
    assert all(torch.equal(each, other) for each, other in zip(model.parameters(), stock.parameters(), strict=True))
    torch.testing.assert_close(output(model), output(stock))
    with torch.no_grad():
        for each in stock.parameters():
            each.add_(torch.randn_like(each) / 5)
    model.load_state_dict(stock.state_dict())
    torch.testing.assert_close(output(model), output(stock), rtol=1e-4, atol=1e-4)
    assert {each.kind for each in report.replaced} & {"block", "layer", "norm", "linear"}


@pytest.mark.parametrize("gate", ["first", "second"])
def test_a_new_block_without_output_is_told_apart(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "time_random_rows", lambda *_: None)
    stock = Gated(gate).eval()
    nn.init.zeros_(stock.down.weight)
    model = copy.deepcopy(stock)
    lz.optimize(model)
    with torch.no_grad():
        stock.down.weight.normal_()
        model.load_state_dict(stock.state_dict())
        rows = torch.randn(3, 32)
        torch.testing.assert_close(model(rows), stock(rows), rtol=1e-4, atol=1e-4)


def _elsewhere(ask: Any) -> Any:
    """What another thread is told."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def test_weights_are_others_in_the_thread_that_proves_alone() -> None:
    norm, rows = nn.LayerNorm(8), torch.randn(3, 8)
    space, weight, stock = norm._parameters, norm.weight, norm(rows)
    with told_apart(norm):
        assert norm.weight is not weight
        assert not torch.equal(norm(rows), stock)
        assert _elsewhere(lambda: norm.weight) is weight
        assert torch.equal(_elsewhere(lambda: norm(rows)), stock)
        assert torch.equal(_elsewhere(lambda: copy.deepcopy(norm)(rows)), stock)
        assert _elsewhere(lambda: [*norm.parameters(), {**norm._parameters}["weight"]])[::2] == [weight, weight]
        with told_apart(nn.Sequential(norm)):
            assert norm.weight is not weight
    assert norm._parameters is space
    assert norm.weight is weight


def test_a_weight_that_another_thread_sets_while_a_form_is_proved_stays() -> None:
    norm, other = nn.LayerNorm(8), nn.Parameter(torch.rand(8))
    with told_apart(norm):
        _elsewhere(lambda: setattr(norm, "weight", other))
    assert norm.weight is other
    assert type(norm._parameters) is dict


def test_two_threads_may_prove_one_module() -> None:
    norm = nn.LayerNorm(8)
    weight, proof = norm.weight, told_apart(norm)
    with ThreadPoolExecutor(1) as second:
        with told_apart(norm):
            second.submit(proof.__enter__).result()
            assert second.submit(lambda: norm.weight).result() is not weight
            assert _elsewhere(lambda: norm.weight) is weight
        assert norm.weight is weight
        second.submit(proof.__exit__, None, None, None).result()
    assert norm.weight is weight
    assert type(norm._parameters) is dict
