"""torch's own kernels: a file of each family, and flex attention and Inductor."""

from __future__ import annotations

MODULES = (
    "activation",
    "attention",
    "cascade",
    "collectives",
    "conv",
    "cuda_attention",
    "elementwise",
    "flex_attention",
    "grouped_linear",
    "inductor",
    "inductor_gelu",
    "kv",
    "latent",
    "lengths",
    "linear",
    "logits",
    "moe",
    "moe_weights",
    "norm",
    "paged",
    "qkv",
    "quantize",
    "quantized",
    "quantized_linear",
    "rope",
    "sampling",
    "softcap",
    "sparse",
    "symmetric",
    "varlen",
    "weight_formats",
)
"""The files that declare kernels, a family each."""
