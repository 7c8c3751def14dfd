"""torch's rows by ids: its embedding, and its selection by index, which differ in how they read and in their backward.

A shard looks up row 0 for ids of others and blanks it, so that nothing waits for the device.
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

Rows = Callable[[Tensor, Tensor, int | None], Tensor]
"""Of ids, a table and the row that gets no gradient."""


def _embedding(facts: Facts) -> Rows:
    embedding = torch.embedding

    def run(ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        return embedding(weight, ids, -1 if padding is None else padding)

    return run


def _selection(facts: Facts) -> Rows:
    recording = bool(facts["requires_grad"])

    def run(ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        rows = weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])
        if padding is None or not recording:
            return rows
        return torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)

    return run


def _load(rows_of: Callable[[Facts], Rows]) -> Callable[[Facts], Callable[..., Any]]:
    def load(facts: Facts) -> Callable[..., Any]:
        rows = rows_of(facts)

        def whole(ids: Tensor, weight: Tensor, *, scale: float | None, padding_idx: int | None) -> Tensor:
            found = rows(ids, weight, padding_idx)
            return found if scale is None else found * scale

        def shard(
            ids: Tensor, weight: Tensor, *, scale: float | None, padding_idx: int | None, vocab_start: int
        ) -> Tensor:
            vocab = weight.shape[0]
            beyond = (ids < vocab_start) | (ids >= vocab_start + vocab)
            padding = None if padding_idx is None else padding_idx - vocab_start
            own = padding if padding is not None and 0 <= padding < vocab else None
            found = rows((ids - vocab_start).masked_fill(beyond, 0), weight, own).masked_fill(beyond.unsqueeze(-1), 0.0)
            return found if scale is None else found * scale

        return shard if facts["operation"] == "embedding.lookup.shard" else whole

    return load


KERNELS = tuple(
    Kernel(
        id=f"{name}{ending}",
        operations=(operation,),
        backend=TORCH,
        load=_load(rows_of),
        accepts=("scale", "padding_idx", *accepts),
        limits=(limit.dtype("float32", "float64", "float16", "bfloat16"),),
        grad=True,
        handles_negated=True,
        priority=priority,
        stock=name == "torch.embedding" and not ending,  # a shard takes several functions
    )
    for name, rows_of, priority in (("torch.embedding", _embedding, 50), ("torch.index_select", _selection, 40))
    for ending, operation, accepts in (
        ("", "embedding.lookup", ()),
        (".shard", "embedding.lookup.shard", ("vocab_start",)),
    )
)
