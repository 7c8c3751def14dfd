"""A draw by top-k, top-p and min-p in one call, each row by a seed of its own where it has one.

What is kept is one number of each row, the smallest weight: by the likeliest places alone where these say it.
A row is computed by operators whose bits no other row changes, and drawn from in the order of the vocabulary, so that
a seed names one place wherever its row is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.sampling_few import by_sums
from layerzero.core.facts import Facts
from layerzero.ops.sampling.checks import check_drawable, check_signs
from layerzero.ops.sampling.formulas import count_of, drawn, generator_of, nth, of_row, probabilities


def by_race(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """The place that comes first, each at a rate of its weight. Shapes: (*, V) → (*)."""
    times = torch.empty_like(weights).exponential_(generator=generator)
    return torch.div(weights, times, out=times).argmax(-1)


def taken(
    weights: Tensor,
    least: Tensor | None,
    tensor: Tensor,
    name: str,
    own: torch.Generator | None,
    seeds: Tensor | None = None,
    *,
    on_cpu: bool,
) -> Tensor:
    """Draw of the weights that are no less than ``least``: by sums on a CPU, elsewhere without waiting for the device.

    Shapes: weights (*, V), least (*, 1), seeds (*) → (*).
    Raises: InvalidCallError on a CPU for a row of the call's ``tensor`` that nothing can be drawn of.
    """
    if least is not None:
        weights = torch.where(weights >= least, weights, 0.0)
    if not on_cpu:
        return by_race(weights, own) if seeds is None else drawn(weights, None, seeds)
    upto = weights.cumsum(-1)
    check_drawable(upto[..., -1], tensor, name)
    return by_sums(upto, own, seeds)


_FEW = 1024
"""The likeliest places that are looked at before a row is sorted: 0.5 ms of 128256 places, where a sort takes 11.7."""


def load_filtered(facts: Facts) -> Callable[..., Any]:
    """The kernel of ``sampling.filtered``."""
    name = str(facts["operation"])
    logits, on_cpu = not name.endswith(".probs"), facts.device.platform == "cpu"

    def run(
        tensor: Tensor,
        *,
        top_k: int | None = None,
        top_k_by_row: Tensor | None = None,
        top_p: float | None = None,
        top_p_by_row: Tensor | None = None,
        min_p: float | None = None,
        min_p_by_row: Tensor | None = None,
        temperature: float | None = None,
        temperature_by_row: Tensor | None = None,
        seed: int | None = None,
        seed_by_row: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        tensor = tensor.detach()
        if on_cpu:
            check_signs(tensor, name)
        weights = probabilities(tensor, temperature, temperature_by_row, logits=logits)
        count = None
        if top_k is not None or top_k_by_row is not None:
            count = count_of(top_k, top_k_by_row, weights.shape[-1])
        least = _least(weights, count, of_row(top_p, top_p_by_row), on_cpu=on_cpu)
        if min_p is not None or min_p_by_row is not None:
            most = weights.amax(-1, keepdim=True)
            bound = torch.minimum(most * of_row(min_p, min_p_by_row), most)
            least = bound if least is None else torch.maximum(least, bound)
        own = generator_of(seed, generator, tensor.device)
        return taken(weights, least, tensor, name, own, seed_by_row, on_cpu=on_cpu)

    return run


def _least(weights: Tensor, count: Any, share: Any, *, on_cpu: bool) -> Tensor | None:
    """The smallest weight that top-k and top-p keep, (*, 1), of few likeliest places where these say it.

    Sums are those of ``cumsum``, whose bits no other row changes; those of ``sum`` depend on the number of threads.
    """
    if count is None and share is None:
        return None
    vocab = weights.shape[-1]
    most = vocab if count is None else count if isinstance(count, int) else int(count.max()) if on_cpu else vocab
    if on_cpu and most > _FEW:
        found = _least_of(weights, weights.topk(_FEW).values, count, share, enough=False)
        if found is not None:
            return found
    values = weights.topk(most).values if most < vocab else weights.sort(-1, descending=True).values
    return _least_of(weights, values, count, share, enough=True)


def _least_of(weights: Tensor, values: Tensor, count: Any, share: Any, *, enough: bool) -> Tensor | None:
    """The same by the largest values, descending; None where these are not ``enough`` to say it of every row."""
    seen, vocab = values.shape[-1], weights.shape[-1]
    if not isinstance(count, Tensor):  # filled on the device: a capture takes no copy from the host
        count = torch.full((), vocab if count is None else count, dtype=torch.int64, device=weights.device)
    whole = count <= seen  # the last value of top-k is among them
    last = nth(values, count.clamp(max=seen).expand(*values.shape[:-1], 1))
    if share is None:
        return last if enough or bool(whole.all()) else None
    total = torch.where((weights >= last) | ~whole, weights, 0.0).cumsum(-1)[..., -1:]
    upto = values.cumsum(-1)
    if not enough and not bool((whole | ((count == vocab) & (upto[..., -1:] >= share * total))).all()):
        return None
    kept = (upto - values < share * total) & (values >= last)
    return nth(values, kept.sum(-1, keepdim=True).clamp_(min=1))
