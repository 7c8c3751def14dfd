"""Formulas of sampling: what may be drawn of a row, what is done to logits, and which drafted tokens stand.

A draw gives the same bits on every device. Which places are kept follows from their values alone, so that equal values
are kept or dropped together:

top-k   as long as fewer than k places are likelier
top-p   as long as the places that are likelier have less than the share p of the row together
min-p   from the share p of the likeliest place upwards

The likeliest place is always kept. Shares are integers here, parts of 2^52: sums of them are exact in any order, while
torch adds up floating numbers on a GPU in an order of its own and refuses to where it has to be deterministic.

Penalties and biases are computed in the dtype that logits are given in.

Drafted tokens are walked over from the root of their tree. A node is tried if its parent was the last to stand. It
stands with probability min(1, p / q), p what the target gives its token and q what the draft gave it, 1 where the draft
was certain. Where it falls, max(p - q, 0) is left for its siblings, brought to a sum of 1; where none of them
stands, the next token is drawn of what is left. So tokens come as the target alone would draw them (arXiv:2211.17192,
arXiv:2302.01318; of trees arXiv:2305.09781).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WHOLE = 2.0**52
"""The parts of a row of probabilities together: float64 has them all, and int64 has room for their rounding."""

Rule = Callable[..., Tensor]
"""Which places of a row are kept, by the arguments of a call."""


TEMPERATURES = (1e-6, 1e6)
"""What logits may be divided by: less leaves nothing of a difference but which is larger, more nothing of it."""


def probabilities(
    tensor: Tensor, temperature: float | None = None, temperature_by_row: Tensor | None = None, *, logits: bool
) -> Tensor:
    """Probabilities of logits or of what is said to be some, in float32 or wider."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return tempered(wide, temperature, temperature_by_row).softmax(-1) if logits else wide


def tempered(logits: Tensor, temperature: float | None = None, temperature_by_row: Tensor | None = None) -> Tensor:
    """Logits divided by a temperature, or each row by its own."""
    if temperature_by_row is not None:
        return logits / temperature_by_row.clamp(*TEMPERATURES).unsqueeze(-1)
    return logits if temperature is None else logits / temperature


def parts(weights: Tensor) -> Tensor:
    """Shares of a row in integers; none where the row adds up to nothing, or has a NaN."""
    wide = weights.to(torch.float64)
    return (wide / wide.sum(-1, keepdim=True) * WHOLE).nan_to_num(0.0).round().long()


def of_row(value: float | None, of_rows: Tensor | None) -> Any:
    """A parameter as it is compared with rows: a number, or a number for each."""
    return value if of_rows is None else of_rows.unsqueeze(-1)


def count_of(top_k: int | None, of_rows: Tensor | None, vocab: int) -> Any:
    """How many places are wanted, from 1 to as many as there are."""
    if of_rows is None:
        return vocab if top_k is None else min(top_k, vocab)
    return of_rows.long().clamp(1, vocab).unsqueeze(-1)


def nth(values: Tensor, count: Any) -> Tensor:
    """The last of the first so many values of each row; ``values`` descend. Shapes: (*, V) → (*, 1)."""
    if isinstance(count, Tensor):
        return values.gather(-1, count - 1)
    return values[..., count - 1 : count]


def keep_top_k(
    weights: Tensor, top_k: int | None = None, top_k_by_row: Tensor | None = None, near: float = 0.0
) -> Tensor:
    """The places of which fewer than k are likelier. ``near`` takes those that are almost as likely along."""
    count = count_of(top_k, top_k_by_row, weights.shape[-1])
    return weights >= nth(weights.sort(-1, descending=True).values, count) * (1 - near)


def keep_top_p(
    weights: Tensor,
    top_p: float | None = None,
    top_p_by_row: Tensor | None = None,
    slack: float = 0.0,
    near: float = 0.0,
) -> Tensor:
    """The places where those that are likelier have less than p of the row together; ``slack`` is added to p."""
    values = weights.sort(-1, descending=True).values
    return weights >= nth(values, reach(parts(values), of_row(top_p, top_p_by_row), slack)) * (1 - near)


def reach(shares: Tensor, p: Any, slack: float = 0.0) -> Tensor:
    """How many places of a row have less than p of it before them, at least one; ``shares`` descend. → (*, 1)."""
    upto = shares.cumsum(-1)
    bound: Tensor = (p + slack) * upto[..., -1:].double()
    return ((upto - shares).double() < bound).sum(-1, keepdim=True).clamp_(min=1)


