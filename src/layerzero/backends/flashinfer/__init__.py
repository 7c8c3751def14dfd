"""FlashInfer."""

from __future__ import annotations

MODULES = ("activation", "attention", "linear", "norm", "paged", "rope", "sampling", "verify")
"""The files that declare kernels, a family each."""
