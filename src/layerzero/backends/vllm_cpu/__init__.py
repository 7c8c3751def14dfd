"""vLLM's kernels for CPUs."""

from __future__ import annotations

MODULES = (
    "linear",
    "moe",
    "norm",
    "paged",
    "rope",
)
"""The files that declare kernels, a family each."""