def keep_min_p(
    weights: Tensor, min_p: float | None = None, min_p_by_row: Tensor | None = None, slack: float = 0.0
) -> Tensor:
    """The places that are at least p times as likely as the likeliest; ``slack`` is a share of that bound."""
    most = weights.amax(-1, keepdim=True)
    return weights >= torch.minimum(most * of_row(min_p, min_p_by_row) * (1 + slack), most)


def generator_of(seed: int | None, generator: torch.Generator | None, device: torch.device) -> torch.Generator | None:
    """What a call draws from: one of its seed, the caller's, or torch's own of the device."""
    return generator if seed is None else torch.Generator(device).manual_seed(seed)


def keep_all_three(
    weights: Tensor,
    top_k: int | None = None,
    top_k_by_row: Tensor | None = None,
    top_p: float | None = None,
    top_p_by_row: Tensor | None = None,
    min_p: float | None = None,
    min_p_by_row: Tensor | None = None,
) -> Tensor:
    """The places that top-k keeps, then top-p of these, then min-p; what is None keeps all."""
    kept = torch.ones_like(weights, dtype=torch.bool)
    if top_k is not None or top_k_by_row is not None:
        kept = keep_top_k(weights, top_k, top_k_by_row)
    if top_p is not None or top_p_by_row is not None:
        kept = kept & keep_top_p(weights * kept, top_p, top_p_by_row)
    if min_p is not None or min_p_by_row is not None:
        kept = kept & keep_min_p(weights, min_p, min_p_by_row)
    return kept


def uniform_of(seeds: Tensor, number: int = 0) -> Tensor:
    """The random number from 0 to below 1 that a seed stands for, and others by ``number``. (*) int64 → (*) float64.

    SplitMix64 (Steele, Lea, Flood, 2014) in integers that wrap around: the same bits on every device.
    """
    mixed = seeds + _wrapped(0x9E3779B97F4A7C15 * (number + 1))
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> bits & (1 << 64 - bits) - 1)) * _wrapped(factor)
    return (mixed >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def uniform(like: Tensor, generator: torch.Generator | None, seeds: Tensor | None = None, number: int = 0) -> Tensor:
    """A random number in float64 for each entry, or for each row by its seed. Shapes: (*, 1), seeds (*) → (*, 1)."""
    if seeds is not None:
        return uniform_of(seeds, number).unsqueeze(-1)
    return torch.rand(like.shape, dtype=torch.float64, device=like.device, generator=generator)


def drawn(weights: Tensor, generator: torch.Generator | None, seeds: Tensor | None = None, number: int = 0) -> Tensor:
    """A place of each row by its weight. Shapes: (*, V) → (*) int64. Some place of rows that add up to nothing."""
    return place(parts(weights).cumsum(-1), generator, seeds, number)


def place(upto: Tensor, generator: torch.Generator | None, seeds: Tensor | None = None, number: int = 0) -> Tensor:
    """The place where a random part of a row lies, given the parts up to each place. Shapes: (*, V) → (*)."""
    total = upto[..., -1:]
    part = (uniform(total, generator, seeds, number) * total.double()).long()
    return (
        torch.searchsorted(upto.contiguous(), part.contiguous(), right=True).clamp_(max=upto.shape[-1] - 1).squeeze(-1)
    )


def counts_of(ids: Tensor, vocab: int) -> Tensor:
    """How often each place is among token ids; -1 is none. Shapes: (*, L) → (*, V) int32."""
    counts = ids.new_zeros((*ids.shape[:-1], vocab), dtype=torch.int32)  # batched where torch.vmap batches the ids
    if vocab == 0:
        return counts
    return counts.scatter_add_(-1, ids.clamp(min=0).long(), (ids >= 0).int())


def penalised(logits: Tensor, seen: Tensor, counts: Tensor, repetition: Any, presence: Any, frequency: Any) -> Tensor:
    """Logits of places that were seen nearer to minus infinity; None of the three does nothing.

    Repetition divides what is above 0 and multiplies what is below (arXiv:1909.05858); frequency is taken off for each
    time that a place was said, presence once (the OpenAI interface).
    """
    if repetition is not None:
        less = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, less, logits)
    if frequency is not None:
        logits = _less(logits, frequency, counts)
    if presence is not None:
        logits = _less(logits, presence, counts > 0)
    return logits


