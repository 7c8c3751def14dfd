"""Norm and rotation of each head as torch expressions: torch's own norm in float32, rotated before it is rounded.

On a CPU both take so many tokens at a time that what lies between stays in its cache.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import TORCH
from layerzero.backends.torch.norm import FINITE
from layerzero.backends.torch.rope import FLOATS, Before, rows_for, turning
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.rope.split import SPLIT_ACCEPTS, parts


def norming(weight: Tensor, eps: float, plus_one: bool, wide: torch.dtype) -> Before:
    """The norm of a head, in the wide dtype."""
    rms_norm, shape = torch.rms_norm, tuple(weight.shape)
    factor = weight.to(wide)
    factor = factor + 1.0 if plus_one else factor

    def run(tensor: Tensor) -> Tensor:
        return rms_norm(tensor.to(wide), shape, factor, eps)

    return run


def _load(facts: Facts) -> Callable[..., Any]:
    rows, turn = rows_for(facts), turning(facts)

    def run(
        query: Tensor,
        key: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        positions: Tensor | None = None,
        interleaved: bool,
        eps: float,
        plus_one: bool,
    ) -> tuple[Tensor, Tensor]:
        pair = rows(query, cos, sin, positions)
        wide = pair[0].dtype
        return (
            turn(query, *pair, interleaved, norming(q_weight, eps, plus_one, wide)),
            turn(key, *pair, interleaved, norming(k_weight, eps, plus_one, wide)),
        )

    return run


def load_split(facts: Facts) -> Callable[..., Any]:
    """What takes a joined product ``qkv`` apart, norms and rotates its parts."""
    rows, turn = rows_for(facts, "qkv"), turning(facts)

    def run(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        heads: int,
        kv_heads: int,
        positions: Tensor | None = None,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        interleaved: bool,
        eps: float,
        plus_one: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = parts(qkv, heads, kv_heads)
        pair = rows(query, cos, sin, positions)
        wide = pair[0].dtype
        turned = [
            turn(tensor, *pair, interleaved, None if weight is None else norming(weight, eps, plus_one, wide))
            for tensor, weight in ((query, q_weight), (key, k_weight))
        ]
        return turned[0], turned[1], value.clone(memory_format=torch.contiguous_format)

    return run


KERNELS = (
    Kernel(
        id="torch.qk_norm_rope",
        operations=("posenc.qk_norm_rope",),
        backend=TORCH,
        load=_load,
        accepts=("positions", "interleaved", "eps", "plus_one"),
        limits=(limit.dtype(*FLOATS), FINITE),
        grad=True,
        handles_negated=True,
        priority=20,
    ),
    Kernel(
        id="torch.split_qkv_norm_rope",
        operations=("posenc.split_qkv_norm_rope",),
        backend=TORCH,
        load=load_split,
        accepts=(*SPLIT_ACCEPTS, "plus_one"),
        limits=(limit.dtype(*FLOATS), FINITE),
        grad=True,
        handles_negated=True,
        priority=20,
    ),
)
