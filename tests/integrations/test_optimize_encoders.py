"""Whole encoder layers under ``lz.optimize``: found wherever their parts lie, few calls, own code for other calls."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import Module

import layerzero as lz
from drawing import pairs
from layerzero.engine.dispatch import ENGINE
from layerzero.integrations.optimize.layers import encoders
from layerzero.integrations.optimize.layers.encoders import Encoder
from layerzero.integrations.optimize.swaps import weights as packing

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
]

WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = WIDTHS | {
    "vocab_size": 101, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PICTURES = WIDTHS | {"image_size": 32, "patch_size": 8}
TWICE = {"d_model": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
for side in ("encoder", "decoder"):
    TWICE |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
SOUND = TWICE | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "vocab_size": 64}
DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 101, "max_position_embeddings": 40}
DINO = {name: each for name, each in PICTURES.items() if name != "intermediate_size"} | {"mlp_ratio": 2}

FAMILIES: dict[str, tuple[dict[str, Any], str, int]] = {
    "Bert": (WORDS, "words", 2),
    "Roberta": (WORDS, "words", 2),
    "XLMRoberta": (WORDS, "words", 2),
    "Electra": (WORDS | {"embedding_size": 32}, "words", 2),
    "DistilBert": (DISTIL, "words", 2),
    "ViT": (PICTURES, "pictures", 2),
    "Dinov2": (DINO, "pictures", 2),
    "SiglipVision": (PICTURES, "pictures", 2),
    "CLIPVision": (PICTURES, "pictures", 2),
    "Blip2Vision": (PICTURES, "pictures", 2),
    "CLIPText": (WORDS, "words", 2),
    "Whisper": (SOUND, "sound", 2),
    "Bart": (TWICE | {"vocab_size": 101, "max_position_embeddings": 40}, "words", 2),
}


def made(name: str = "Bert", dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name][0], **sizes)
    model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for each in model.parameters():  # ones and zeros would hide much
            each.add_(torch.randn(each.shape), alpha=0.3 if each.ndim == 1 else 0.2)
    return model.to(dtype)


def call_of(name: str = "Bert") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    kind = FAMILIES[name][1]
    if kind == "pictures":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    if kind == "sound":
        ids = torch.tensor([[1, 5], [1, 6]])
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "decoder_input_ids": ids}
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[1, :4] = 0
    mask[2, 7:] = 0
    return {"input_ids": torch.randint(3, 101, (3, 11), generator=generator), "attention_mask": mask}


def output(model: Any, call: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**call)[0]
    return found


def layers_of(model: Any) -> list[Module]:
    return [each for each in model.modules() if isinstance(each.__dict__.get("_layerzero"), Encoder)]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got / wanted.abs().max(), wanted / wanted.abs().max(), rtol=1e-4, atol=1e-5)


class Own:
    """Counts calls of a class's own forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cls: Any) -> None:
        self.calls, before = 0, cls.forward

        def forward(layer: Any, *others: Any, **named: Any) -> Any:
            self.calls += 1
            return before(layer, *others, **named)

        monkeypatch.setattr(cls, "forward", forward)


QUICK = {"Bert", "DistilBert", "Dinov2", "CLIPText", "Blip2Vision", "Whisper", "Bart"}


