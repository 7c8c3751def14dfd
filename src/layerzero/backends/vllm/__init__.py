"""vLLM's kernels for NVIDIA GPUs."""

MODULES = (
    "experts",
    "flash_attn",
    "grouped_linear",
    "latent",
    "logits",
    "marlin",
    "norm",
    "paged",
    "quantize",
    "quantized",
    "rope",
    "sparse",
    "varlen",
)
"""The files that declare kernels, a family each."""
