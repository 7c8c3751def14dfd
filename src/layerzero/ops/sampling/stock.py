"""What code without LayerZero does: filter sorted probabilities, and torch.multinomial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.sampling import formulas

Run = Callable[[], Tensor]


def greedy(logits: Tensor) -> Run:
    """``torch.argmax``."""
    return lambda: logits.argmax(-1)


def stock(kind: str, *, logits: bool) -> Callable[..., Run]:
    """The expression for an operation's arguments."""

    def make(*tensors: Tensor, seed: int | None = None, generator: torch.Generator | None = None, **given: Any) -> Run:
        given.pop("seed_by_row", None)  # torch has one generator for all rows
        tensor = tensors[0] if tensors else given.pop("logits" if logits else "probs")
        divisors = given.pop("temperature", None), given.pop("temperature_by_row", None)

        def run() -> Tensor:
            weights = formulas.tempered(tensor.float(), *divisors).softmax(-1) if logits else tensor.float()
            own = formulas.generator_of(seed, generator, tensor.device)
            vocab = weights.shape[-1]
            flat = weights.reshape(-1, vocab)
            rows: dict[str, Any] = {n: v.reshape(-1) if isinstance(v, Tensor) else v for n, v in given.items()}
            values, order = _filtered(kind, flat, **rows)
            place = torch.multinomial(values, 1, generator=own)
            place = place if order is None else order.gather(-1, place)
            return place.reshape(weights.shape[:-1])

        return run

    return make


def _filtered(
    kind: str,
    weights: Tensor,
    top_k: int | None = None,
    top_k_by_row: Tensor | None = None,
    top_p: float | None = None,
    top_p_by_row: Tensor | None = None,
    min_p: float | None = None,
    min_p_by_row: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if kind == "categorical":
        return weights, None
    if kind == "minp":
        bound = weights.amax(-1, keepdim=True) * formulas.of_row(min_p, min_p_by_row)
        return weights.masked_fill(weights < bound, 0.0), None
    bound = None
    if kind == "filtered" and (min_p is not None or min_p_by_row is not None):
        bound = weights.amax(-1, keepdim=True) * formulas.of_row(min_p, min_p_by_row)
    if kind == "topk" and top_k_by_row is None:
        return weights.topk(formulas.count_of(top_k, top_k_by_row, weights.shape[-1]))
    values, order = weights.sort(-1, descending=True)
    if kind != "topp":
        places = torch.arange(values.shape[-1], device=values.device)
        values = values.masked_fill(places >= formulas.count_of(top_k, top_k_by_row, values.shape[-1]), 0.0)
    if kind != "topk" and (top_p is not None or top_p_by_row is not None):
        values = values / values.sum(-1, keepdim=True)
        before = values.cumsum(-1) - values
        drop = before >= formulas.of_row(top_p, top_p_by_row)
        drop[..., 0] = False
        values = values.masked_fill(drop, 0.0)
    return values if bound is None else values.masked_fill(weights.gather(-1, order) < bound, 0.0), order


def penalties(
    logits: Tensor,
    output_ids: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    *,
    output_counts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    **given: Any,
) -> Run:
    """The expression that engines have: counts by a scatter, then whole rows."""

    def run() -> Tensor:
        if output_counts is not None:
            counts = output_counts
        elif output_ids is not None:
            counts = formulas.counts_of(output_ids, logits.shape[-1])
        else:
            counts = torch.zeros_like(logits, dtype=torch.int32)
        asked = prompt_mask if prompt_ids is None else formulas.counts_of(prompt_ids, logits.shape[-1]) > 0
        seen = counts > 0 if asked is None else (counts > 0) | asked
        numbers = (
            formulas.of_row(given.get(name), given.get(f"{name}_by_row"))
            for name in ("repetition", "presence", "frequency")
        )
        return formulas.penalised(logits, seen, counts, *numbers).to(logits.dtype)

    return run


def bias(logits: Tensor, bias_ids: Tensor, bias: Tensor) -> Run:
    """A scatter into a copy."""
    return lambda: formulas.biased(logits.clone(), bias_ids, bias)


def logprobs(
    logits: Tensor, ids: Tensor, *, temperature: float | None = None, temperature_by_row: Tensor | None = None
) -> Run:
    """``torch.log_softmax`` of all places, of which one is taken."""

    def run() -> Tensor:
        wide = formulas.tempered(logits.float(), temperature, temperature_by_row)
        return wide.log_softmax(-1).gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)

    return run


def verify(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    parents: Tensor | None = None,
    *,
    draft_lens: Tensor | None = None,
    greedy: bool = False,
    seed: int | None = None,
    seed_by_row: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """The walk, node by node, as models' code has it; ``torch.argmax`` before it where it is greedy."""

    def run() -> tuple[Tensor, Tensor]:
        above = formulas.chain_of(draft_ids) if parents is None else parents
        if greedy:
            return formulas.walked_greedily(draft_ids, target_probs.argmax(-1), above, draft_lens)
        own = formulas.generator_of(seed, generator, target_probs.device)
        drafted = None if draft_probs is None else draft_probs.float()
        return formulas.walked(draft_ids, target_probs.float(), drafted, above, own, draft_lens, seed_by_row)

    return run
