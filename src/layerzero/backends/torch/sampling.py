"""Draws of places as torch expressions, without a sort where none is needed.

``torch.sample`` finds the smallest value that is kept, by ``topk`` or by the maximum, and draws among those from it
upwards. ``torch.sample_topp`` sorts nothing: it draws of the whole row, and again where the places that are likelier
than what it drew have the share p already, each time among likelier places only. That is no approximation: a draw
that is thrown away until it lies among what is kept has the probabilities of what is kept. ``torch.sample_sorted``
sorts, as everybody does; it waits for nothing, and serves devices on which ``torch.sample_topp`` would.

Where a place is drawn: on a CPU by one random number a row and sums up to each place, since a random number for each
place costs 20 times as much (2.9 ms for 128256 of them, 0.13 for the sums); elsewhere by the largest of w / e, with e
exponentially distributed, since torch refuses floating sums there where it has to be deterministic.

A row of 128256 places, one thread of an AMD EPYC, torch 2.13.0, 2026-11-22: a sort takes 11.7 ms, ``torch.multinomial``
3.3 ms, ``topk(50)`` 0.3 ms, a mask and its sums 0.35 ms.

The place of a maximum as torch expressions.

torch's argmax compares one number after the other, its amax uses vectors: 201 and 11 us for 128256 float32 numbers, one
thread of an AMD EPYC, torch 2.13.0, 2026-11-22. So on a CPU the maxima of blocks are found first, then the first block
that has the largest, and its first place in there; NaN is larger than any number for both.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FLOATS, kernel
from layerzero.backends.torch.sampling_filters import by_sums, drawing, few_of, load_filtered, taken
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.sampling.checks import check_drawable, check_signs
from layerzero.ops.sampling.formulas import count_of, nth, of_row, parts, place, reach

_TINY = torch.finfo(torch.float32).tiny


def _kind(facts: Facts) -> tuple[str, str]:
    """The operation's name, and what it keeps."""
    name = str(facts["operation"])
    return name, name.split(".")[1]


def _threshold(kind: str) -> Callable[..., Tensor | None]:
    """What finds the smallest value that is kept, None where all are. Shapes: (*, V) → (*, 1)."""

    def of_count(weights: Tensor, top_k: int | None = None, top_k_by_row: Tensor | None = None) -> Tensor | None:
        count = count_of(top_k, top_k_by_row, weights.shape[-1])
        most = count if top_k_by_row is None else int(count.max())
        return None if most == weights.shape[-1] and top_k_by_row is None else nth(weights.topk(most).values, count)

    def of_likeliest(weights: Tensor, min_p: float | None = None, min_p_by_row: Tensor | None = None) -> Tensor:
        most = weights.amax(-1, keepdim=True)
        return torch.minimum(most * of_row(min_p, min_p_by_row), most)

    def top_k_top_p(
        weights: Tensor,
        top_k: int | None = None,
        top_k_by_row: Tensor | None = None,
        top_p: float | None = None,
        top_p_by_row: Tensor | None = None,
    ) -> Tensor:
        count = count_of(top_k, top_k_by_row, weights.shape[-1])
        values = weights.topk(count if top_k_by_row is None else int(count.max())).values
        last = nth(values, count)
        total = torch.where(weights >= last, weights, 0.0).sum(-1, keepdim=True)  # what ties with the last is kept, too
        before = values.cumsum(-1) - values
        kept = (before < of_row(top_p, top_p_by_row) * total) & (values >= last)
        return nth(values, kept.sum(-1, keepdim=True).clamp_(min=1))

    def none(weights: Tensor) -> None:
        return None

    ways: dict[str, Callable[..., Tensor | None]] = {
        "categorical": none,
        "topk": of_count,
        "minp": of_likeliest,
        "topk_topp": top_k_top_p,
    }
    return ways[kind]


def _load_sample(facts: Facts) -> Callable[..., Any]:
    name, kind = _kind(facts)
    threshold, few, on_cpu = _threshold(kind), few_of(facts), facts.device.platform == "cpu"

    def draw(tensor: Tensor, weights: Tensor, own: torch.Generator | None, **given: Any) -> Tensor:
        return taken(weights, threshold(weights, **given), tensor, name, own, on_cpu=on_cpu)

    of_all = drawing(facts, draw)
    if few is None:
        return of_all

    def run(tensor: Tensor, **given: Any) -> Tensor:
        check_signs(tensor.detach(), name)
        found = few(tensor.detach(), **given)
        return of_all(tensor, **given) if found is None else found

    return run


def _load_topp(facts: Facts) -> Callable[..., Any]:
    name, _ = _kind(facts)

    def draw(
        tensor: Tensor,
        weights: Tensor,
        own: torch.Generator | None,
        *,
        top_p: float | None = None,
        top_p_by_row: Tensor | None = None,
    ) -> Tensor:
        weights = weights.reshape(-1, weights.shape[-1])
        upto = weights.cumsum(-1)
        check_drawable(upto[:, -1], tensor, name)
        share = of_row(top_p, None if top_p_by_row is None else top_p_by_row.reshape(-1))
        bound = (upto[:, -1:] * share).clamp_(min=_TINY)
        found = by_sums(upto, own)
        low, again = _beyond(weights, found, bound)
        rows = torch.arange(len(weights))
        while again.any():
            rows, weights, bound, low = rows[again], weights[again], bound[again], low[again]
            drawn = by_sums(torch.where(weights > low, weights, 0.0).cumsum(-1), own)
            found[rows] = drawn
            low, again = _beyond(weights, drawn, bound)
        return found.reshape(tensor.shape[:-1])

    return drawing(facts, draw)


