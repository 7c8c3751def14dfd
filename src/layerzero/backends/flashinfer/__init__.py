"""FlashInfer."""

from __future__ import annotations

MODULES = (
    "activation",
    "attention",
    "cascade",
    "latent",
    "linear",
    "norm",
    "paged",
    "pod",
    "quantized",
    "rope",
    "sampling",
    "sparse",
    "sparse_variable",
    "varlen",
    "verify",
)
"""The files that declare kernels, a family each."""
