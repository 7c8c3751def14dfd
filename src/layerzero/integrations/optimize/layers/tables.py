"""Cosines and sines as ``lz.rope_`` takes them, made once a step of what a model hands to each of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.core.graph_capture import capture_of

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
    if kept is not None and kept[1] is sin and kept[2:] == (versions, batch, capture, once):
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
    setattr(cos, _MADE, (table, sin, versions, batch, capture, once))
    return table


def forget_table(named: Mapping[str, Any]) -> None:
    """Let the next layer that is called with these arguments make the table again, as a step's first one does."""
    for each in named.get("position_embeddings") or ():
        getattr(each, "__dict__", {}).pop(_MADE, None)