def _beyond(weights: Tensor, found: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of what was drawn, and where those that are likelier reach the bound, so that it is not kept."""
    low = weights.gather(-1, found.unsqueeze(-1))
    likelier = torch.where(weights > low, weights, 0.0).sum(-1, keepdim=True)
    return low, (likelier >= bound).squeeze(-1)


def _load_sorted(facts: Facts) -> Callable[..., Any]:
    name, kind = _kind(facts)
    on_cpu, vocab = facts.device.platform == "cpu", facts.size("vocab")

    def draw(
        tensor: Tensor,
        weights: Tensor,
        own: torch.Generator | None,
        *,
        top_k: int | None = None,
        top_k_by_row: Tensor | None = None,
        top_p: float | None = None,
        top_p_by_row: Tensor | None = None,
    ) -> Tensor:
        values, order = weights.sort(-1, descending=True)
        shares = parts(values)
        if kind != "topp":
            shares = shares * (values >= nth(values, count_of(top_k, top_k_by_row, vocab)))
        if kind != "topk":
            shares = shares * (values >= nth(values, reach(shares, of_row(top_p, top_p_by_row))))
        upto = shares.cumsum(-1)
        if on_cpu:
            check_drawable(upto[..., -1], tensor, name)
        return order.gather(-1, place(upto, own).unsqueeze(-1)).squeeze(-1)

    return drawing(facts, draw)


def _random_in_capture(facts: Facts) -> Reason | None:
    """A graph draws from torch's own generator only: it knows how far to move that one on each replay."""
    given = next((name for name in ("seed", "generator") if facts[name] != "none"), None)
    if not facts["capturing"] or given is None:
        return None
    return Reason(ReasonCode.CUDA_GRAPH_UNSAFE, given, "none inside a capture, which keeps torch's own", "given")


_RANDOM = ("temperature", "temperature_by_row", "seed", "generator")
_CAPTURE = limit.Custom("no seed and no generator inside a capture", _random_in_capture)


_COUNTED = (
    _CAPTURE,
    # how many of the largest are wanted has to be known: reading it from a device means waiting
    limit.rule(
        "top_k_by_row: none but on a CPU",
        lambda facts: facts.device.platform == "cpu" or facts.get("top_k_by_row", "none") == "none",
    ),
)


def _sampler(
    name: str, kind: str, load: Callable[[Facts], Callable[..., Any]], *limits: limit.Limit, of: str = "", priority: int
) -> Kernel:
    """A kernel that takes numbers for all rows or one for each; ``of`` names them."""
    accepts = [each for number in of.split() for each in (number, f"{number}_by_row")]
    return kernel(
        f"torch.{name}",
        (f"sampling.{kind}", f"sampling.{kind}.probs"),
        load,
        limits=(FLOATS, *limits),
        accepts=(*accepts, *_RANDOM),
        grad=True,
        handles_negated=True,
        priority=priority,
    )


_BLOCKS = (256, 128, 64)


def _load(facts: Facts) -> Callable[..., Any]:
    argmax = torch.argmax

    def run(logits: Tensor) -> Tensor:
        return argmax(logits.detach(), -1)

    return run


def _load_blocks(facts: Facts) -> Callable[..., Any]:
    vocab = facts.size("vocab")
    width = next(each for each in _BLOCKS if vocab % each == 0)
    shape = (vocab // width, width)

    def run(logits: Tensor) -> Tensor:
        blocks = torch.unflatten(logits.detach(), -1, shape)
        first = blocks.amax(-1).argmax(-1, keepdim=True)
        own = blocks.gather(-2, first.unsqueeze(-1).expand(*first.shape, width)).squeeze(-2)
        return own.argmax(-1).add_(first.squeeze(-1), alpha=width)

    return run


def _seeded(facts: Facts) -> bool:
    """With a seed for each row a draw follows from its own row; GPUs sum a row alone in another order."""
    return facts["seed_by_row"] != "none" and facts.device.platform == "cpu"


KERNELS = (
    _sampler("sample", "categorical", _load_sample, _CAPTURE, priority=45),
    _sampler("sample_topk", "topk", _load_sample, *_COUNTED, of="top_k", priority=45),
    _sampler("sample_minp", "minp", _load_sample, _CAPTURE, of="min_p", priority=45),
    _sampler("sample_topk_topp", "topk_topp", _load_sample, *_COUNTED, of="top_k top_p", priority=45),
    kernel(
        "torch.sample_filtered",
        ("sampling.filtered", "sampling.filtered.probs"),
        load_filtered,
        limits=(FLOATS, _CAPTURE),
        accepts=("top_k", "top_k_by_row", "top_p", "top_p_by_row", "min_p", "min_p_by_row", "seed_by_row", *_RANDOM),
        grad=True,
        batch_invariant=_seeded,
        tp_invariant=_seeded,
        handles_negated=True,
        priority=45,
    ),
    _sampler("sample_topp", "topp", _load_topp, limit.platform("cpu"), of="top_p", priority=45),
    _sampler("sorted_topk", "topk", _load_sorted, _CAPTURE, of="top_k", priority=40),
    _sampler("sorted_topp", "topp", _load_sorted, _CAPTURE, of="top_p", priority=40),
    _sampler("sorted_topk_topp", "topk_topp", _load_sorted, _CAPTURE, of="top_k top_p", priority=40),
    *(
        kernel(
            name,
            "sampling.greedy",
            load,
            limits=(FLOATS, *limits),
            grad=True,
            handles_negated=True,
            priority=priority,
            stock=True,  # blocks as well: other functions of torch, and the same place
        )
        for name, load, limits, priority in (
            ("torch.greedy", _load, (), 40),
            (
                "torch.greedy_blocks",
                _load_blocks,
                (limit.platform("cpu"), limit.dim("vocab", multiple=_BLOCKS[-1])),
                45,
            ),
        )
    ),
)
