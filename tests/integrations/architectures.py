"""Small random models of many architectures of Transformers, by kind; what a test needs to make each one run."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import layerzero as lz

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,  # attention that differs from uniform, so that a dropped mask shows
}
GQA = SIZES | {"num_key_value_heads": 2}
HEAD = GQA | {"head_dim": 8}
TWICE = {"vocab_size": 101, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.2, "pad_token_id": 0}
TWICE |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
TWICE |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "bos_token_id": 1, "eos_token_id": None}
T5 = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
PICTURE = {
    name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
PICTURE |= {"image_size": 16, "patch_size": 4, "initializer_range": 0.2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Architecture:
    """One model.

    Attributes:
        name: the stem of its classes in Transformers.
        kind: what it is of, which is how it is run.
        sizes: of its configuration.
        model: the class's ending, or its whole name.
    """

    name: str
    kind: str
    sizes: dict[str, Any]
    model: str = "ForCausalLM"

    def pair(self) -> tuple[Any, Any]:
        """The same random weights with eager attention and with LayerZero's, whichever test runs first."""
        lz.register_with_transformers()
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**copy.deepcopy(self.sizes))
        kind = getattr(transformers, self.model, None) or getattr(transformers, self.name + self.model)
        eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        for name, parameter in eager.named_parameters():
            if name.endswith(
                ("sinks", "_token", "position_embeddings")
            ):  # zeros hide sinks, and a norm of them explodes
                torch.nn.init.normal_(parameter)
        ours = kind._from_config(config, attn_implementation="layerzero").eval()
        ours.load_state_dict(eager.state_dict())
        return eager, ours


