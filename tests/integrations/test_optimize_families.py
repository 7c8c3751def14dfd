"""Small random models of many families: optimized, they give what stock gives, whatever they are asked for."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import layerzero as lz
from clock import Ticking
from drawing import examples, mostly
from layerzero.integrations.optimize.swaps import trial
from layerzero.integrations.optimize.times import timing

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

import architectures  # noqa: E402  # it imports transformers
from architectures import GQA, HEAD, PICTURE, SIZES, T5, TWICE, Architecture, inputs  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

QUICK = {"Llama", "Gemma2", "GptOss", "DeepseekV3", "Qwen3Next", "Bert", "Bart", "T5", "ViT", "Wav2Vec2", "Llava"}
FAMILIES = [
    pytest.param(each, id=each.name, marks=[] if each.name in QUICK else pytest.mark.slow)
    for each in architectures.everything()
]


def random_model(name: str, model: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(sizes))
    kind = getattr(transformers, model, None) or getattr(transformers, name + model)
    return kind._from_config(config).eval()


def values(output: Any) -> list[torch.Tensor]:
    given = [output.get(name) for name in ("logits", "logits_per_image", "last_hidden_state")]
    return [each for each in given if each is not None]


def assert_same(got: Any, wanted: Any, seen: torch.Tensor | None = None) -> None:
    for one, two in zip(values(got), values(wanted), strict=True):
        if seen is not None and seen.shape == two.shape[:2]:
            one, two = one[seen.bool()], two[seen.bool()]  # noqa: PLW2901
        largest = two.abs().max()
        torch.testing.assert_close(one / largest, two / largest, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_gives_what_stock_gives_before_and_after_changes(architecture: Architecture) -> None:
    stock = random_model(architecture.name, architecture.model, architecture.sizes)
    mine = copy.deepcopy(stock)
    report = lz.optimize(mine)
    call = inputs(architecture.kind, "right")
    seen = call.get("attention_mask")
    with torch.no_grad():
        wanted = stock(**call)
        assert_same(mine(**call), wanted, seen)
        for each in (mine, stock):  # what every family has: numbers of norms, and modules below
            for part in each.modules():
                for name in ("eps", "variance_epsilon", "layer_norm_eps"):
                    if isinstance(vars(part).get(name), float):
                        setattr(part, name, 0.3)
        changed = stock(**call)
        assert_same(mine(**call), changed, seen)
        transformers.set_seed(5)
        wanted = stock.train()(**call)
        transformers.set_seed(5)
        assert_same(mine.train()(**call), wanted, seen)
    report.undo()
    assert not any("_layerzero" in vars(each) or "__getstate__" in vars(each) for each in mine.modules())


@pytest.mark.parametrize("architecture", [
    pytest.param(*each.values, id=each.id, marks=() if each.id in ("Llama", "Bert", "T5") else pytest.mark.slow)
    for each in FAMILIES if each.id in QUICK
])  # fmt: skip
def test_whatever_is_found_in_a_family_can_be_timed(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing.forget()
    monkeypatch.setattr(timing, "CLOCK", Ticking())
    report = lz.optimize(random_model(architecture.name, architecture.model, architecture.sizes))
    timing.forget()
    assert report.paced
    assert "not timed" not in str(report)
    assert "could not be timed" not in str(report)
    assert "timed alone" not in str(report)


WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {  # families without torch's function are eager, and return weights
    "LongT5": ("ForConditionalGeneration", T5 | {"num_decoder_layers": 2, "decoder_start_token_id": 0}),
    "SwitchTransformers": (
        "ForConditionalGeneration",
        T5 | {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "BigBirdPegasus": ("ForConditionalGeneration", TWICE | {"attention_type": "original_full"}),
    "MiniMax": ("ForCausalLM", HEAD | {"num_local_experts": 2, "layer_types": ["full_attention"] * 2}),
    "Llama": ("ForCausalLM", GQA),
    "Bert": ("Model", SIZES),
    "Gemma2": ("ForCausalLM", HEAD),
}


@pytest.mark.parametrize("name", mostly(WEIGHTS, {"LongT5", "MiniMax", "Llama", "Bert"}))
def test_a_call_that_asks_for_attention_weights_gets_what_stock_gives(name: str) -> None:
    model, sizes = WEIGHTS[name]
    stock = random_model(name, model, sizes)
    mine = copy.deepcopy(stock)
    lz.optimize(mine)
    call = inputs("twice" if stock.config.is_encoder_decoder else "dense", "left")
    with torch.no_grad():
        wanted, got = stock(**call, output_attentions=True), mine(**call, output_attentions=True)
        assert_same(got, wanted)
        for key in wanted:
            if "attentions" not in key:
                continue
            assert len(got[key]) == len(wanted[key])
            for one, two in zip(got[key], wanted[key], strict=True):
                torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
        assert_same(mine(**call), stock(**call), call["attention_mask"] if "decoder_input_ids" not in call else None)


def test_an_example_has_no_padding_that_a_model_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    model = random_model("LayoutLM", "Model", SIZES | {"pad_token_id": 0})
    monkeypatch.setattr(transformers.modeling_utils.logger, "warning_once", told.append)
    lz.optimize(model)
    assert not told


def test_a_short_example_leaves_no_trace_in_a_model() -> None:
    stock = random_model("BigBirdPegasus", "Model", TWICE | {"block_size": 2, "num_random_blocks": 1})
    mine = copy.deepcopy(stock)
    report = lz.optimize(mine)
    assert mine.encoder.attention_type == "block_sparse"
    ids = torch.randint(3, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = stock(ids, decoder_input_ids=ids[:, :4])
        assert_same(mine(ids, decoder_input_ids=ids[:, :4]), wanted)
        report.undo()
        got = mine(ids, decoder_input_ids=ids[:, :4])
    assert torch.equal(got.last_hidden_state, wanted.last_hidden_state)


def test_an_example_leaves_what_a_first_call_settles_to_the_callers_own() -> None:
    """How many tokens each expert of NLLB-MoE takes in training."""
    sizes = TWICE | {"num_experts": 2, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "router_jitter_noise": 0.0}
    stock = random_model("NllbMoe", "Model", sizes | {"attention_dropout": 0.0, "moe_token_dropout": 0.0}).double()
    mine = copy.deepcopy(stock)
    lz.optimize(mine)
    ids = torch.randint(3, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    outputs = []
    for each in (stock, mine):
        torch.manual_seed(0)
        with torch.no_grad():
            outputs.append(each.train()(ids, decoder_input_ids=ids[:, :4]))
    assert_same(outputs[1], outputs[0])


@pytest.mark.parametrize(("name", "first"), [("Phi", 50), ("Llama", 50), ("ModernBert", 0)])
def test_an_example_leaves_a_rotation_for_long_texts_as_it_was(name: str, first: int) -> None:
    """How far it reaches is a number, which a first long text may make, and a buffer: with one alone it is wrong."""
    rope: Any = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    if name == "ModernBert":
        rope = dict.fromkeys(("full_attention", "sliding_attention"), rope)
    stock = random_model(name, "Model", SIZES | {"max_position_embeddings": 8, "rope_parameters": rope})
    ids = torch.randint(3, 64, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if first:
            stock(ids[:, :first])
        mine = copy.deepcopy(stock)
        lz.optimize(mine)
        for length in (9, 12, 16, 50):
            one, two = copy.deepcopy((stock, mine))
            wanted, got = (each(ids[:, :length]).last_hidden_state for each in (one, two))
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_what_a_call_changes_is_put_back_whole_or_not_at_all() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, ready: bool | int) -> None:
            super().__init__()
            self.table, self.ready = None, ready

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                self.table, self.ready = torch.ones(3), type(self.ready)(1)
            return rows * self.table

    for ready, stays in ((0, False), (False, True)):  # a flag may say what became of weights
        layer = Layer(ready)
        with trial.as_served(layer):
            layer(torch.ones(3))
        assert (layer.table is not None) is bool(layer.ready) is stays
        layer(torch.ones(3))


def test_an_example_leaves_no_hooks_behind_that_keep_a_model_from_a_pickle() -> None:
    sizes = PICTURE | {"neck_hidden_sizes": [8, 8], "fusion_hidden_size": 8, "reassemble_factors": [2, 1]}
    model = random_model("DPT", "ForDepthEstimation", sizes | {"is_hybrid": False, "backbone_out_indices": [0, 1]})
    pickle.dumps(model)
    lz.optimize(model)
    pickle.dumps(model)
    pictures = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert model(pictures, output_hidden_states=True).hidden_states is not None


def test_what_a_tokenizer_adds_is_passed_over_as_by_stock():
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    stock = transformers.BertModel(config).eval()
    mine = copy.deepcopy(stock)
    lz.optimize(mine)
    ids = torch.randint(1, 99, (2, 8))
    added = {"special_tokens_mask": torch.zeros_like(ids), "length": torch.tensor([8, 8])}
    with torch.no_grad():
        torch.testing.assert_close(mine(ids, **added)[0], stock(ids, **added)[0], rtol=1e-5, atol=1e-5)


def test_attention_weights_of_a_model_that_was_set_to_layerzero_are_refused() -> None:
    model = random_model("Llama", "ForCausalLM", GQA)
    lz.register_with_transformers()
    model.set_attn_implementation("layerzero")
    with pytest.raises(lz.InvalidCallError, match="output_attentions: wanted no attention weights"):
        model(**inputs("dense", "left"), output_attentions=True)


@pytest.mark.usefixtures("unmeasured")
def test_inputs_that_layerzero_refuses_leave_attention_to_stock() -> None:
    stock = random_model("Llama", "ForCausalLM", GQA)
    mine = copy.deepcopy(stock)
    call = {"input_ids": torch.randint(2, 99, (2, 9)), "output_attentions": True}
    report = lz.optimize(mine, call, rounds=1, isolate=False)
    assert any("could not be compared (InvalidCallError" in each.why for each in report.left)
    with torch.no_grad():
        assert_same(mine(**call), stock(**call))


def test_a_part_that_computes_attention_by_itself_leaves_that_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    llava = next(each for each in FAMILIES if each.id == "Llava").values[0]
    stock = random_model(llava.name, llava.model, llava.sizes)
    mine = copy.deepcopy(stock)
    tower = next(each for each in mine.modules() if type(each).__name__ == "CLIPVisionModel")
    monkeypatch.setattr(type(tower), "_can_set_attn_implementation", classmethod(lambda _: False))
    report = lz.optimize(mine, graph=True)
    assert {"attention", "step"} <= {each.kind for each in report.replaced}
    assert any(each.why == "attention: CLIPVisionModel computes attention by itself" for each in report.left)
    assert tower.config._attn_implementation == "sdpa"
    call = inputs(llava.kind, "left")
    with torch.no_grad():
        assert_same(mine(**call), stock(**call), call["attention_mask"])


def qwen2_vl() -> tuple[Any, dict[str, Any]]:
    """Two pictures and words; the vision tower passes the mask of its attention by name."""
    text = GQA | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    tokens = {"image_token_id": 99, "video_token_id": 98, "vision_start_token_id": 97, "vision_end_token_id": 96}
    model = random_model("Qwen2VL", "Model", {"text_config": text, "vision_config": vision} | tokens)
    picture = [97, 99, 99, 99, 99, 96]
    ids = torch.tensor([[*picture, *range(3, 10), *picture]])
    return model, {
        "input_ids": ids,
        "mm_token_type_ids": (ids == 99).long(),
        "pixel_values": torch.randn(32, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("given", ["inputs", "example"])
def test_a_vision_tower_that_names_its_mask_is_compared(given: str) -> None:
    stock, call = qwen2_vl()
    mine = copy.deepcopy(stock)
    report = lz.optimize(mine, call if given == "inputs" else None, rounds=1, isolate=False)
    with torch.no_grad():
        assert_same(mine(**call), stock(**call))
    report.undo()


def _hooked(_: Any, __: Any, output: Any) -> Any:
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


def _scaled_class(module: Any) -> Any:
    forward = type(module).forward

    def twice(self: Any, *given: Any, **named: Any) -> Any:
        return _hooked(None, None, forward(self, *given, **named))

    module.__class__ = type(type(module).__name__, (type(module),), {"forward": twice})


def _own_forward(module: Any) -> None:
    module.forward = lambda *given, **named: _hooked(None, None, type(module).forward(module, *given, **named))


def _written(module: Any) -> None:
    for each in module.parameters():
        each.data = each.detach() * 1.5


MUTATIONS: dict[str, Any] = {
    "trains": lambda module: module.train(),
    "hook": lambda module: module.register_forward_hook(_hooked),
    "class": _scaled_class,
    "forward": _own_forward,
    "weights": _written,
    "numbers": lambda module: vars(module).update(
        {
            name: value * 0.5
            for name, value in vars(module).items()
            if type(value) is float and name != "attention_dropout"
        }
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("family", mostly(["Llama", "Gemma2"], {"Gemma2"}))
def test_a_change_of_any_module_within_a_decoder_layer_counts(family: str, mutation: str) -> None:
    sizes = HEAD | {"attention_dropout": 0.5}
    stock = random_model(family, "ForCausalLM", sizes)
    mine = copy.deepcopy(stock)
    report = lz.optimize(mine)
    assert any(each.kind == "layer" for each in report.replaced)
    call, layer = inputs("dense", "left"), "model.layers.0"
    paths = [path for path, _ in mine.named_modules() if path.startswith(layer)]
    if examples(100) < 100:  # each change of every third module, and each module by some of them
        paths = paths[[*MUTATIONS].index(mutation) % 3 :: 3]
    twin = copy.deepcopy(mine)
    with torch.no_grad():
        assert_same(twin(**call), stock(**call), call["attention_mask"])
        states = [state for each in twin.modules() if (state := vars(each).get("_layerzero")) is not None]
        assert all(each.stamp.holds() for each in states), "a copy is LayerZero's, too"
        for path in paths:
            one, two = copy.deepcopy(stock), copy.deepcopy(mine)
            for each in (one, two):
                MUTATIONS[mutation](each.get_submodule(path))
            torch.manual_seed(3)
            wanted = one(**call)
            torch.manual_seed(3)
            got = two(**call)
            assert_same(got, wanted, call["attention_mask"])