@pytest.mark.parametrize(("name", "weights"), pairs(FAMILIES, ["packed", "joined"], QUICK))
def test_encoder_layers_are_taken_whole(name: str, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if weights == "joined":
        monkeypatch.setattr(packing, "PACKING", frozenset())
    model, call = made(name), call_of(name)
    expected = output(model, call)
    report = lz.optimize(model, padding=False)
    assert len(layers_of(model)) == FAMILIES[name][2], report
    close(output(model, call), expected)
    twin = copy.deepcopy(model)
    assert len(layers_of(twin)) == FAMILIES[name][2]
    close(output(twin, call), expected)
    report.undo()
    assert not layers_of(model)
    assert torch.equal(output(model, call), expected)


def test_an_encoder_layer_is_few_calls() -> None:
    model, call = made(), call_of()
    lz.optimize(model, padding=False)
    layer = model.encoder.layer[0]
    output(model, call)
    seen: Counter[str] = Counter()
    hidden = torch.randn(2, 5, 32)

    def watcher(function: Any, _: Any) -> None:
        seen.update([function.name])

    ENGINE.watch(watcher)
    try:
        with torch.no_grad():
            layer(hidden)
    finally:
        ENGINE.unwatch(watcher)
    assert seen == {"qkv_linear": 1, "attention": 1, "linear": 1, "layer_norm": 2, "mlp": 1}


@pytest.mark.parametrize("setting", ["layerzero", "sdpa"])
def test_a_packed_row_is_a_layers_where_attention_tells_sequences_apart(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()
    lz.optimize(model, padding=False)
    model.set_attn_implementation(setting)
    layer, hidden = model.encoder.layer[0], torch.randn(1, 11, 32)
    own = Own(monkeypatch, type(layer))
    layer._layerzero.stamp = type(layer._layerzero.stamp)(layer)  # the class has another forward
    layer._layerzero.take(())  # whatever times say of so few tokens
    starts = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    named = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6, "max_length_k": 6}
    with torch.no_grad():
        got = layer(hidden, None, **named)
        assert own.calls == (setting != "layerzero")
        if setting == "layerzero":
            close(got, torch.cat([layer(hidden[:, first:last]) for first, last in ((0, 4), (4, 5), (5, 11))], 1))


def test_weights_written_later_are_followed() -> None:
    model, call, other = made(), call_of(), made(initializer_range=0.1)
    lz.optimize(model, padding=False)
    output(model, call)
    model.load_state_dict(other.state_dict())
    close(output(model, call), output(other, call))
    close(output(model.double(), call), output(other.double(), call))
    assert len(layers_of(model)) == 2


@pytest.mark.parametrize(
    "what", ["train", "gradients", "weights", "autocast", "hook", "eps", "flat mask", "encoded", "cache", "eager"]
)
def test_what_was_not_proved_runs_the_modules_own_code(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    lz.optimize(model, padding=False)
    layer = model.encoder.layer[0]
    own = Own(monkeypatch, type(layer))
    layer._layerzero.stamp = type(layer._layerzero.stamp)(layer)  # the class has another forward
    hidden, named = torch.randn(2, 5, 32), {}
    with torch.no_grad():
        layer(hidden)
        layer(hidden, None, None, encoder_attention_mask=None, cache=None)
        layer(hidden, torch.ones(2, 1, 5, 5, dtype=torch.bool))
    assert own.calls == 0
    if what == "train":
        layer.train()
    elif what == "hook":
        layer.intermediate.dense.register_forward_hook(lambda *_: None)
    elif what == "eps":
        layer.output.LayerNorm.eps = 0.3
    elif what == "gradients":
        hidden.requires_grad_()
    elif what == "flat mask":
        named["attention_mask"] = torch.ones(5, 5, dtype=torch.bool)
    elif what == "encoded":
        named["encoder_hidden_states"] = hidden
    elif what == "cache":
        named["cache"] = transformers.DynamicCache(config=model.config)
    elif what == "eager":
        model.set_attn_implementation("eager")
    if what == "autocast":
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            layer(hidden)
    else:
        with torch.set_grad_enabled(what in {"gradients", "weights"}):
            layer(hidden, **named)
    assert own.calls == 1


@pytest.mark.parametrize("told", [{"is_causal": True}, {"is_causal": False}, {}])
def test_a_layer_attends_as_its_call_says(told: dict[str, bool]) -> None:
    """CLIP's text tells its layers that they look back, and nothing else does."""
    model = made("CLIPText")
    stock = copy.deepcopy(model)
    lz.optimize(model, padding=False)
    ours, own = layers_of(model)[0], next(each for each in stock.modules() if type(each).__name__ == "CLIPEncoderLayer")
    hidden = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        close(ours(hidden, None, **told), own(hidden, None, **told))


def test_attention_weights_are_stocks() -> None:
    stock, call = made(), call_of()
    model = copy.deepcopy(stock)
    lz.optimize(model, padding=False)
    with torch.no_grad():
        got, wanted = (each(**call, output_attentions=True, output_hidden_states=True) for each in (model, stock))
    assert len(got.attentions) == len(wanted.attentions)
    for one, two in zip(
        (*got.attentions, *got.hidden_states), (*wanted.attentions, *wanted.hidden_states), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_a_layer_that_computes_otherwise_is_left_with_a_reason() -> None:
    model, call = made(), call_of()
    kind = type(model.encoder.layer[0])

    class Twice(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
            found: torch.Tensor = super().forward(hidden_states, *others, **named) * 2
            return found

    model.encoder.layer[0].__class__ = Twice
    expected = output(model, call)
    report = lz.optimize(model, padding=False)
    (left,) = [each for each in report.left if each.module == "Twice"]
    assert "its output is none of the layers' formulas" in left.why
    assert len(layers_of(model)) == 1
    close(output(model, call), expected)


def test_a_decoder_of_such_layers_gets_stocks_tokens() -> None:
    config = transformers.BertConfig(**WORDS, is_decoder=True)
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(config).eval()
    ids = torch.randint(3, 101, (2, 6), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    lz.optimize(model, padding=False)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)


def test_what_clamps_in_half_precision_is_left() -> None:
    made_of = encoders.parts_of(made("Whisper", torch.float16).encoder.layers[0])
    assert made_of is not None
    report = lz.optimize(made("Whisper", torch.float16))
    assert any("it clamps what it computes in float16" in each.why for each in report.left), report
