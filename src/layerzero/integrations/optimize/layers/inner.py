"""The feed-forward part of a layer that computes by its own code: a mixture of experts, with its router.

A layer around it is proved with a stand-in for it, because a router sends a row elsewhere where two scores lie near
each other: one rounding before it may change an output by an expert's share. What is within it is looked for as
everywhere else: experts, shared experts, products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layerzero.integrations.optimize.swaps.candidate import quiet, refusal
from layerzero.integrations.optimize.swaps.weights import Packs


class Inner(Packs):
    """A module of rows that a layer calls, and nothing that it would pack.

    Attributes:
        module: it; hooks of it run.
        products: the modules in it that have plain weights, which may want gradients.
        activation: its class, which tells layers of one shape apart.
    """

    joined = None

    def __init__(self, module: Module, *, alone: bool) -> None:
        super().__init__((), pack=False)
        self.module, self._alone, self.activation = module, alone, type(module).__name__
        self.products = tuple(
            each
            for each in module.modules()
            if each._parameters and {type(one) for one in each._parameters.values()} <= {Parameter, type(None)}
        )

    @property
    def weights(self) -> list[Tensor]:
        """None that are this layer's to read."""
        return []

    def compute(self, rows: Tensor) -> Any:
        """What it gives, without what it gives besides: a router's scores."""
        made = self.module(rows)
        return made if self._alone else made[0]

    @contextmanager
    def still(self) -> Iterator[None]:
        """Put something smooth in its place, for as long as a layer is compared with its own code."""

        def forward(rows: Tensor, *_: Any, **__: Any) -> Any:
            made = torch.tanh(rows)
            return made if self._alone else (made, None)

        self.module.__dict__["forward"] = forward
        try:
            yield
        finally:
            del self.module.__dict__["forward"]


def inner(module: Module, width: int) -> Inner | None:
    """A part that makes rows of rows, with anything besides or nothing; None for any other module."""
    weights = list(module.parameters())
    if "forward" in module.__dict__ or refusal(module) or not weights:
        return None
    dtype = next((each.dtype for each in weights if each.is_floating_point()), torch.float32)
    rows = torch.linspace(-1.0, 1.0, 6 * width, dtype=torch.float32).view(2, 3, width).to(weights[0].device, dtype)
    try:
        with quiet(module):
            made = module(rows)
    except Exception:  # noqa: BLE001  # it takes something else: whatever it raises
        return None
    alone = isinstance(made, Tensor)
    first = made if alone else made[0] if isinstance(made, tuple) and made else None
    if not isinstance(first, Tensor) or first.shape != rows.shape or first.dtype != dtype:
        return None
    return Inner(module, alone=alone)
