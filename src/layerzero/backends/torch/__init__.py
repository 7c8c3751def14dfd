"""torch's own kernels: activations, attention, products with weights, norms, paged gathers, draws, flex, Inductor."""

from __future__ import annotations

MODULES = (
    "activation",
    "alibi",
    "attention",
    "cascade",
    "cuda_attention",
    "elementwise",
    "embedding",
    "experts",
    "flex_attention",
    "greedy",
    "inductor",
    "inductor_gelu",
    "kv",
    "latent",
    "lengths",
    "linear",
    "logits",
    "mlp",
    "norm",
    "normed_rope",
    "paged",
    "paged_tokens",
    "qkv",
    "quantized",
    "rope",
    "rope_append",
    "sampling",
    "sparse",
    "sparse_variable",
    "tensor",
    "varlen",
    "verify",
)
"""The files that declare kernels, a family each."""
