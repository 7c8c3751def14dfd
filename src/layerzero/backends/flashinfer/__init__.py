"""FlashInfer."""

from __future__ import annotations

MODULES = ("attention", "norm", "paged", "rope")
"""The files that declare kernels, a family each."""
