"""Experts that are divided among ranks: tokens go to the ranks of their experts, and what these make comes back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.ops.comm.ranks import ProcessGroup, Ranks, ranks_of
from layerzero.ops.declaration import wide


def moe_experts_of_ranks(
    input: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    group: ProcessGroup | Ranks | None = None,
    **options: Any,
) -> Tensor:
    """Send each token through its experts, a part of which each rank has, and add up what they make of it.

    Each rank calls it with its own tokens, any number of them, and its own experts: rank r has the experts from
    ``r * E`` to ``(r + 1) * E - 1``. Of each token a rank gets one row, however many of its experts the token has.

    Shapes: input (T, D), gate_up_weight (E, 2 F, D), down_weight (E, D, F), expert_ids and expert_weights (T, k) →
        (T, D). T differs between ranks and may be 0; E is the same on all.
    Dtype: as :func:`layerzero.moe_experts`; each rank's share is rounded to it, and shares are added up in float32.
    Args:
        expert_ids: of all ranks' experts, from 0; -1 adds nothing.
        group: whose ranks; the default group if None.
        options: of :func:`layerzero.moe_experts`, about this rank's experts.
    Raises: InvalidCallError for experts that no rank has, on this rank alone, and as :func:`layerzero.moe_experts` and
        :func:`layerzero.all_to_all` do.
    Source: arXiv:2006.16668.
    """
    from layerzero import all_to_all, moe_experts

    ranks, here = ranks_of(group), gate_up_weight.shape[0]
    if expert_ids.numel() and int(expert_ids.max()) >= here * ranks.size:
        wanted = f"wanted experts below {here * ranks.size}, {here} on each of {ranks.size} ranks"
        raise InvalidCallError("moe_experts_of_ranks", [f"expert_ids: {wanted}, got {int(expert_ids.max())}"])
    home = expert_ids.div(here, rounding_mode="floor")  # of -1, no rank
    goes = (home == torch.arange(ranks.size, device=home.device).view(-1, 1, 1)).any(-1)
    tokens, counts = goes.nonzero()[:, 1], goes.sum(1)  # those for rank 0 first
    send, receive = counts.tolist(), all_to_all(counts, group=group).tolist()

    def sent(rows: Tensor) -> Tensor:
        return all_to_all(rows[tokens], send, receive, group)

    ids = sent(expert_ids) - ranks.rank * here
    ids = ids.where((ids >= 0) & (ids < here), -1)
    made = moe_experts(sent(input), gate_up_weight, down_weight, ids, sent(expert_weights), **options)
    total = torch.zeros_like(input, dtype=wide(input.dtype))
    back = all_to_all(made, receive, send, group)
    for places, rows in zip(torch.split(tokens, send), torch.split(back, send), strict=True):
        total[places] += rows  # a token once a rank, so that the order of the sums is that of the ranks
    return total.to(input.dtype)
