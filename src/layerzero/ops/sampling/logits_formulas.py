"""What is done to logits, in the dtype that they are given in: penalties for what was said, and numbers added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def counts_of(ids: Tensor, vocab: int) -> Tensor:
    """How often each place is among token ids; -1 is none. Shapes: (*, L) → (*, V) int32."""
    counts = torch.zeros((*ids.shape[:-1], vocab), dtype=torch.int32, device=ids.device)
    if vocab == 0:
        return counts
    return counts.scatter_add_(-1, ids.clamp(min=0).long(), (ids >= 0).int())


def penalised(logits: Tensor, seen: Tensor, counts: Tensor, repetition: Any, presence: Any, frequency: Any) -> Tensor:
    """Logits of places that were seen nearer to minus infinity; None of the three does nothing.

    Repetition divides what is above 0 and multiplies what is below (arXiv:1909.05858); frequency is taken off for each
    time that a place was said, presence once (the OpenAI interface).
    """
    if repetition is not None:
        less = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, less, logits)
    if frequency is not None:
        logits = logits - frequency * counts
    if presence is not None:
        logits = logits - presence * (counts > 0)
    return logits


def biased(logits: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
    """Add numbers to places of logits, in place; -1 is none, whatever its number. Shapes: (*, V), (*, n), (*, n)."""
    added = bias.masked_fill(ids < 0, 0.0).to(logits.dtype)
    return logits.scatter_add_(-1, ids.clamp(min=0).long(), added)
