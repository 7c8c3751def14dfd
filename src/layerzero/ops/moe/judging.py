"""Which choices of experts are right: the reference's, and others that rounding cannot tell from it.

A kernel scores in float32. Where two scores lie that near to each other either may come first, and where the scores of
two groups do, either group may be searched: of such a row only its own consistency counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.judge import Elementwise, Given, Indices, Judge, Property, Tolerance
from layerzero.ops.moe.formulas import group_scores, scores_of, weighed, within_groups

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = dict.fromkeys(_DTYPES, Tolerance(2e-5, 1e-6))
TOLERANCE_REASON = (
    "weights are float32, whatever the dtype of the logits: an exponential whose argument is 80 has an error of 5e-6, "
    "a sum of two hundred of them no more"
)

NEAR = 1e-5
"""How near two scores are whose order float32 may change; sums of a probability and a bias are of order 1."""

_LOWEST = -80.0
"""Logits so far below the largest have a probability of nearly 0 in float32, and tie."""

_UNCOUNTED = 1e30
"""The error that a weight may have where another expert may have been chosen."""


def _choice(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """What experts are chosen by, in float64, and the rows where it cannot tell which."""
    logits, bias = arguments["logits"], arguments.get("bias")
    groups, top = arguments.get("expert_groups"), arguments.get("top_groups")
    unsure = logits.isnan().any(-1) | (logits == torch.inf).any(-1) | (logits == -torch.inf).all(-1)
    if bias is not None:
        unsure = unsure | ~bias.isfinite().all()
    choice = scores_of(logits, arguments.get("scoring", "softmax"))
    choice = choice if bias is None else choice + bias
    if groups is not None and top is not None:
        ordered = group_scores(choice, groups).sort(-1, descending=True).values
        gap = ordered[:, top - 1] - ordered[:, top] if top < groups else torch.ones_like(ordered[:, 0])
        unsure = unsure | ~(gap > NEAR * (1.0 + ordered[:, 0].abs()))
        choice = within_groups(choice, groups, top)
    elif bias is None and arguments.get("scoring", "softmax") == "softmax":
        choice = (logits - logits.amax(-1, keepdim=True)).clamp(min=_LOWEST)
    return choice, unsure


def _places(arguments: Mapping[str, Any]) -> Tensor:
    choice, unsure = _choice(arguments)
    return choice.masked_fill(unsure.unsqueeze(-1), 0.0)


def _slack(arguments: Mapping[str, Any]) -> Tensor:
    """Of each weight, nothing, or any number where another expert may stand in its place."""
    choice, unsure = _choice(arguments)
    top_k = int(arguments["top_k"])
    if arguments.get("bias") is not None:  # equal sums of a score and a bias have other scores
        ordered = choice.sort(-1, descending=True).values
        gaps = ordered[:, :top_k] - ordered[:, 1 : top_k + 1] if top_k < choice.shape[-1] else -ordered.diff(dim=-1)
        unsure = unsure | ~(gaps > NEAR * (1.0 + ordered[:, :1].abs())).all(-1)
    return (unsure * _UNCOUNTED).to(torch.float64).unsqueeze(-1).expand(-1, top_k)


def _consistent(results: Sequence[tuple[Tensor, ...]], truth: tuple[Tensor, ...], given: Given) -> str:
    """Weights are those of the experts beside them."""
    arguments = given.basis
    weights, places = results[0]
    scores = scores_of(arguments["logits"], arguments.get("scoring", "softmax")).gather(-1, places.long())
    kept = arguments.get("renormalize", True), float(arguments.get("scale", 1.0))
    want = weighed(scores, kept[1], renormalize=kept[0])
    apart = (weights.to(want.dtype) - want).abs() > TOLERANCE[torch.float32].atol + TOLERANCE[torch.float32].rtol * (
        want.abs() + abs(kept[1])
    )
    if not apart.any():
        return ""
    row, slot = apart.nonzero()[0].tolist()
    wanted, got = f"the weight {want[row, slot]:.8g} of expert {places[row, slot]}", f"{weights[row, slot]:.8g}"
    return f"({row}, {slot}): wanted {wanted}, got {got}"


JUDGES: Mapping[str, Judge] = {
    "expert_weights": Elementwise(TOLERANCE, TOLERANCE_REASON, _slack),
    "expert_ids": Indices(
        _places,
        "float32 may order two scores otherwise that differ in their last digits; of rows with NaN any",
        dict.fromkeys(_DTYPES, Tolerance(1e-6, NEAR)),
    ),
}
CONSISTENT = Property("weights are those of the experts beside them", _consistent, "they are read together")
