"""``lz.optimize`` without inputs, for models of pictures or sound: their attention is compared on made-up ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz

pytest.importorskip("transformers")

import transformers

WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
WORDS = WIDTHS | {"vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1}
PICTURES = WIDTHS | {"image_size": 16, "patch_size": 8}
HALVES = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "d_model": 32, "vocab_size": 64}
for side in ("encoder", "decoder"):
    SPEECH |= {f"{side}_{name}": size for name, size in HALVES.items()}
SPEECH |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def clip() -> Any:
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=WORDS, vision_config=PICTURES))


def siglip() -> Any:
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=WORDS, vision_config=PICTURES))


def whisper() -> Any:
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SPEECH))


def depths() -> Any:
    """Its configuration tells no size of pictures; that of its backbone does."""
    seen = WIDTHS | {"num_hidden_layers": 2, "image_size": 28, "patch_size": 14, "out_indices": [1, 2]}
    backbone = transformers.Dinov2Config(**seen, apply_layernorm=True, reshape_hidden_states=False)
    sizes = {"patch_size": 14, "reassemble_factors": [2, 1], "neck_hidden_sizes": [8, 16], "reassemble_hidden_size": 32}
    sizes |= {"fusion_hidden_size": 16, "head_hidden_size": 8}
    return transformers.DepthAnythingForDepthEstimation(
        transformers.DepthAnythingConfig(backbone_config=backbone, **sizes)
    )


def detector() -> Any:
    """Neither its configuration nor that of its backbone tells a size of pictures."""
    stages = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"]}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in HALVES.items()}
    named = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "d_model": 32}
    backbone = transformers.ResNetConfig(**stages)
    return transformers.DetrModel(transformers.DetrConfig(backbone_config=backbone, num_queries=4, **named, **sides))


def clipseg() -> Any:
    """It wants as many texts as pictures."""
    sizes = {"text_config": WORDS, "vision_config": PICTURES | {"num_hidden_layers": 2}, "projection_dim": 32}
    more = {"extract_layers": [0, 1], "reduce_dim": 8, "decoder_intermediate_size": 16}
    return transformers.CLIPSegForImageSegmentation(transformers.CLIPSegConfig(**sizes, **more))


def spectrum() -> Any:
    return transformers.ASTModel(transformers.ASTConfig(**WIDTHS, max_length=32, num_mel_bins=16))


def frames() -> Any:
    encoder = WIDTHS | {"subsampling_conv_channels": 8, "num_mel_bins": 16, "subsampling_factor": 4}
    return transformers.ParakeetEncoder(transformers.ParakeetEncoderConfig(**encoder))


def pictures() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[5, 7, 2]]), "pixel_values": torch.randn(2, 3, 16, 16)}


def scene() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 28, 28)}


def street() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 48, 48)}


def twice() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[5, 7, 2], [4, 2, 0]]), "pixel_values": torch.randn(2, 3, 16, 16)}


def bins() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 32, 16)}


def heard() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 40, 16)}


def sound() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": torch.tensor([[1, 5], [1, 6]])}


MADE_UP = [(clip, pictures), (siglip, pictures), (whisper, sound), (depths, scene), (detector, street)]
MADE_UP += [(clipseg, twice), (spectrum, bins), (frames, heard)]


@pytest.mark.parametrize(("make", "call"), MADE_UP, ids=lambda each: each.__name__)
def test_attention_is_compared_on_made_up_pictures_and_sound(make: Any, call: Any) -> None:
    model, given = make().eval(), call()
    with torch.no_grad():
        expected = model(**given)[0]
        report = lz.optimize(model)
        found = model(**given)[0]
    (attention,) = [each for each in report.replaced if each.kind == "attention" and not each.path]
    assert attention.error is not None
    assert attention.error < 1e-5
    assert not [each for each in report.left if "could not be compared" in each.why]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_a_model_raises_is_told_where_pictures_do_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    model = clip().eval()

    def raises(*_: Any, **__: Any) -> None:
        raise RuntimeError("not these pictures")

    monkeypatch.setattr(model.vision_model, "forward", raises)
    report = lz.optimize(model)
    (left,) = [each for each in report.left if each.why.startswith("attention")]
    assert "it could not be compared without inputs= (RuntimeError: not these pictures)" in left.why


def test_layers_are_proved_behind_a_call_with_a_picture() -> None:
    named = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    turned = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    words = WORDS | {"num_key_value_heads": 2, "rope_parameters": turned}
    seen = {"embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=words, vision_config=seen, **named)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, 62, 60, 60, 60, 60, 63, 7]])
    call = {"input_ids": ids, "mm_token_type_ids": (ids == 60).long(), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with torch.no_grad():
        model(**call, pixel_values=torch.randn(16, 96))
    moved = model.model.rope_deltas
    report = lz.optimize(model, graph=True)
    assert [each.path for each in report.replaced if each.kind == "layer"] == ["model.language_model.layers.0"]
    assert model.model.rope_deltas is moved is not None


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.usefixtures("unmeasured")
def test_weights_that_a_model_returns_unasked_are_not_lost(inputs: bool) -> None:
    wide = {"hidden_size": 64, "num_hidden_layers": 2}
    words = WORDS | wide | {"pad_token_id": 0}
    named = {
        "text_config": words,
        "vision_config": wide | {"patch_size": 8, "image_size": 16},
        "num_attention_heads": 4,
    }
    model = transformers.BridgeTowerModel(transformers.BridgeTowerConfig(**wide, **named)).eval()
    call = twice()
    with torch.no_grad():
        expected = model(**call)
        report = lz.optimize(model, call if inputs else None, rounds=1, isolate=False)
        found = model(**call)
    assert any("it returns attention weights" in each.why for each in report.left)
    for got, wanted in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_no_inputs_are_wanted_where_layerzero_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = clip().eval()

    def refuses(*_: Any, **__: Any) -> None:
        raise lz.InvalidCallError("attention", ["wanted no sinks for each token"])

    monkeypatch.setattr(model.text_model, "forward", refuses)
    (left,) = [each for each in lz.optimize(model).left if each.why.startswith("attention")]
    assert "it could not be compared (InvalidCallError: attention: wanted no sinks" in left.why
