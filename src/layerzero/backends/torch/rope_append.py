"""Rotation and append as torch expressions: the rotation of torch/rope.py, then the new rows by index.

Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.backends.torch.attention import TORCH
from layerzero.backends.torch.kv import load_quantized
from layerzero.backends.torch.norm import FINITE
from layerzero.backends.torch.normed_rope import load_split
from layerzero.backends.torch.paged import load_append
from layerzero.backends.torch.rope import FLOATS, rows_for, turning
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.rope_append.composed import Append, split_then_append
from layerzero.ops.rope_append.declare import write_rows


def appending(facts: Facts) -> Append:
    """Torch's own way of writing tokens into the cache of a call, in NHD."""
    if facts["operation"] == "kv.rope_append.quantized":
        return load_quantized(facts)
    return load_append(facts) if str(facts["operation"]).endswith(".paged") else write_rows


def _load(facts: Facts) -> Callable[..., Any]:
    rows, turn, append = rows_for(facts), turning(facts), appending(facts)

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        positions: Tensor,
        slot_mapping: Tensor | None = None,
        *scales: Tensor,
        interleaved: bool,
    ) -> Tensor:
        pair = rows(query, cos, sin, positions)
        new = turn(key, *pair, interleaved)
        append(new, value, key_cache, value_cache, positions if slot_mapping is None else slot_mapping, *scales)
        return turn(query, *pair, interleaved)

    return run


def _load_split(facts: Facts) -> Callable[..., Any]:
    return split_then_append(load_split(facts), appending(facts), facts.size("heads"), facts.size("kv_heads"))


KERNELS = (
    Kernel(
        id="torch.rope_append",
        operations=("kv.rope_append", "kv.rope_append.paged"),
        backend=TORCH,
        load=_load,
        layout="NHD",
        accepts=("interleaved",),
        limits=(limit.dtype(*FLOATS),),
        grad=True,
        priority=20,
    ),
    Kernel(
        id="torch.rope_append_codes",
        operations=("kv.rope_append.quantized",),
        backend=TORCH,
        load=_load,
        layout="NHD",
        accepts=("interleaved",),
        limits=(limit.dtype(*FLOATS),),
        graph_safe=False,
        priority=20,
    ),
    Kernel(
        id="torch.split_qkv_norm_rope_append",
        operations=("kv.split_qkv_norm_rope_append", "kv.split_qkv_norm_rope_append.paged"),
        backend=TORCH,
        load=_load_split,
        layout="NHD",
        accepts=("q_weight", "k_weight", "interleaved", "eps", "plus_one"),
        limits=(limit.dtype(*FLOATS), FINITE),
        grad=True,
        priority=20,
    ),
)
