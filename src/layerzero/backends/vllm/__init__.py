"""vLLM's kernels for NVIDIA GPUs."""

from __future__ import annotations

MODULES = ("activation", "flash_attn", "norm", "normed_rope", "paged", "rope")
"""The files that declare kernels, a family each."""
