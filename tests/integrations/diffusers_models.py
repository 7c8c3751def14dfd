"""Small random models of diffusers, and what they are called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers", "0.36", reason="needs diffusers >= 0.36")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


UNET = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 24,
    "norm_num_groups": 4,
}


def unet() -> tuple[Any, dict[str, Any]]:
    """Self- and cross-attention, one text of which is padded."""
    seen = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    call = {"sample": randn(2, 4, 8, 8), "timestep": torch.tensor(3), "encoder_hidden_states": randn(2, 7, 24)}
    return diffusers.UNet2DConditionModel(**UNET, attention_head_dim=4), call | {"encoder_attention_mask": seen}


def unet_xl() -> tuple[Any, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        **UNET,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=6 * 8 + 16,
    )
    added = {"text_embeds": randn(2, 16), "time_ids": randn(2, 6)}
    call = {"sample": randn(2, 4, 8, 8), "timestep": torch.tensor(3), "encoder_hidden_states": randn(2, 7, 24)}
    return model, call | {"added_cond_kwargs": added}


def autoencoder() -> tuple[Any, dict[str, Any]]:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = diffusers.AutoencoderKL(block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, **blocks)
    return model, {"sample": randn(1, 3, 16, 16)}


def sd3() -> tuple[Any, dict[str, Any]]:
    """Joint attention of image and text, norms of queries and keys, and a second attention in the first block."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    call = {"hidden_states": randn(2, 4, 8, 8), "encoder_hidden_states": randn(2, 7, 32)}
    return model, call | {"pooled_projections": randn(2, 16), "timestep": torch.tensor([3, 4])}


def flux() -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    places = torch.stack([torch.zeros(16), torch.arange(16.0) % 4, torch.arange(16.0) // 4], 1)
    call = {"hidden_states": randn(1, 16, 4), "encoder_hidden_states": randn(1, 5, 32), "img_ids": places}
    return model, call | {
        "pooled_projections": randn(1, 32),
        "timestep": torch.tensor([0.3]),
        "txt_ids": torch.zeros(5, 3),
    }


def wan() -> tuple[Any, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    call = {"hidden_states": randn(1, 4, 2, 8, 8), "encoder_hidden_states": randn(1, 6, 16)}
    return model, call | {"timestep": torch.tensor([4])}


def cosmos() -> tuple[Any, dict[str, Any]]:
    """Its processors call diffusers' dispatcher and have no backend that could be set."""
    model = diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        mlp_ratio=2,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        concat_padding_mask=False,
    )
    call = {"hidden_states": randn(1, 4, 1, 8, 8), "encoder_hidden_states": randn(1, 6, 16)}
    return model, call | {"timestep": torch.tensor([4]), "fps": 30}


MODELS = {unet: 8, unet_xl: 16, autoencoder: 2, sd3: 3, flux: 3, wan: 4, cosmos: 2}
"""With their numbers of attentions."""
