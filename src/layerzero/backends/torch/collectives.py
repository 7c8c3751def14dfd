"""Collectives of torch.distributed, over whatever backend a group has: NCCL, Gloo, and others.

Library: torch >= 2.10, BSD-3-Clause. Results are new tensors, as of every operation here: one copy more than in place.
A collective is waited for by the stream, never by the host. They have the same priority on all ranks, and no time of
one rank decides. The tree adds in one order for every number of ranks; no priority chooses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.backends.torch.attention import FLOATS, TORCH, always
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.limit_kinds import Limit
from layerzero.core.operation import Operation
from layerzero.ops.comm import declare
from layerzero.ops.comm.formulas import DENSE, gathered, then_norm, tree_sum
from layerzero.ops.comm.ranks import ranks_of

_ADDED = limit.dtype("float64", "float32", "float16", "bfloat16", "int64", "int32")
_MOVED = limit.dtype("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")

OWN = Backend(
    name="layerzero",
    summary="Sums in a canonical order, made of torch's functions",
    tested=TORCH.tested,
    requires=TORCH.requires,
    platforms=TORCH.platforms,
    homepage=TORCH.homepage,
    flags=TORCH.flags,
)


def tree_all_reduce(input: Tensor, *, group: Any = None) -> Tensor:
    """All ranks' tensors, added up by neighbours: the bits are the same on each rank, and do not change with them.

    It moves so many times the tensor as there are ranks, where a ring moves two.
    """
    return tree_sum(gathered(input, group).unbind(0))


def tree_reduce_scatter(input: Tensor, *, scatter_dim: int = 0, group: Any = None) -> Tensor:
    """A piece of that sum; it moves as much."""
    ranks, total = ranks_of(group), tree_all_reduce(input, group=group)
    piece = input.shape[scatter_dim] // ranks.size
    return total.narrow(scatter_dim, ranks.rank * piece, piece).clone(memory_format=DENSE)


def _exact(facts: Facts) -> bool:
    """Whether the order of the ranks changes no bit: of a maximum, a minimum, and of whole numbers added up."""
    return facts["reduce_op"] != "sum" or not facts["dtype"].is_floating_point  # type: ignore[attr-defined]


_OF_TORCH: tuple[tuple[Operation, Limit, bool | Callable[[Facts], bool]], ...] = (
    (declare.ALL_REDUCE, _ADDED, _exact),
    (declare.ALL_GATHER, _MOVED, True),  # moving numbers sums up none
    (declare.REDUCE_SCATTER, _ADDED, _exact),
    (declare.ALL_TO_ALL, _MOVED, True),
    (declare.ALL_REDUCE_ADD_RMS_NORM, FLOATS, False),
)
"""Of each operation, the dtypes that torch.distributed takes, and whether any number of ranks gives the same bits."""


KERNELS = (
    *(
        Kernel.of_expression(
            each,
            id=f"torch.{each.name.removeprefix('comm.')}",
            backend=TORCH,
            accepts=each.schema.arguments[len(each.schema.inputs) :],
            limits=(taken,),
            grad=False,
            tp_invariant=alike,
            handles_empty=True,
            handles_negated=True,
            priority=50,
        )
        for each, taken, alike in _OF_TORCH
    ),
    *(
        Kernel(
            id=f"layerzero.tree_{each.name.removeprefix('comm.')}",
            operations=(each.name,),
            backend=OWN,
            load=always(run),
            accepts=accepts,
            limits=(FLOATS,),
            tp_invariant=True,
            handles_empty=True,
            handles_negated=True,
            priority=5,
        )
        for each, run, accepts in (
            (declare.ALL_REDUCE, tree_all_reduce, ("group",)),
            (declare.REDUCE_SCATTER, tree_reduce_scatter, ("scatter_dim", "group")),
            (declare.ALL_REDUCE_ADD_RMS_NORM, then_norm(tree_all_reduce), ("eps", "group")),
        )
    ),
)
