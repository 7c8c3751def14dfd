"""vLLM's kernels for NVIDIA GPUs."""

from __future__ import annotations

MODULES = (
    "flash_attn",
    "latent",
    "logits",
    "norm",
    "paged",
    "quantize",
    "quantized",
    "rope",
    "sparse",
    "varlen",
)
"""The files that declare kernels, a family each."""
