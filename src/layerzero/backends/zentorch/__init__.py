"""AMD's kernels for CPUs with AVX-512."""

from __future__ import annotations

from layerzero.backends.zentorch.library import ZENTORCH

__all__ = ["MODULES", "ZENTORCH"]

MODULES = ("attention", "linear", "norm")
"""The files that declare kernels, a family each."""
