"""FlashInfer."""

MODULES = (
    "attention",
    "cascade",
    "latent",
    "norm",
    "paged",
    "quantized",
    "rope",
    "sampling",
    "sparse",
    "varlen",
)
"""The files that declare kernels, a family each."""
