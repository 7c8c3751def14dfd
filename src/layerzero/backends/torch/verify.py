"""Verifying drafts as torch expressions: a chain as a whole, a tree node by node.

Of a chain all tokens are tried at once, since whether one stands follows from its own two probabilities alone; how
many stand is where the first one falls, and one row of the vocabulary is looked at. Of a tree what is left for a node
depends on those beside it that fell before.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import TORCH
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.sampling.formulas import drawn, generator_of, left_over, probabilities, walked, walked_greedily
from layerzero.ops.sampling.verify import check_draft, check_target

_FLOATS = limit.dtype("float32", "float64", "float16", "bfloat16")


def ended(draft_ids: Tensor, stood: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The results of a chain by how many of it stood, and the token behind. Shapes: (B, N), (B,), (B,)."""
    places = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    length = stood.unsqueeze(-1)
    nodes = torch.where(places[:-1] < length, places[:-1], -1)
    more = torch.nn.functional.pad(draft_ids.long(), (0, 1))
    ids = torch.where(places < length, more, torch.where(places == length, token.unsqueeze(-1), -1))
    return ids, nodes


def _load_chain(facts: Facts) -> Callable[..., Any]:
    on_cpu = facts.device.platform == "cpu"

    def run(
        target_probs: Tensor,
        draft_ids: Tensor,
        *,
        draft_probs: Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        target = target_probs.detach()
        if on_cpu:
            check_target(target, "sampling.verify")
            check_draft(draft_probs, "sampling.verify")
        own = generator_of(seed, generator, target.device)
        batch, count = draft_ids.shape
        tokens = draft_ids.long().unsqueeze(-1)
        marks = torch.rand((batch, count), device=target.device, generator=own)
        if draft_probs is not None:
            marks = marks * probabilities(draft_probs.detach().gather(-1, tokens), logits=False).squeeze(-1)
        stand = marks < probabilities(target[:, :-1].gather(-1, tokens), logits=False).squeeze(-1)
        stood = stand.long().cumprod(-1).sum(-1)
        rows, fallen = torch.arange(batch, device=target.device), stood.clamp(max=max(count - 1, 0))
        left = probabilities(target[rows, stood], logits=False)
        if count:
            drafted = None if draft_probs is None else probabilities(draft_probs.detach()[rows, fallen], logits=False)
            rest = left_over(left, drafted, tokens.squeeze(-1)[rows, fallen])
            left = torch.where((stood < count).unsqueeze(-1), rest, left)
        return ended(draft_ids, stood, drawn(left, own))

    return run


def _load_tree(facts: Facts) -> Callable[..., Any]:
    on_cpu = facts.device.platform == "cpu"

    def run(
        target_probs: Tensor,
        draft_ids: Tensor,
        parents: Tensor,
        *,
        draft_probs: Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        target = probabilities(target_probs.detach(), logits=False)
        drafted = None if draft_probs is None else probabilities(draft_probs.detach(), logits=False)
        if on_cpu:
            check_target(target, "sampling.verify.tree")
            check_draft(drafted, "sampling.verify.tree")
        return walked(draft_ids, target, drafted, parents, generator_of(seed, generator, target.device))

    return run


def _load_greedy(facts: Facts) -> Callable[..., Any]:
    def run(target_probs: Tensor, draft_ids: Tensor, *, parents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        best = target_probs.detach().argmax(-1)
        if parents is not None:
            return walked_greedily(draft_ids, best, parents)
        stood = (draft_ids == best[:, :-1]).long().cumprod(-1).sum(-1)
        return ended(draft_ids, stood, best.gather(-1, stood.unsqueeze(-1)).squeeze(-1))

    return run


KERNELS = tuple(
    Kernel(
        id=name,
        operations=(operation,),
        backend=TORCH,
        load=load,
        accepts=accepts,
        limits=(_FLOATS,),
        grad=True,
        graph_safe=name == "torch.verify_greedy",  # a captured draw of a seed would draw the same on each replay
        handles_negated=True,
        priority=40,
    )
    for name, operation, load, accepts in (
        ("torch.verify", "sampling.verify", _load_chain, ("draft_probs", "seed", "generator")),
        ("torch.verify_tree", "sampling.verify.tree", _load_tree, ("draft_probs", "seed", "generator")),
        ("torch.verify_greedy", "sampling.verify.greedy", _load_greedy, ("parents",)),
    )
)
