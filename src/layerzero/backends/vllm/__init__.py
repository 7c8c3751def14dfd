"""vLLM's kernels for NVIDIA GPUs."""

from __future__ import annotations

MODULES = ("activation", "flash_attn", "norm", "paged", "rope")
"""The files that declare kernels, a family each."""