def _less(logits: Tensor, by: Any, times: Tensor) -> Tensor:
    """Less a number, or one of each row, so many times. Numbers times counts would be of torch's default dtype."""
    times = times.to(logits.dtype)
    return logits - by * times if isinstance(by, Tensor) else logits.sub(times, alpha=by)


def biased(logits: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
    """Add numbers to places of logits, in place; -1 is none, whatever its number. Shapes: (*, V), (*, n), (*, n)."""
    added = bias.masked_fill(ids < 0, 0.0).to(logits.dtype)
    return logits.scatter_add_(-1, ids.clamp(min=0).long(), added)


_ROUNDED = 1e-6
"""What rows that add up to 1 in float32 may lack of it."""


def chain_of(draft_ids: Tensor) -> Tensor:
    """The parents of a chain: each token follows the one before it, the first follows what was there."""
    return torch.arange(-1, draft_ids.shape[1] - 1, device=draft_ids.device).expand_as(draft_ids)


def left_over(probs: Tensor, drafted: Tensor | None, token: Tensor) -> Tensor:
    """What is left of probabilities when a drafted token fell. Shapes: (B, V), (B, V), (B,) → (B, V)."""
    rest = probs.scatter(-1, token.unsqueeze(-1), 0.0) if drafted is None else (probs - drafted).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, probs)  # rounding alone lets a token fall where nothing is left


