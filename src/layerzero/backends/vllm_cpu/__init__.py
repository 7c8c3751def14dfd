"""vLLM's kernels for CPUs."""

from __future__ import annotations

MODULES = (
    "activation",
    "latent",
    "linear",
    "moe",
    "norm",
    "paged",
    "quantize",
    "quantized_linear",
    "rope",
    "rope_append",
)
"""The files that declare kernels, a family each."""
