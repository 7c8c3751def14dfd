"""The bias of linear biases as torch expressions: a row holds every distance once, and each query sees a piece of it.

The bias of query i and key j depends on j - i alone, so of H x (q_len + kv_len - 1) numbers one copy makes all.
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


def _load(facts: Facts) -> Callable[..., Any]:
    wide = torch.promote_types(facts.tensors["slopes"].dtype, torch.float32)

    def run(slopes: Tensor, *, q_len: int, kv_len: int, causal: bool, out_dtype: torch.dtype | None) -> Tensor:
        behind = torch.arange(kv_len - 1, -q_len, -1, device=slopes.device)  # of the last query, then of those before
        row = slopes.to(wide).unsqueeze(1) * -behind.abs()
        if causal:
            row = row.masked_fill(behind < 0, -torch.inf)
        pieces = row.to(out_dtype or slopes.dtype).unfold(1, kv_len, 1)
        return pieces.index_select(1, torch.arange(q_len - 1, -1, -1, device=slopes.device))

    return run


KERNELS = (
    Kernel(
        id="torch.alibi_bias",
        operations=("posenc.alibi",),
        backend=TORCH,
        load=_load,
        accepts=("q_len", "kv_len", "causal", "out_dtype"),
        limits=(limit.dtype("float32", "float64", "float16", "bfloat16"),),
        grad=True,
        handles_negated=True,
        priority=50,
    ),
)