def walked(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    parents: Tensor,
    generator: torch.Generator | None,
    lens: Tensor | None = None,
    seeds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens that are said, and the nodes that stood; -1 behind them.

    Shapes: (B, N), (B, N + 1, V), (B, N, V), (B, N), lens (B,), seeds (B,) → (B, N + 1), (B, N) int64
    """
    batch, count = draft_ids.shape
    rows = torch.arange(batch, device=draft_ids.device)
    marks = marks_of(draft_ids, target_probs.dtype, generator, seeds)
    parents = parents if lens is None else parents.masked_fill(~within(draft_ids, lens), BEHIND)
    draft_ids = tokens_of(draft_ids, lens)
    ids = draft_ids.new_full((batch, count + 1), -1, dtype=torch.int64)
    nodes = draft_ids.new_full((batch, count), -1, dtype=torch.int64)
    last, depth = torch.full_like(rows, -1), torch.zeros_like(rows)
    left = target_probs[:, 0]
    for node in range(count):
        token = draft_ids[:, node]
        own = None if draft_probs is None else draft_probs[:, node]
        asked = marks[:, node] if own is None else marks[:, node] * own[rows, token]
        tried = parents[:, node] == last
        stands = tried & (asked < left[rows, token])
        rest = torch.where((tried & ~stands).unsqueeze(-1), left_over(left, own, token), left)
        left = torch.where(stands.unsqueeze(-1), target_probs[:, node + 1], rest)
        _put(ids, depth, stands, token)
        _put(nodes, depth, stands, torch.full_like(token, node))
        last, depth = torch.where(stands, node, last), depth + stands
    ids[rows, depth] = drawn(left, generator, seeds, NEXT)
    return ids, nodes


BEHIND = -2
"""The parent of a node that no draft has: the walk is never there."""

NEXT = -2
"""The number of the draw behind a draft; those of its nodes are from 1 up, whatever other rows have."""


def within(draft_ids: Tensor, lens: Tensor) -> Tensor:
    """Which nodes are among the first so many of their row. Shapes: (B, N), (B,) → (B, N)."""
    return torch.arange(draft_ids.shape[1], device=draft_ids.device) < lens.unsqueeze(-1)


def tokens_of(draft_ids: Tensor, lens: Tensor | None) -> Tensor:
    """The drafted tokens; 0 behind those of a row, where numbers may stand that are no token, such as -1."""
    return (draft_ids if lens is None else draft_ids.masked_fill(~within(draft_ids, lens), 0)).long()


def marks_of(draft_ids: Tensor, dtype: torch.dtype, generator: torch.Generator | None, seeds: Tensor | None) -> Tensor:
    """A random number for each node, by its row's seed where there is one. Shapes: (B, N), seeds (B,) → (B, N)."""
    if seeds is None:
        return torch.rand(draft_ids.shape, dtype=dtype, device=draft_ids.device, generator=generator)
    made = [uniform_of(seeds, node + 1) for node in range(draft_ids.shape[1])]  # 0 is that of lz.sample: of the draft
    return torch.stack(made, -1) if made else draft_ids.double()


def _put(lists: Tensor, place: Tensor, where: Tensor, value: Tensor) -> None:
    if lists.shape[1]:
        at = place.clamp(max=lists.shape[1] - 1).unsqueeze(-1)
        lists.scatter_(1, at, torch.where(where, value, lists.gather(1, at).squeeze(1)).unsqueeze(-1))


def walked_greedily(
    draft_ids: Tensor, best: Tensor, parents: Tensor, lens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same where a node stands if its token is the target's likeliest. Shapes: (B, N), (B, N + 1), (B, N)."""
    batch, count = draft_ids.shape
    parents = parents if lens is None else parents.masked_fill(~within(draft_ids, lens), BEHIND)
    rows = torch.arange(batch, device=draft_ids.device)
    ids = draft_ids.new_full((batch, count + 1), -1, dtype=torch.int64)
    nodes = draft_ids.new_full((batch, count), -1, dtype=torch.int64)
    last, depth = torch.full_like(rows, -1), torch.zeros_like(rows)
    for node in range(count):
        token = draft_ids[:, node].long()
        stands = (parents[:, node] == last) & (token == best[rows, last + 1])
        _put(ids, depth, stands, token)
        _put(nodes, depth, stands, torch.full_like(token, node))
        last, depth = torch.where(stands, node, last), depth + stands
    ids[rows, depth] = best[rows, last + 1]
    return ids, nodes


def chances(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    parents: Tensor,
    near: float = 0.0,
    lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """How often each place of the results is which token, or which node; first how often it is -1.

    Args:
        near: how far a share may be from 1, and a probability from the drafted one, to differ from it.
    Shapes: as ``walked`` → (B, N + 1, V + 1), (B, N, N + 1)
    """
    batch, count = draft_ids.shape
    vocab = target_probs.shape[-1]
    rows = torch.arange(batch, device=draft_ids.device)
    ids = target_probs.new_zeros((batch, count + 1, vocab + 1))
    nodes = target_probs.new_zeros((batch, count, count + 1))
    left = target_probs.clone()  # behind each node, the root first
    reach, stay = (target_probs.new_full((batch, count + 1), value) for value in (0.0, 1.0))
    reach[:, 0] = 1
    depths = torch.zeros((batch, count + 1), dtype=torch.int64, device=draft_ids.device)
    draft_ids = tokens_of(draft_ids, lens)
    for node in range(count):
        above, token = parents[:, node].long() + 1, draft_ids[:, node]
        known = above <= node  # where its parent comes later, the walk never comes back to it
        if lens is not None:
            known = known & (node < lens)
        above = above.clamp(max=node)
        own = None if draft_probs is None else draft_probs[:, node]
        before = left[rows, above]
        share = before[rows, token] / (1.0 if own is None else own[rows, token].clamp(min=1e-300))
        sure = share.clamp(max=1.0)
        share = torch.where((share - 1).abs() <= near, 1 - near, sure) if near else sure
        depths[:, node + 1] = depths[rows, above] + 1
        reach[:, node + 1] = reach[rows, above] * stay[rows, above] * share * known
        ids[rows, depths[rows, above], token + 1] += reach[:, node + 1]
        nodes[rows, depths[rows, above], node + 1] += reach[:, node + 1]
        stay[rows, above] *= torch.where(known, 1 - share, 1.0)
        fallen = left_over(before, None if own is None else own * (1 - near), token)
        left[rows, above] = torch.where(known.unsqueeze(-1), fallen, before)
    left = left / left.sum(-1, keepdim=True)  # rows of narrow dtypes add up to 1 but for their rounding
    for node in range(count + 1):
        ids[rows, depths[:, node], 1:] += (reach[:, node] * stay[:, node]).unsqueeze(-1) * left[:, node]
    for found in (ids, nodes):
        nothing = 1 - found[..., 1:].sum(-1)
        found[..., 0] = torch.where(nothing < _ROUNDED, 0.0, nothing)
    return ids, nodes
