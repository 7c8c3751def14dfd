"""Penalties, biases and log-probabilities as torch expressions that touch no more of a row than they change or need.

``torch.penalties`` copies the logits and works out new values for the places that were said alone, where the expression
of engines, ``torch.penalties_whole``, makes four passes over whole rows in fewer launches: 207 us for 276 at one row of
128256 places, 997 for 392 at 256 (H200, torch 2.11, 2026-11-22). ``torch.logprobs`` needs the sum of a row and one
number, and writes none of the others.

Verifying drafts as torch expressions: a chain as a whole, a tree node by node.

Of a chain all tokens are tried at once, since whether one stands follows from its own two probabilities alone; how many
stand is where the first one falls, and one row of the vocabulary is looked at. Of a tree what is left for a node
depends on its siblings that fell before.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import BY_ITSELF, FLOATS, TORCH, always, kernel, no_atomics
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.sampling import formulas
from layerzero.ops.sampling.checks import check_draft, check_target
from layerzero.ops.sampling.logits import BIAS, COUNTED, PENALTIES_BY
from layerzero.ops.sampling.request_state import BITMASK
from layerzero.ops.sampling.verify import TREE

_NUMBERS = tuple(each.name for each in PENALTIES_BY)
_BY = (*_NUMBERS, *(f"{name}_by_row" for name in _NUMBERS))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _values(given: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(formulas.of_row(given.get(name), given.get(f"{name}_by_row")) for name in _NUMBERS)


def _penalties(logits: Tensor, output_ids: Tensor, *, prompt_ids: Tensor | None = None, **given: Any) -> Tensor:
    vocab = logits.shape[-1]
    counts = seen = formulas.counts_of(output_ids, vocab)
    places = output_ids.clamp(min=0).long()
    if prompt_ids is not None:
        seen = seen + formulas.counts_of(prompt_ids, vocab)
        places = torch.cat((places, prompt_ids.clamp(min=0).long()), -1)
    own = _wide(logits.gather(-1, places))
    less = formulas.penalised(own, seen.gather(-1, places) > 0, counts.gather(-1, places), *_values(given))
    # a place that is named twice gets one value twice, and the place 0 of what is none that which it should have
    return logits.scatter(-1, places, less.to(logits.dtype))


def _whole_rows(logits: Tensor, output_ids: Tensor, *, prompt_ids: Tensor | None = None, **given: Any) -> Tensor:
    counts = formulas.counts_of(output_ids, logits.shape[-1])
    seen = counts > 0
    if prompt_ids is not None:
        seen = seen | (formulas.counts_of(prompt_ids, logits.shape[-1]) > 0)
    return formulas.penalised(_wide(logits), seen, counts, *_values(given)).to(logits.dtype, copy=True)


_PIECE = 2**14
"""Places of a row that one thread adds up: torch shares the sum of 32,768 and more out where the row is alone."""


def _logprobs(
    logits: Tensor, ids: Tensor, *, temperature: float | None = None, temperature_by_row: Tensor | None = None
) -> Tensor:
    wide = formulas.tempered(_wide(logits), temperature, temperature_by_row)
    top = wide.detach().amax(-1, keepdim=True)  # taken off first: at 2e7 one step of float32 is 2
    own = wide.gather(-1, ids.long().unsqueeze(-1)) - top
    shares = (wide - top).exp().contiguous()  # rows that lie apart are summed in another order
    if shares.device.type == "cpu" and shares.shape[-1] > _PIECE:
        shares = torch.stack([piece.sum(-1) for piece in torch.split(shares, _PIECE, -1)], -1)
    return (own - shares.sum(-1, keepdim=True).log()).squeeze(-1).float()


def _by_one(facts: Facts) -> bool:
    """Each sum is one thread's on a CPU; elsewhere its order follows from the batch."""
    return facts.device.platform == "cpu"


