"""vLLM's kernels for CPUs."""

MODULES = (
    "linear",
    "moe",
    "norm",
    "paged",
    "rope",
)
"""The files that declare kernels, a family each."""
