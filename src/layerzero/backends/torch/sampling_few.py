"""Draws among the few largest numbers of a row on a CPU: nothing else of the row becomes a probability.

What ties with the last of the k largest may be drawn as well, and ``topk`` does not tell: one number more than k does.
Where it is equal to the last, the draw has to look at the whole row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerzero.core.facts import Facts
from layerzero.ops.sampling.checks import check_drawable
from layerzero.ops.sampling.formulas import count_of, generator_of, nth, of_row, probabilities

Few = Callable[..., Tensor | None]
"""The places that are drawn; None where more than k places have to be looked at."""


def by_sums(upto: Tensor, generator: torch.Generator | None) -> Tensor:
    """The place where a random number lies among sums up to each place. Shapes: (*, V) → (*).

    The number stays below the last sum, so that the place has a weight: the first at which sums are above it.
    """
    total = upto[..., -1:]
    mark = torch.rand(total.shape, dtype=torch.float64, generator=generator).mul_(total).to(upto.dtype)
    mark = torch.minimum(mark, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(upto, mark, right=True).squeeze(-1)


def few_of(facts: Facts) -> Few | None:
    """What draws among the k largest; None where the operation has no k, or the device is no CPU."""
    name = str(facts["operation"])
    if facts.device.platform != "cpu" or not name.startswith("sampling.topk"):
        return None
    logits, shared = not name.endswith(".probs"), name.startswith("sampling.topk_topp")

    def few(
        tensor: Tensor,
        *,
        k: int | None = None,
        row_k: Tensor | None = None,
        p: float | None = None,
        row_p: Tensor | None = None,
        temperature: float | None = None,
        row_temperature: Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor | None:
        vocab = tensor.shape[-1]
        count = count_of(k, row_k, vocab)
        most = count if row_k is None else int(count.max())
        if most == vocab:
            return None
        values, order = tensor.topk(most + 1)
        last, after = nth(values, count), nth(values, count + 1)
        if bool((last == after).any()):
            return None
        if row_k is not None:
            values = values.masked_fill(values < last, -torch.inf if logits else 0.0)
        weights = probabilities(values[..., :most], temperature, row_temperature, logits=logits)
        upto = weights.cumsum(-1)
        total = upto[..., -1:]
        if shared:
            kept = (upto - weights < total * of_row(p, row_p)).sum(-1, keepdim=True).clamp_(min=1)
            weights = torch.where(weights >= nth(weights, kept), weights, 0.0)
            upto = weights.cumsum(-1)
        check_drawable(total, tensor, name)
        return order.gather(-1, by_sums(upto, generator_of(seed, generator, tensor.device)).unsqueeze(-1)).squeeze(-1)

    return few
