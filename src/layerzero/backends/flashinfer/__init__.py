"""FlashInfer."""

from __future__ import annotations

MODULES = ("attention", "norm", "paged")
"""The files that declare kernels, a family each."""
