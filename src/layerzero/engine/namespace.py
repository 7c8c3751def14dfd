"""``torch.ops.layerzero``: an operator is defined when it is first read.

Defining all takes longer than everything else that an import of this package does, and most processes call ``lz``.
Torch makes its own namespaces in the same way: a missing attribute is looked up among what C++ knows. What C++ looks up
by itself (TorchScript files, AOTInductor packages) never asks Python: ``dir(torch.ops.layerzero)`` defines all before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import _OpNamespace


class _Namespace(_OpNamespace):
    """Torch's own, which defines operators on first use."""

    __module__ = _OpNamespace.__module__  # operators tell where they live by it, and torch.fx writes that down

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            from layerzero.engine import operators
            from layerzero.ops import FORMER_NAMES, current_name

            if name in FORMER_NAMES:
                return getattr(self, current_name(name))
            operators.define(name)
        return super().__getattr__(name)

    def __dir__(self) -> list[str]:
        from layerzero.engine import operators

        return [*super().__dir__(), *operators.define_all()]


def install() -> None:
    """Let ``torch.ops.layerzero`` define operators on first use; torch must be imported."""
    if type(torch.ops.layerzero) is not _Namespace:
        torch.ops.layerzero.__class__ = _Namespace
