"""The place of a maximum as torch expressions.

torch's argmax compares one number after the other, its amax uses vectors: 201 and 11 us for 128256 float32 numbers, one
thread of an AMD EPYC, torch 2.13.0, 2026-11-22. So on a CPU the maxima of blocks are found first, then the first block
that has the largest, and its first place in there; NaN is larger than any number for both.
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

_BLOCKS = (256, 128, 64)


def _load(facts: Facts) -> Callable[..., Any]:
    argmax = torch.argmax

    def run(logits: Tensor) -> Tensor:
        return argmax(logits.detach(), -1)

    return run


def _load_blocks(facts: Facts) -> Callable[..., Any]:
    vocab = facts.size("vocab")
    width = next(each for each in _BLOCKS if vocab % each == 0)
    shape = (vocab // width, width)

    def run(logits: Tensor) -> Tensor:
        blocks = torch.unflatten(logits.detach(), -1, shape)
        first = blocks.amax(-1).argmax(-1, keepdim=True)
        own = blocks.gather(-2, first.unsqueeze(-1).expand(*first.shape, width)).squeeze(-2)
        return own.argmax(-1).add_(first.squeeze(-1), alpha=width)

    return run


KERNELS = tuple(
    Kernel(
        id=name,
        operations=("sampling.greedy",),
        backend=TORCH,
        load=load,
        limits=(limit.dtype("float32", "float64", "float16", "bfloat16"), *limits),
        grad=True,
        handles_negated=True,
        priority=priority,
        stock=True,  # blocks as well: other functions of torch, and the same place
    )
    for name, load, limits, priority in (
        ("torch.greedy", _load, (), 40),
        ("torch.greedy_blocks", _load_blocks, (limit.platform("cpu"), limit.dim("vocab", multiple=_BLOCKS[-1])), 45),
    )
)
