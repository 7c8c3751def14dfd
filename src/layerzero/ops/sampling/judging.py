"""Which draws are right: those that the reference's probabilities allow, as often as these say.

A kernel computes in float32, where a value that lies beside the bound of what is kept may fall on its other side: two
logits become one probability, a sum is rounded. Such a place may come or not, and of its row nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.distribution import Distribution
from layerzero.ops.sampling.formulas import keep_min_p, keep_top_k, keep_top_p, probabilities

NEAR = 1e-5
"""How near a bound a value, or a sum of a row, is too near to tell: softmax of float32 is off by 4e-6 at exp(-60)."""

REASON = "a place comes as often as its probability says, among those that are kept; near the bound float32 decides"

Sets = Callable[[Tensor, Mapping[str, Any]], tuple[Tensor, Tensor]]
"""The places that are surely kept, and those that may be."""


def _all(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    every = torch.ones_like(weights, dtype=torch.bool)
    return every, every


def _top_k(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    top_k, by_row = given.get("top_k"), given.get("top_k_by_row")
    return keep_top_k(weights, top_k, by_row), keep_top_k(weights, top_k, by_row, near=NEAR)


def _top_p(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    top_p, by_row = given.get("top_p"), given.get("top_p_by_row")
    return keep_top_p(weights, top_p, by_row, -NEAR), keep_top_p(weights, top_p, by_row, NEAR, NEAR)


def _min_p(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    min_p, by_row = given.get("min_p"), given.get("min_p_by_row")
    return keep_min_p(weights, min_p, by_row, NEAR), keep_min_p(weights, min_p, by_row, -NEAR)


def _top_k_top_p(weights: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    first, widest = _top_k(weights, given)
    sure, may = _top_p(weights * first, given)
    doubtful = (first != widest).any(-1, keepdim=True)  # of other places the same share are others
    return sure & first, torch.where(doubtful, widest, may & first)


SETS: Mapping[str, Sets] = {
    "categorical": _all,
    "topk": _top_k,
    "topp": _top_p,
    "minp": _min_p,
    "topk_topp": _top_k_top_p,
}


def judge(kind: str, *, logits: bool) -> Distribution:
    """The judge of an operation's draws."""
    sets = SETS[kind]

    def weights_of(arguments: Mapping[str, Any]) -> Tensor:
        tensor = arguments["logits" if logits else "probs"]
        return probabilities(tensor, arguments.get("temperature"), arguments.get("temperature_by_row"), logits=logits)

    def of_kept(arguments: Mapping[str, Any]) -> Tensor:
        weights = weights_of(arguments)
        return weights * sets(weights, arguments)[0]

    def support(arguments: Mapping[str, Any]) -> Tensor:
        weights = weights_of(arguments)
        return sets(weights, arguments)[1] & (weights > 0)

    return Distribution(of_kept, REASON, support=support)
