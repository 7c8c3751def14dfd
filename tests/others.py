"""Libraries that a test leaves out where it speaks of torch's kernels and its own: all that are declared but torch."""

from __future__ import annotations

from layerzero.engine.registry import REGISTRY

OTHERS = tuple(sorted({backend.name for backend in REGISTRY.backends()} - {"torch", "reference", "user"}))
