"""torch's own kernels: activations, attention, products with weights, norms, paged gathers, flex, Inductor."""

from __future__ import annotations

MODULES = (
    "activation",
    "attention",
    "cuda_attention",
    "flex_attention",
    "inductor",
    "linear",
    "mlp",
    "norm",
    "paged",
    "rope",
)
"""The files that declare kernels, a family each."""
