"""vLLM's kernels for NVIDIA GPUs."""

from __future__ import annotations

MODULES = (
    "activation",
    "cascade",
    "flash_attn",
    "latent",
    "logits",
    "moe",
    "norm",
    "normed_rope",
    "paged",
    "paged_tokens",
    "quantize",
    "quantized",
    "rope",
    "rope_append",
    "sparse",
    "varlen",
)
"""The files that declare kernels, a family each."""