def decoders() -> list[Architecture]:
    """Dense, with sliding windows, a softcap, sinks, latent heads, experts, and hybrids of several kinds of layers."""

    def dense(
        name: str, sizes: dict[str, Any] = GQA, kind: str = "dense", model: str = "ForCausalLM", **more: Any
    ) -> Architecture:
        return Architecture(name, kind, sizes | more, model)

    layers = {"layer_types": ["full_attention", "linear_attention"]}
    linear = {f"linear_{name}": 4 for name in ("key_head_dim", "value_head_dim")}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    state = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    return [
        *(dense(name) for name in ("Llama", "Qwen2", "Olmo", "Olmo2", "StableLm", "Granite", "Phi", "Phi3")),
        *(dense(name, HEAD) for name in ("Qwen3", "Gemma", "Glm", "Glm4", "Ernie4_5", "SmolLM3", "Helium", "Nemotron")),
        dense("Starcoder2", sliding_window=6, kind="sliding"),
        dense("Mistral", sliding_window=6, kind="sliding"),
        dense("Cohere2", HEAD, sliding_window=6, kind="sliding"),
        dense("Gemma3Text", HEAD, sliding_window=6, kind="sliding", model="Gemma3ForCausalLM"),
        dense("Gemma2", HEAD, kind="softcap", query_pre_attn_scalar=5, attn_logit_softcapping=2.0, sliding_window=6),
        dense(
            "GptOss",
            HEAD,
            kind="sinks",
            sliding_window=6,
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_scaling=None,
        ),
        Architecture(
            "GPT2",
            "dense",
            {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
            "GPT2LMHeadModel",
        ),
        Architecture("GPTNeoX", "dense", SIZES),
        Architecture(
            "OPT",
            "dense",
            {
                "vocab_size": 101,
                "hidden_size": 32,
                "ffn_dim": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 64,
                "word_embed_proj_dim": 32,
                "init_std": 0.2,
                "dropout": 0.0,
            },
        ),
        Architecture(
            "GPTBigCode", "dense", {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        ),
        Architecture(
            "DeepseekV2",
            "MLA",
            GQA
            | MLA
            | {
                "num_key_value_heads": 4,
                "n_routed_experts": 2,
                "num_experts_per_tok": 1,
                "first_k_dense_replace": 1,
                "moe_intermediate_size": 16,
                "n_group": 1,
                "topk_group": 1,
            },
        ),
        Architecture(
            "DeepseekV3",
            "MLA",
            GQA
            | MLA
            | {
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "moe_intermediate_size": 16,
                "n_group": 1,
                "topk_group": 1,
            },
        ),
        dense(
            "DeepseekV32",
            GQA | MLA | EXPERTS,
            kind="MLA",
            num_key_value_heads=4,
            n_routed_experts=4,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            index_topk=4,  # of up to 17 keys: a query selects some
            index_n_heads=2,
            index_head_dim=8,
        ),
        dense("Mixtral", kind="experts", num_local_experts=4, num_experts_per_tok=2),
        dense("Qwen2Moe", kind="experts", **EXPERTS, shared_expert_intermediate_size=16),
        dense("Qwen3Moe", HEAD, kind="experts", **EXPERTS),
        dense("Olmoe", kind="experts", num_experts=4, num_experts_per_tok=2),
        dense("GraniteMoe", kind="experts", num_local_experts=4, num_experts_per_tok=2),
        dense("Qwen3Next", HEAD, kind="hybrid", **EXPERTS, **layers, **linear, shared_expert_intermediate_size=16),
        dense("Bamba", kind="hybrid", attn_layer_indices=[1], mamba_expand=2, **state),
        dense("FalconH1", HEAD, kind="hybrid", mamba_d_ssm=64, **state),
        dense("Lfm2", kind="hybrid", layer_types=["conv", "full_attention"]),
    ]


def encoders() -> list[Architecture]:
    """Of text."""
    esm = SIZES | {"mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": False}
    distil = {
        "vocab_size": 101,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 64,
    }
    return [
        *(Architecture(name, "encoder", SIZES, "Model") for name in ("Bert", "Roberta", "Electra", "Ernie")),
        Architecture("Albert", "encoder", SIZES | {"embedding_size": 16}, "Model"),
        Architecture("DistilBert", "encoder", distil | {"initializer_range": 0.2}, "Model"),
        Architecture("ModernBert", "encoder", SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2}, "Model"),
        Architecture("Esm", "encoder", esm, "Model"),
    ]


def writers() -> list[Architecture]:
    """An encoder of text and a decoder."""
    bart = {name: each for name, each in TWICE.items() if name != "eos_token_id"} | {"decoder_start_token_id": 2}
    return [
        *(
            Architecture(name, "twice", bart, "ForConditionalGeneration")
            for name in ("Bart", "MBart", "Pegasus", "M2M100")
        ),
        Architecture("Marian", "twice", bart, "MarianMTModel"),
        *(
            Architecture(name, "twice", T5 | {"decoder_start_token_id": 0}, "ForConditionalGeneration")
            for name in ("T5", "MT5")
        ),
    ]


def seers() -> list[Architecture]:
    """Of pictures."""
    clip = PICTURE | {"projection_dim": 16}
    return [
        *(Architecture(name, "vision", PICTURE, "Model") for name in ("ViT", "Dinov2", "DeiT", "IJepa")),
        Architecture("SiglipVision", "vision", clip, "SiglipVisionModel"),
        Architecture("CLIPVision", "vision", clip, "CLIPVisionModel"),
    ]


def hearers() -> list[Architecture]:
    """Of sound."""
    wave = SIZES | {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_conv_pos_embeddings": 4}
    wave |= {"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "hidden_dropout": 0.0}
    whisper = TWICE | {
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 32,
        "decoder_start_token_id": 2,
    }
    return [
        *(Architecture(name, "audio", wave, "Model") for name in ("Wav2Vec2", "Hubert")),
        Architecture("Whisper", "speech", whisper, "ForConditionalGeneration"),
    ]


def both() -> list[Architecture]:
    """A picture and text."""
    text, picture = (
        {"model_type": "llama"} | GQA,
        {"model_type": "clip_vision_model"} | PICTURE | {"projection_dim": 16},
    )
    llava = {"text_config": text, "vision_config": picture, "image_token_index": 100, "image_seq_length": 16}
    words = {name: SIZES[name] for name in SIZES if name != "vocab_size"}
    pairs = {"text_config": words | {"vocab_size": 101}, "vision_config": PICTURE}
    gemma = {"model_type": "gemma"} | HEAD
    siglip = {"model_type": "siglip_vision_model"} | PICTURE
    return [
        Architecture("Llava", "both", llava, "ForConditionalGeneration"),
        Architecture(
            "PaliGemma",
            "prefix",
            {"text_config": gemma, "vision_config": siglip, "image_token_index": 100, "projection_dim": 32},
            "ForConditionalGeneration",
        ),
        Architecture(
            "CLIP",
            "pair",
            pairs | {"text_config": pairs["text_config"] | {"eos_token_id": 2}} | {"projection_dim": 16},
            "Model",
        ),
        Architecture("Siglip", "pair", pairs, "Model"),
    ]


def everything() -> list[Architecture]:
    """All of them."""
    return [*decoders(), *encoders(), *writers(), *seers(), *hearers(), *both()]


def generating() -> list[Architecture]:
    """Those that write text."""
    return [each for each in everything() if each in decoders() or each.kind in {"twice", "speech", "both", "prefix"}]


def padded(side: str, batch: int = 3, length: int = 17) -> dict[str, torch.Tensor]:
    """Rows of three lengths."""
    ids = torch.randint(2, 99, (batch, length))
    mask = torch.ones_like(ids)
    for row, count in enumerate(range(0, 4 * batch, 4)):
        if side == "right":
            mask[row, length - count :] = 0
        elif side == "left":
            mask[row, :count] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def inputs(kind: str, side: str) -> dict[str, Any]:
    """A call of a model of this kind, its text padded on one side."""
    pictures = torch.randn(3, 3, 16, 16)
    if kind == "vision":
        return {"pixel_values": pictures}
    if kind == "audio":
        seen = torch.ones(3, 400, dtype=torch.long)
        seen[1, 200:] = 0
        return {"input_values": torch.randn(3, 400), "attention_mask": seen}
    if kind == "speech":
        return {"input_features": torch.randn(3, 8, 32), "decoder_input_ids": torch.randint(3, 99, (3, 5))}
    call: dict[str, Any] = padded(side)
    if kind == "twice":
        call["decoder_input_ids"] = torch.randint(3, 99, (3, 7))
    elif kind == "pair":
        call["pixel_values"] = pictures
    elif kind in {"both", "prefix"}:
        start = torch.full((3, 16), 100)
        call["input_ids"] = torch.cat([start, call["input_ids"]], 1)
        call["attention_mask"] = torch.cat([torch.ones_like(start), call["attention_mask"]], 1)
        call["pixel_values"] = pictures
    if kind == "prefix":  # 0: seen by all before it, too. Its processor gives this; without it even sdpa is not eager
        call["token_type_ids"] = torch.ones_like(call["input_ids"])
        call["token_type_ids"][:, :20] = 0
    return call