_MADE = tuple(
    kernel(
        name,
        operation,
        always(run),
        FLOATS,
        accepts=accepts,
        grad=name != "torch.penalties",  # torch adds up the gradient of a place once for each time it is named
        handles_negated=True,
        priority=30 if name == "torch.penalties_whole" else 40,
        **BY_ITSELF | ({"batch_invariant": _by_one} if name == "torch.logprobs" else {}),
    )
    for name, operation, run, accepts in (
        ("torch.penalties", "sampling.penalties", _penalties, ("prompt_ids", *_BY)),
        ("torch.penalties_whole", "sampling.penalties", _whole_rows, ("prompt_ids", *_BY)),
        ("torch.logprobs", "sampling.logprobs", _logprobs, ("temperature", "temperature_by_row")),
    )
)
_EXPRESSED: dict[str, Any] = {"backend": TORCH, "limits": (FLOATS,), "handles_negated": True, "priority": 40}


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
        draft_lens: Tensor | None = None,
        seed: int | None = None,
        seed_by_row: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        target = target_probs.detach()
        if on_cpu:
            check_target(target, "sampling.verify", draft_lens)
            check_draft(draft_probs, "sampling.verify", draft_lens)
        own = formulas.generator_of(seed, generator, target.device)
        batch, count = draft_ids.shape
        tokens = formulas.tokens_of(draft_ids, draft_lens).unsqueeze(-1)
        marks = formulas.marks_of(draft_ids, torch.float32, own, seed_by_row)
        if draft_probs is not None:
            marks = marks * formulas.probabilities(draft_probs.detach().gather(-1, tokens), logits=False).squeeze(-1)
        stand = marks < formulas.probabilities(target[:, :-1].gather(-1, tokens), logits=False).squeeze(-1)
        if draft_lens is not None:
            stand = stand & formulas.within(draft_ids, draft_lens)
        stood = stand.long().cumprod(-1).sum(-1)
        rows, fallen = torch.arange(batch, device=target.device), stood.clamp(max=max(count - 1, 0))
        left = formulas.probabilities(target[rows, stood], logits=False)
        if count:
            drafted = None
            if draft_probs is not None:
                drafted = formulas.probabilities(draft_probs.detach()[rows, fallen], logits=False)
            rest = formulas.left_over(left, drafted, tokens.squeeze(-1)[rows, fallen])
            left = torch.where((stood < (count if draft_lens is None else draft_lens)).unsqueeze(-1), rest, left)
        return ended(draft_ids, stood, formulas.drawn(left, own, seed_by_row, formulas.NEXT))

    return run


def _greedy(
    target_probs: Tensor, draft_ids: Tensor, *, parents: Tensor | None = None, draft_lens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    best = target_probs.detach().argmax(-1)
    if parents is not None:
        return formulas.walked_greedily(draft_ids, best, parents, draft_lens)
    stand = draft_ids == best[:, :-1]
    if draft_lens is not None:
        stand = stand & formulas.within(draft_ids, draft_lens)
    stood = stand.long().cumprod(-1).sum(-1)
    return ended(draft_ids, stood, best.gather(-1, stood.unsqueeze(-1)).squeeze(-1))


_OF_DRAFTS = ("draft_probs", "draft_lens", "seed", "seed_by_row", "generator")

KERNELS = (
    *_MADE,
    Kernel.of_expression(
        COUNTED, id="torch.penalties_counted", accepts=("prompt_mask", *_BY), **_EXPRESSED, **BY_ITSELF
    ),
    Kernel.of_expression(
        BIAS, id="torch.logit_bias", batch_invariant=no_atomics, tp_invariant=no_atomics, **_EXPRESSED
    ),  # a place that is named twice
    Kernel.of_expression(BITMASK, id="torch.token_bitmask", **_EXPRESSED),
    *(
        kernel(
            name,
            operation,
            load,
            FLOATS,
            accepts=accepts,
            grad=True,
            graph_safe=name == "torch.verify_greedy",  # a captured draw of a seed would draw the same on each replay
            handles_negated=True,
            priority=40,
        )
        for name, operation, load, accepts in (
            ("torch.verify", "sampling.verify", _load_chain, _OF_DRAFTS),
            ("torch.verify_tree", TREE.name, always(TREE.reference), _OF_DRAFTS),
            ("torch.verify_greedy", "sampling.verify.greedy", always(_greedy), ("parents", "draft_lens")),
        )
    ),
)
