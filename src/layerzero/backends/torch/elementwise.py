"""torch's own operators on every element; each computes in float32 where its tensors are narrower, and rounds once.

But for a scaled addition on a CPU: torch 2.13 rounds the factor to the tensors' dtype there, so that it is written out.

torch's embedding and its selection by index differ in how they read rows and in their backward. A shard looks up row 0
for ids of others and blanks it, so that nothing waits for the device.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FLOATS, TORCH, always, kernel
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.elementwise import OPERATIONS
from layerzero.ops.tensor import COPY_SLICE, SPLIT_QKV, TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD


def _add(residual: Tensor, input: Tensor) -> None:
    residual.add_(input)


def _load_scaled_add(facts: Facts) -> Callable[..., Any]:
    dtype: Any = facts["dtype"]
    wide = torch.promote_types(dtype, torch.float32)
    exact = wide is dtype or facts.device.platform != "cpu"

    def run(residual: Tensor, input: Tensor, *, scale_by_row: Tensor | None = None, scale: float | None = None) -> None:
        if scale_by_row is not None:
            residual.addcmul_(input, scale_by_row.unsqueeze(-1))
        elif scale is not None and exact:
            residual.add_(input, alpha=scale)
        elif scale is not None:
            residual.add_(input.to(wide) * scale)

    return run


def _load_softmax(facts: Facts) -> Callable[..., Any]:
    dtype: Any = facts["dtype"]
    wide = torch.promote_types(dtype, torch.float32)

    def run(input: Tensor, *, temperature: float | None = None) -> Tensor:
        if temperature is None:
            return torch.softmax(input, -1)
        return torch.softmax(input.to(wide) / temperature, -1).to(dtype)

    return run


_LOADS = {"add_bias": always(torch.add), "add": always(_add), "scaled_add": _load_scaled_add, "softmax": _load_softmax}


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


KERNELS = (
    *(
        Kernel.of_expression(
            operation,
            id=f"torch.{name}",
            backend=TORCH,
            limits=(FLOATS,),
            load=_LOADS.get(name),
            batch_invariant=True,
            tp_invariant=True,
            handles_negated=True,
            priority=40,
            stock=True,
        )
        for operation in OPERATIONS
        for name in (operation.name.partition(".")[2],)
    ),
    *(
        Kernel.of_expression(*operations, id=f"torch.{name}", backend=TORCH, limits=(FLOATS,), priority=40, stock=True)
        for name, operations in (
            ("transpose_copy", (TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD)),
            ("split_qkv", (SPLIT_QKV,)),
            ("copy_slice", (COPY_SLICE,)),
        )
    ),
    *(
        kernel(
            f"{name}{ending}",
            operation,
            _load(rows_of),
            FLOATS,
            accepts=("scale", "padding_idx", *accepts),
            grad=True,
            batch_invariant=True,
            tp_invariant=True,
            handles_negated=True,
            priority=priority,
            stock=name == "torch.embedding" and not ending,  # a shard takes several functions
        )
        for name, rows_of, priority in (("torch.embedding", _embedding, 50), ("torch.index_select", _selection, 40))
        for ending, operation, accepts in (
            ("", "embedding.lookup", ()),
            (".shard", "embedding.lookup.shard", ("vocab_start",)),
        )
    ),
)
