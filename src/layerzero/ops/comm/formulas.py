"""What collectives are made of: sums in a fixed order, and torch's own functions with a result of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.ops.comm.ranks import distributed, ranks_of
from layerzero.ops.declaration import wide
from layerzero.ops.norm.declare import rms_norm

DENSE = torch.contiguous_format
_gather: Any = getattr(distributed, "all_gather_single", None) or getattr(distributed, "all_gather_into_tensor", None)
_scatter: Any = getattr(distributed, "reduce_scatter_single", getattr(distributed, "reduce_scatter_tensor", None))
"""torch 2.13 has new names, and warns of the old ones."""

REDUCTIONS = ("sum", "max", "min")


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add parts up in the order of a tree: neighbours first, then neighbours of these sums.

    The order is that of the kernel ``layerzero.tree_all_reduce``. Where each rank adds up its own 1, 2, 4, ... parts
    so, an equal number on each, and that kernel adds the ranks' sums, the bits are those of all parts on one rank.

    Shapes: each (*), the same → (*)
    Dtype: any, the same for all; each sum is rounded to it.
    Raises: InvalidCallError for no part.
    """
    if not parts:
        raise InvalidCallError("tree_sum", [f"parts: wanted at least one tensor, got {told(list(parts))}"])
    level = list(parts)
    while len(level) > 1:
        pairs = [level[place] + level[place + 1] for place in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def along(input: Tensor, dim: int) -> Tensor:
    """A tensor with an axis in front, dense."""
    return input.movedim(dim, 0).contiguous() if input.ndim > 1 else input.contiguous()


def back(output: Tensor, dim: int) -> Tensor:
    """The first axis where it was, dense."""
    return output.movedim(0, dim).contiguous() if output.ndim > 1 else output


def gathered(input: Tensor, group: Any) -> Tensor:
    """What all ranks have, one after the other along a new first axis."""
    ranks = ranks_of(group)
    if ranks.group is None:
        return input.unsqueeze(0).clone(memory_format=DENSE)
    dense = input.contiguous()
    output = dense.new_empty((ranks.size * dense.numel(),))
    _gather(output, dense.view(-1), group=ranks.group)
    return output.view(ranks.size, *input.shape)


def reduced(input: Tensor, op: str, group: Any) -> Tensor:
    """The sum, or the largest or smallest of each element, in float32 or wider, in the order of the ranks.

    Whole numbers are added up as they are.
    """
    parts = gathered(input, group)
    if op != "sum":
        return parts.amax(0) if op == "max" else parts.amin(0)
    total = parts[0].to(wide(input.dtype) if input.is_floating_point() else input.dtype)
    for part in parts[1:]:
        total = total + part
    return total.to(input.dtype)


def torch_all_reduce(input: Tensor, reduce_op: str = "sum", group: Any = None) -> Tensor:
    """``torch.distributed.all_reduce`` of a copy."""
    ranks, output = ranks_of(group), input.clone(memory_format=DENSE)
    if ranks.group is not None:
        distributed.all_reduce(output, _op(reduce_op), group=ranks.group)
    return output


def then_norm(reduce: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A sum over ranks, a new tensor, with a residual added and its norm behind it: torch's, but of float64."""

    def run(
        input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, group: Any = None
    ) -> tuple[Tensor, Tensor]:
        total = reduce(input, group=group).add_(residual)
        if total.dtype is torch.float64:
            # torch's, on a GPU, makes NaN of a row with an infinity (H200, torch 2.11, 2026-11-27)
            return rms_norm(total, weight, eps), total
        return functional.rms_norm(total, weight.shape, weight, eps), total

    return run


def torch_reduce_scatter(input: Tensor, scatter_dim: int = 0, reduce_op: str = "sum", group: Any = None) -> Tensor:
    """``torch.distributed.reduce_scatter_single``, along any axis."""
    ranks = ranks_of(group)
    if ranks.group is None:
        return input.clone(memory_format=DENSE)
    parts = along(input, scatter_dim)
    output = parts.new_empty((parts.shape[0] // ranks.size, *parts.shape[1:]))
    _scatter(output, parts, _op(reduce_op), group=ranks.group)
    return back(output, scatter_dim)


def _op(name: str) -> Any:
    return getattr(distributed.ReduceOp, name.upper())
