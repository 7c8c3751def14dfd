"""A draw by top-k, top-p and min-p in one call, each row by a seed of its own where it has one.

What is kept is one number of each row, the smallest weight: by the likeliest places alone where these say it.
A row is computed by operators whose bits no other row changes, and drawn from in the order of the vocabulary, so that
a seed names one place wherever its row is.

What ties with the last of the k largest may be drawn as well, and ``topk`` does not tell: one number more than k does.
Where it is equal to the last, the draw has to look at the whole row.

The k largest lie in the k blocks with the largest maxima, which vectors find: of a row of 128256 float32 numbers, one
thread of an AMD EPYC, torch 2.13.0, 2026-11-22, ``topk(51)`` takes 320 us, maxima of 1002 blocks and ``topk`` of the 51
best of them 95 us. What follows is some 30 operators of 3 to 10 us on 50 numbers: of few rows Python does it in 15 us.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.core.facts import Facts
from layerzero.ops.sampling import formulas
from layerzero.ops.sampling.checks import check_drawable, check_signs

Few = Callable[..., Tensor | None]
"""The places that are drawn; None where more than k places have to be looked at."""

_WIDTHS = (128, 64, 32)
_BLOCKS_EACH = 4
"""Blocks for each number that is wanted, below which their maxima tell too little."""

_BY_HAND = 512
"""Numbers of all rows together that Python draws of sooner than torch."""


def by_sums(upto: Tensor, generator: torch.Generator | None, seeds: Tensor | None = None) -> Tensor:
    """The place where a random number lies among sums up to each place. Shapes: (*, V) → (*).

    The number stays below the last sum, so that the place has a weight: the first at which sums are above it.
    """
    total = upto[..., -1:]
    mark = formulas.uniform(total, generator, seeds).mul_(total).to(upto.dtype)
    mark = torch.minimum(mark, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(upto, mark.contiguous(), right=True).squeeze(-1)  # else torch warns of a copy


def largest(tensor: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of each row and their places, as ``topk`` gives them. Shapes: (*, V) → (*, count) twice.

    A number outside the blocks with the so many largest maxima is at most each of these maxima, which are as many as
    are wanted: it is none of them, or equal to the last.
    """
    vocab = tensor.shape[-1]
    width = next((each for each in _WIDTHS if vocab % each == 0), 0)
    if width == 0 or vocab < count * width * _BLOCKS_EACH:
        return tensor.topk(count)
    blocks = torch.unflatten(tensor, -1, (vocab // width, width))
    best = blocks.amax(-1).topk(count, sorted=False).indices
    own = blocks.gather(-2, best.unsqueeze(-1).expand(*best.shape, width)).flatten(-2)
    values, places = own.topk(count)
    block = places.div(width, rounding_mode="floor")
    return values, best.gather(-1, block) * width + places - block * width


def few_of(facts: Facts) -> Few | None:
    """What draws among the k largest; None where the operation has no k, or the device is no CPU."""
    name = str(facts["operation"])
    if facts.device.platform != "cpu" or not name.startswith("sampling.topk"):
        return None
    logits, shared = not name.endswith(".probs"), name.startswith("sampling.topk_topp")

    def few(
        tensor: Tensor,
        *,
        top_k: int | None = None,
        top_k_by_row: Tensor | None = None,
        top_p: float | None = None,
        top_p_by_row: Tensor | None = None,
        temperature: float | None = None,
        temperature_by_row: Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor | None:
        vocab = tensor.shape[-1]
        count = formulas.count_of(top_k, top_k_by_row, vocab)
        most = count if top_k_by_row is None else int(count.max())
        if most == vocab:
            return None
        values, order = largest(tensor, most + 1)
        if 0 < values.numel() <= _BY_HAND:
            places = _by_hand(
                values,
                _numbers(most if top_k_by_row is None else None, None if top_k_by_row is None else count, values),
                _numbers(1.0 if temperature is None else temperature, temperature_by_row, values) if logits else None,
                _numbers(top_p, top_p_by_row, values) if shared else None,
                formulas.generator_of(seed, generator, tensor.device),
            )
            if places is not None:
                return order.gather(-1, torch.tensor(places).view(*order.shape[:-1], 1)).squeeze(-1)
        last, after = formulas.nth(values, count), formulas.nth(values, count + 1)
        if bool((last == after).any()):
            return None
        if top_k_by_row is not None:
            values = values.masked_fill(values < last, -torch.inf if logits else 0.0)
        weights = formulas.probabilities(values[..., :most], temperature, temperature_by_row, logits=logits)
        upto = weights.cumsum(-1)
        total = upto[..., -1:]
        if shared:
            kept = (upto - weights < total * formulas.of_row(top_p, top_p_by_row)).sum(-1, keepdim=True).clamp_(min=1)
            weights = torch.where(weights >= formulas.nth(weights, kept), weights, 0.0)
            upto = weights.cumsum(-1)
        check_drawable(total, tensor, name)
        return order.gather(
            -1, by_sums(upto, formulas.generator_of(seed, generator, tensor.device)).unsqueeze(-1)
        ).squeeze(-1)

    return few


def _numbers(one: Any, of_rows: Tensor | None, values: Tensor) -> list[Any]:
    rows = values.numel() // values.shape[-1]
    return [one] * rows if of_rows is None else of_rows.flatten().tolist()


def _by_hand(
    values: Tensor,
    counts: list[int],
    temperatures: list[float] | None,
    shares: list[float] | None,
    generator: torch.Generator | None,
) -> list[int] | None:
    """A place among the values of each row; None where one ties, or nothing can be drawn of one: torch says more.

    Args:
        values: descending, one more than the most that any row keeps; probabilities if there are no temperatures.
    """
    sums = []
    for row, found in enumerate(values.reshape(len(counts), -1).tolist()):
        count = counts[row]
        if found[count - 1] == found[count] or not math.isfinite(found[0]):
            return None
        if temperatures is not None:
            best, divisor = found[0], min(max(temperatures[row], formulas.TEMPERATURES[0]), formulas.TEMPERATURES[1])
            weights = [math.exp((each - best) / divisor) for each in found[:count]]
        else:
            weights = found[:count]
        upto = list(itertools.accumulate(weights))
        if not 0 < upto[-1] < math.inf:
            return None
        if shares is not None:
            bound = shares[row] * upto[-1]
            kept = max(bisect.bisect_left(upto, bound) + 1, 1)  # as many as have less than the share before them
            while kept < count and weights[kept] == weights[kept - 1]:
                kept += 1
            upto = upto[:kept]
        sums.append(upto)
    marks = torch.rand(len(counts), dtype=torch.float64, generator=generator).tolist()
    return [
        min(bisect.bisect_right(upto, mark * upto[-1]), bisect.bisect_left(upto, upto[-1]))
        for upto, mark in zip(sums, marks, strict=True)
    ]


def by_race(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """The place that comes first, each at a rate of its weight. Shapes: (*, V) → (*)."""
    weights = weights.detach()  # a place has no gradient, and torch divides into no memory where one is recorded
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
        return by_race(weights, own) if seeds is None else formulas.drawn(weights, None, seeds)
    upto = weights.cumsum(-1)
    check_drawable(upto[..., -1], tensor, name)
    return by_sums(upto, own, seeds)


_FEW = 1024
"""The likeliest places that are looked at before a row is sorted: 0.5 ms of 128256 places, where a sort takes 11.7."""


def drawing(facts: Facts, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What draws of a call's rows: ``draw`` gets the tensor, its weights, a generator, and what is given besides."""
    name = str(facts["operation"])
    logits, on_cpu = not name.endswith(".probs"), facts.device.platform == "cpu"

    def run(
        tensor: Tensor,
        *,
        temperature: float | None = None,
        temperature_by_row: Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        **given: Any,
    ) -> Tensor:
        tensor = tensor.detach()
        if on_cpu:
            check_signs(tensor, name)
        weights = formulas.probabilities(tensor, temperature, temperature_by_row, logits=logits)
        return draw(tensor, weights, formulas.generator_of(seed, generator, tensor.device), **given)

    return run


def load_filtered(facts: Facts) -> Callable[..., Any]:
    """The kernel of ``sampling.filtered``."""
    name, on_cpu = str(facts["operation"]), facts.device.platform == "cpu"

    def draw(
        tensor: Tensor,
        weights: Tensor,
        own: torch.Generator | None,
        *,
        top_k: int | None = None,
        top_k_by_row: Tensor | None = None,
        top_p: float | None = None,
        top_p_by_row: Tensor | None = None,
        min_p: float | None = None,
        min_p_by_row: Tensor | None = None,
        seed_by_row: Tensor | None = None,
    ) -> Tensor:
        count = None
        if top_k is not None or top_k_by_row is not None:
            count = formulas.count_of(top_k, top_k_by_row, weights.shape[-1])
        least = _least(weights, count, formulas.of_row(top_p, top_p_by_row), on_cpu=on_cpu)
        if min_p is not None or min_p_by_row is not None:
            most = weights.amax(-1, keepdim=True)
            bound = torch.minimum(most * formulas.of_row(min_p, min_p_by_row), most)
            least = bound if least is None else torch.maximum(least, bound)
        return taken(weights, least, tensor, name, own, seed_by_row, on_cpu=on_cpu)

    return drawing(facts, draw)


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
    last = formulas.nth(values, count.clamp(max=seen).expand(*values.shape[:-1], 1))
    if share is None:
        return last if enough or bool(whole.all()) else None
    total = torch.where((weights >= last) | ~whole, weights, 0.0).cumsum(-1)[..., -1:]
    upto = values.cumsum(-1)
    if not enough and not bool((whole | ((count == vocab) & (upto[..., -1:] >= share * total))).all()):
        return None
    kept = (upto - values < share * total) & (values >= last)
    return formulas.nth(values, kept.sum(-1, keepdim=True).clamp_(min=1))
