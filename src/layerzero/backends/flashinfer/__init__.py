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
    "rope",
    "sampling",
    "sparse",
    "varlen",
    "verify",
)
"""The files that declare kernels, a family each."""
