"""torch's own copies of numbers that are only moved.

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
from layerzero.ops.linear.qkv import pieces


def _load_transpose(facts: Facts) -> Callable[..., Any]:
    def run(input: Tensor) -> Tensor:
        return input.transpose(-2, -3).clone(memory_format=torch.contiguous_format)

    return run


def _load_split(facts: Facts) -> Callable[..., Any]:
    def run(qkv: Tensor, *, kv_features: int) -> tuple[Tensor, ...]:
        return tuple(each.clone(memory_format=torch.contiguous_format) for each in pieces(qkv, kv_features))

    return run


def _load_copy(facts: Facts) -> Callable[..., Any]:
    def run(destination: Tensor, input: Tensor) -> None:
        destination.copy_(input)

    return run


KERNELS = tuple(
    Kernel(
        id=f"torch.{name}",
        operations=tuple(f"tensor.{each}" for each in operations),
        backend=TORCH,
        load=load,
        accepts=accepts,
        limits=(limit.dtype("float32", "float64", "float16", "bfloat16"),),
        grad=name != "copy_slice",
        priority=40,
        stock=True,
    )
    for name, operations, load, accepts in (
        ("transpose_copy", ("transpose_head_token", "transpose_token_head"), _load_transpose, ()),
        ("split_qkv", ("split_qkv",), _load_split, ("kv_features",)),
        ("copy_slice", ("copy_slice",), _load_copy, ()),
    )
)
