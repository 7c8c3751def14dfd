"""Liger's Triton kernels."""

from __future__ import annotations

MODULES = ("activation", "norm")
"""The files that declare kernels, a family each."""
