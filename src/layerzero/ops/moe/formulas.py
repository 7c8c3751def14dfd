"""How a router scores experts, which of them it chooses, and what it weighs them with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NOTHING = 1e-20
"""What is added to a sum that is divided by, as in DeepSeek-V3: sigmoids may all be 0."""


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    """The score of each expert, in the dtype of the logits. Shapes: (T, E) → (T, E)."""
    return logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()


def group_scores(choice: Tensor, expert_groups: int) -> Tensor:
    """The sum of the two best of each group. Shapes: (T, E) → (T, groups)."""
    return choice.view(len(choice), expert_groups, choice.shape[-1] // expert_groups).topk(2, -1).values.sum(-1)


def within_groups(choice: Tensor, expert_groups: int, top_groups: int) -> Tensor:
    """What is chosen by, ``-inf`` outside the best groups. Shapes: (T, E) → (T, E)."""
    best = group_scores(choice, expert_groups).topk(top_groups, -1).indices
    shut = torch.ones((len(choice), expert_groups), dtype=torch.bool, device=choice.device).scatter(1, best, False)
    return choice.masked_fill(shut.repeat_interleave(choice.shape[-1] // expert_groups, -1), -math.inf)


def weighed(chosen: Tensor, scale: float, *, renormalize: bool) -> Tensor:
    """The weights of experts with these scores. Shapes: (T, k) → (T, k)."""
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + NOTHING)
    return chosen if scale == 1.0 else chosen * scale


def routed(
    logits: Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    expert_groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The weights and places of the chosen experts; computes in the dtype of the logits.

    Shapes: logits (T, E), bias (E,) → (T, k), (T, k)
    """
    scores = scores_of(logits, scoring)
    choice = scores if bias is None else scores + bias
    if expert_groups is not None and top_groups is not None:
        choice = within_groups(choice, expert_groups, top_groups)
    chosen, places = choice.topk(top_k, -1)
    if choice is not scores:
        chosen = scores.gather(-1, places)
    return weighed(chosen, scale, renormalize=renormalize), places
