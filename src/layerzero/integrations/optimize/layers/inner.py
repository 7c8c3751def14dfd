"""The feed-forward part of a layer that computes by its own code: a mixture of experts, with its router.

A layer around it is proved with a stand-in for it, because a router sends a row elsewhere where two scores lie near
each other: one rounding before it may change an output by an expert's share. What is within it is looked for as
everywhere else: experts, shared experts, products.

Here, too: cosines and sines as ``lz.rope_`` takes them, made once a step of what a model hands to each of its layers;
and numbers that a layer is tried on where they are extreme.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layerzero.core.graph_capture import capture_of
from layerzero.integrations.optimize.swaps.candidate import HUGE, LARGE, agrees, distance, quiet, refusal
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


_MADE = "_layerzero_table"
"""On the tensor of cosines, which a model hands to each of its layers."""


@dataclass(frozen=True)
class Table:
    """A row for each token.

    Attributes:
        cos, sin: float32, the two halves of the rows of one tensor.
        positions: which row is whose; None where each token of a sequence has its own, in order.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None


def table_for(cos: Tensor, sin: Tensor, batch: int, seq: int, *, once: bool = False) -> Table:
    """The table of (B, S, R) or (1, S, R) cosines and sines, whose second half repeats the first, or which come once.

    Each capture makes its own: a replay then reads what the cosines hold by then, and no other call, nor another graph,
    reads memory that only a replay fills.
    """
    kept = cos.__dict__.get(_MADE)
    versions = (0, 0) if cos.is_inference() else (cos._version, sin._version)
    capture = capture_of(cos)
    if kept is not None and kept[1] is sin and kept[2:] == (versions, batch, seq, capture, once):
        made: Table = kept[0]
        return made
    half = cos.shape[-1] // (1 if once else 2)
    rows = torch.cat((cos[..., :half], sin[..., :half]), -1).float().view(-1, 2 * half)
    count = rows.shape[0]
    positions = None
    if count != seq or not cos.is_cpu:  # on a CPU what no call wants costs most: torch gathers rows in two operators
        positions = torch.arange(count, device=cos.device)
        positions = positions.view(batch, seq) if count == batch * seq else positions.expand(batch, seq).contiguous()
    table = Table(rows[:, :half], rows[:, half:], positions)
    setattr(cos, _MADE, (table, sin, versions, batch, seq, capture, once))
    return table


def forget_table(named: Mapping[str, Any]) -> None:
    """Let the next layer that is called with these arguments make the table again, as a step's first one does."""
    for each in named.get("position_embeddings") or ():
        getattr(each, "__dict__", {}).pop(_MADE, None)


def extreme(rows: Tensor) -> Tensor:
    """Rows (B, S, D), a sequence far larger than the one before, as far as their squares go; one number is NaN."""
    factors = [1.0, LARGE, LARGE**2] + ([HUGE, HUGE**2 / 10] if torch.finfo(rows.dtype).max > HUGE**4 else [])
    scale = [factors[each % len(factors)] for each in range(rows.shape[0])]
    made = rows * torch.tensor(scale, device=rows.device, dtype=torch.float32).to(rows.dtype)[:, None, None]
    made[0, -1, 0] = torch.nan
    return made


def alike(ours: Tensor, own: Tensor, *, large: bool) -> bool:
    """Whether results for such rows agree, each sequence by itself: NaN where it belongs, and ``large`` ones, too."""
    if not torch.equal(ours[0, -1].isnan(), own[0, -1].isnan()):
        return False
    return not large or all(agrees(distance(one, two), two.dtype) for one, two in zip(ours[1:], own[1:], strict=True))
