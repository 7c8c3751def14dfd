"""What may be drawn of a row of probabilities, and a draw that gives the same bits on every device.

Which places are kept follows from their values alone, so that equal values are kept or dropped together:

top-k   as long as fewer than k places are likelier
top-p   as long as the places that are likelier have less than the share p of the row together
min-p   from the share p of the likeliest place upwards

The likeliest place is always kept. Shares are integers here, parts of 2^52: sums of them are exact in any order, while
torch adds up floating numbers on a GPU in an order of its own and refuses to where it has to be deterministic.
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
    """How many places are asked for, from 1 to as many as there are."""
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


def drawn(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """A place of each row by its weight. Shapes: (*, V) → (*) int64. Some place of rows that add up to nothing."""
    return place(parts(weights).cumsum(-1), generator)


def place(upto: Tensor, generator: torch.Generator | None) -> Tensor:
    """The place where a random part of a row lies, given the parts up to each place. Shapes: (*, V) → (*)."""
    total = upto[..., -1:]
    part = torch.rand(total.shape, dtype=torch.float64, device=upto.device, generator=generator)
    part = (part * total.double()).long()
    return torch.searchsorted(upto.contiguous(), part, right=True).clamp_(max=upto.shape[-1] - 1).squeeze(-1)
