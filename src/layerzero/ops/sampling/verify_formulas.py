"""Which of the drafted tokens stand: the walk from the root over a tree of them, and how often it ends where.

A node is tried if its parent was the last to stand. It stands with probability min(1, p / q), p what the target gives
its token and q what the draft gave it, 1 where the draft was certain. Where it falls, max(p - q, 0) is left for the
nodes beside it, brought to a sum of 1; where none of them stands, the next token is drawn of what is left. So tokens
come as the target alone would draw them (arXiv:2211.17192, arXiv:2302.01318; of trees arXiv:2305.09781).
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops.sampling.formulas import drawn

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
) -> tuple[Tensor, Tensor]:
    """The tokens that are said, and the nodes that stood; -1 behind them.

    Shapes: (B, N), (B, N + 1, V), (B, N, V), (B, N) → (B, N + 1), (B, N) int64
    """
    batch, count = draft_ids.shape
    rows = torch.arange(batch, device=draft_ids.device)
    marks = torch.rand((batch, count), dtype=target_probs.dtype, device=draft_ids.device, generator=generator)
    ids = draft_ids.new_full((batch, count + 1), -1, dtype=torch.int64)
    nodes = draft_ids.new_full((batch, count), -1, dtype=torch.int64)
    last, depth = torch.full_like(rows, -1), torch.zeros_like(rows)
    left = target_probs[:, 0]
    for node in range(count):
        token = draft_ids[:, node].long()
        own = None if draft_probs is None else draft_probs[:, node]
        asked = marks[:, node] if own is None else marks[:, node] * own[rows, token]
        tried = parents[:, node] == last
        stands = tried & (asked < left[rows, token])
        rest = torch.where((tried & ~stands).unsqueeze(-1), left_over(left, own, token), left)
        left = torch.where(stands.unsqueeze(-1), target_probs[:, node + 1], rest)
        _put(ids, depth, stands, token)
        _put(nodes, depth, stands, torch.full_like(token, node))
        last, depth = torch.where(stands, node, last), depth + stands
    ids[rows, depth] = drawn(left, generator)
    return ids, nodes


def _put(lists: Tensor, place: Tensor, where: Tensor, value: Tensor) -> None:
    """Write a value into a place of each list, where it is to be."""
    if lists.shape[1]:
        at = place.clamp(max=lists.shape[1] - 1).unsqueeze(-1)
        lists.scatter_(1, at, torch.where(where, value, lists.gather(1, at).squeeze(1)).unsqueeze(-1))


def walked_greedily(draft_ids: Tensor, best: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """The same where a node stands if its token is the target's likeliest. Shapes: (B, N), (B, N + 1), (B, N)."""
    batch, count = draft_ids.shape
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
    draft_ids: Tensor, target_probs: Tensor, draft_probs: Tensor | None, parents: Tensor, near: float = 0.0
) -> tuple[Tensor, Tensor]:
    """How often each place of the results is which token, or which node; first how often it is -1.

    Args:
        near: how far a share may be from 1, and a probability from the drafted one, to be told from it.
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
    for node in range(count):
        above, token = parents[:, node].long() + 1, draft_ids[:, node].long()
        known = above <= node  # where its parent comes later, the walk never comes back to it
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
