"""Rows of a mask of floats in which every key is hidden, and what fused kernels of torch make of them.

Where a mask is -inf for every key, a query gives 0. Models also hide a row by the least number of a dtype, for every
key: scores vanish beside -3.4e38, and all keys get equal shares. Fused kernels form these shares anew in their
backward, from a log-sum-exp that holds no more than the mask's number there. Each share is then 1: gradients were 12
times as large as they should be of 13 keys (CPU, torch 2.13, ``F.scaled_dot_product_attention`` as well, 2026-11-24).
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOST = -1e3
"""Beside a larger number than this a log-sum-exp in float32 keeps what it adds to it to four digits."""

_ABSORBING = -1e20
"""Scores vanish beside numbers below, in float32 and in float64."""


def loses_log_sums(mask: Tensor) -> bool:
    """Whether a log-sum-exp loses its digits in some row. It reads the values, which costs a wait on a device."""
    largest = mask.detach().amax(-1)
    return bool(((largest < _LOST) & (largest != -torch.inf)).any())


def levelled(query: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Shift each row of a mask so that its largest number is 0, and leave scores that vanish out of the call.

    The shares stay what they are, and a log-sum-exp holds them; nothing is read on the host. Queries whose scores
    vanish become 0 and get no gradient: their keys have equal shares whatever they are.

    Shapes: query (B, H, S_q, D), mask broadcastable to (B, H, S_q, S_k) → the same
    """
    largest = mask.detach().amax(-1, keepdim=True)
    finite = largest.masked_fill(largest == -torch.inf, 0.0)
    return query.masked_fill(finite < _ABSORBING, 0.0), mask - finite


def blanked(output: Tensor, mask: Tensor) -> Tensor:
    """Put 0 where a mask lets a query see no key: not every kernel behind torch's function is known to."""
    return output.masked_fill((mask == -torch.inf).all(-1, keepdim=True), 0.0)
