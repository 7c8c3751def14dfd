"""torch's products with stacks of weights: one batched product, a grouped one, or a loop over groups.

``torch.nn.functional.grouped_mm`` reads where groups end on the device; the loop waits for the device to tell it, and
multiplies no row twice. Both leave rows behind the last end unwritten or 0.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch.attention import TORCH
from layerzero.backends.torch.rows_apart import linear_for
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.experts.declare import BATCHED


def _load_loop(facts: Facts) -> Callable[..., Tensor]:
    linear, cat = linear_for(facts), torch.cat

    def loop(input: Tensor, weight: Tensor, group_ends: Tensor, *, bias: Tensor | None = None) -> Tensor:
        start, parts = 0, []
        for number, end in enumerate(group_ends.tolist()):
            if end > start:
                own = None if bias is None else bias[number]
                parts.append(linear(input[start:end], weight[number], own))
                start = end
        if start < input.shape[0]:
            parts.append(input.new_zeros(input.shape[0] - start, weight.shape[1]))
        return parts[0] if len(parts) == 1 else cat(parts) if parts else input.new_zeros(0, weight.shape[1])

    return loop


def _load_grouped(facts: Facts) -> Callable[..., Tensor]:
    grouped_mm: Any = functional.grouped_mm

    def grouped(input: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
        output: Tensor = grouped_mm(input, weight.mT, offs=group_ends)
        return output

    return grouped


_COMMON: dict[str, Any] = {
    "backend": TORCH,
    "grad": True,
    "handles_negated": True,
}
_FLOATS = limit.dtype("float32", "float64", "float16", "bfloat16")

KERNELS = (
    Kernel.of_expression(BATCHED, id="torch.bmm", limits=(_FLOATS,), priority=50, stock=True, **_COMMON),
    Kernel(
        id="torch.linear_each",
        operations=("mlp.grouped",),
        load=_load_loop,
        accepts=("bias",),
        limits=(_FLOATS,),
        graph_safe=False,
        priority=30,
        stock=True,
        **_COMMON,
    ),
    Kernel(
        id="torch.grouped_mm",
        operations=("mlp.grouped",),
        load=_load_grouped,
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("bfloat16"),
            limit.dim("in_features", multiple=8),
            limit.dim("out_features", multiple=8),
            limit.contiguous(
                "input", "weight", "group_ends"
            ),  # strided ends give other rows (H200, torch 2.11, 2026-11-22)
            limit.aligned(16, "input", "weight"),
            limit.dim("experts", max=1023),
        ),
        priority=50,
        stock=True,
        **_COMMON,
    ),
)
