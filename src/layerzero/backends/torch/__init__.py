"""torch's own kernels: attention, norms, paged gathers, flex attention, Inductor."""

from __future__ import annotations

MODULES = ("attention", "cuda_attention", "flex_attention", "inductor", "norm", "paged", "rope")
"""The files that declare kernels, a family each."""
