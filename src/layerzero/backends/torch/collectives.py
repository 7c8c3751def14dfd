"""Collectives of torch.distributed, over whatever backend a group has: NCCL, Gloo, and others.

Library: torch >= 2.10, BSD-3-Clause. Results are new tensors, as of every operation here: one copy more than in place.
A collective is waited for by the stream, never by the host. They have the same priority on all ranks, and no time of
one rank decides. The tree adds in one order for every number of ranks; no priority chooses it.

All-reduce by torch's symmetric memory: GPUs of one host read each other's buffers, in one launch
(``torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu``). One shot: each rank reads all others' numbers; two
shots: each adds up its part, then all fetch the parts. Both add in the order of the ranks, rounding each sum, so that
all ranks have the same bits. Neither uses NVLink's multicast.

A group has one buffer of 16 MiB on each device, made at its first call, where all ranks come together, and kept as
long as the group: a capture finds it there. Launches of one group share it, so that they come one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from layerzero.backends.norm_limits import BoundsSizes
from layerzero.backends.torch.attention import FLOATS, TORCH, always, kernel
from layerzero.core import limits as limit
from layerzero.core.errors import InvalidCallError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Limit
from layerzero.core.operation import Operation
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.comm import declare
from layerzero.ops.comm.ranks import DENSE, PEERS, Ranks, gathered, ranks_of, then_norm, tree_sum

_ADDED = limit.dtype("float64", "float32", "float16", "bfloat16", "int64", "int32")
_MOVED = limit.dtype("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")

OWN = replace(TORCH, name="layerzero", summary="Sums in a canonical order, made of torch's functions")


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


BUFFER_BYTES = 2**24
ONE_SHOT_ELEMENTS = 2**17 - 1  # where a class of calls ends, so that all sizes of one have the same kernel
"""256 KiB of bfloat16, the bound of vLLM's custom all-reduce for 8 GPUs of one host: 7.8 us where NCCL takes 9.2 (of
16 KiB). This and the next two on two H200, torch 2.11, in CUDA graphs, 2026-11-26 and 27."""

ONE_SHOT_OF_TWO = 2**20 - 1
"""Of two ranks it is the quickest to 1 MiB: 10.9, 13.2 and 16.5 us of 256 KiB, 512 KiB and 1 MiB, where NCCL takes
11.6, 13.4 and 17.3, and two shots 13.2, 15.0 and 17.5; of 2 MiB 23.3, 30.7 and 20.8."""

TWO_SHOT_ELEMENTS = 2**19, 2**22 - 1
"""From 1 MiB of bfloat16 to what the buffer holds of float32; of 4 MiB it takes 29.2 us, NCCL 36.7."""

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

_BUFFERS: WeakKeyDictionary[Any, dict[int, Tensor]] = WeakKeyDictionary()


def _buffer(ranks: Ranks, like: Tensor) -> Tensor:
    """The group's buffer, seen as the tensor's dtype and shape. Raises: InvalidCallError in a capture that lacks it."""

    def make() -> Tensor:
        from torch.distributed import _symmetric_memory as memory

        made = memory.empty(BUFFER_BYTES, dtype=torch.uint8, device=like.device)
        memory.rendezvous(made, ranks.group)
        return made

    return of_group(_BUFFERS, ranks, like, make).view(like.dtype)[: like.numel()].view(like.shape)


def of_group(
    known: WeakKeyDictionary[Any, dict[int, Tensor]], ranks: Ranks, like: Tensor, make: Callable[[], Tensor]
) -> Tensor:
    """What a group has on a tensor's device: made once, by all ranks together, without multicast.

    Raises: InvalidCallError in a capture, since making it synchronises.
    """
    held = known.setdefault(ranks.group, {})
    if like.device.index not in held:
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            wanted = "wanted one collective of this group before the capture, which makes its buffer, got none"
            raise InvalidCallError("all_reduce", [f"group: {wanted}"])
        with _without_multicast():
            held[like.device.index] = make()
    return held[like.device.index]


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Let torch make no multicast object for a buffer that no kernel here reads by one; it reads the variable anew."""
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before


def dense(input: Tensor) -> Tensor:
    """A dense tensor that begins at 16 bytes, as the buffer does: launches of all ranks must have one shape."""
    dense = input.contiguous()
    return dense.clone() if dense.data_ptr() % 16 else dense


def one_shot(input: Tensor, *, group: Any = None) -> Tensor:
    """Each rank reads what all others have."""
    ranks, local = ranks_of(group), dense(input)
    buffer = _buffer(ranks, local)
    output: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, local, "sum", ranks.group.group_name)
    return output


def two_shot(input: Tensor, *, group: Any = None) -> Tensor:
    """Each rank adds up its part, then all fetch the parts."""
    ranks, output = ranks_of(group), torch.empty_like(input, memory_format=torch.contiguous_format)
    buffer = _buffer(ranks, output).copy_(input)
    torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", ranks.group.group_name, output)
    return output


@dataclass(frozen=True, slots=True)
class InOneShot(BoundsSizes):
    """So few numbers that one shot is quicker than two, or than NCCL; on two ranks more, of float32 half as many."""

    def check(self, facts: Facts) -> limit.Findings:
        most = ONE_SHOT_OF_TWO if facts.size("rank_count") == 2 else ONE_SHOT_ELEMENTS
        if most == ONE_SHOT_OF_TWO and facts["dtype"] is torch.float32:
            most //= 2
        got = facts.size("payload")
        if got <= most:
            return ()
        return (limit.Finding(Reason(ReasonCode.CONSTRAINT_FAILED, "payload", f"at most {most}", got)),)

    def facts_named(self) -> tuple[str, ...]:
        return "payload", "rank_count", "dtype"

    def describe(self) -> str:
        return f"payload <= {ONE_SHOT_ELEMENTS}, of two ranks {ONE_SHOT_OF_TWO}, {ONE_SHOT_OF_TWO // 2} of float32"


_OF_PEERS = (
    limit.platform("cuda"),
    limit.arch(min=(8, 0)),
    limit.dtype("float32", "bfloat16"),
    limit.one_of("group_reach", PEERS),
    limit.dim("rank_count", max=8, one_of=(2, 4, 8)),
)
ONE_SHOT = (*_OF_PEERS, limit.dim("payload", min=8, multiple=8), InOneShot())  # 16 bytes of bfloat16
"""Where :func:`one_shot` may run, and pays."""

_THEN_NORM = then_norm(one_shot)
_TWO_SHOT = (*_OF_PEERS, limit.dim("payload", min=TWO_SHOT_ELEMENTS[0], max=TWO_SHOT_ELEMENTS[1], multiple=8))

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
        OWN.kernel(
            f"layerzero.tree_{each.name.removeprefix('comm.')}",
            each.name,
            always(run),
            FLOATS,
            accepts=accepts,
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
    *(
        kernel(f"torch.symm_{name}", operation.name, always(run), *limits, accepts=accepts, priority=priority)
        for name, operation, run, limits, accepts, priority in (
            ("one_shot_all_reduce", declare.ALL_REDUCE, one_shot, ONE_SHOT, ("group",), 62),
            ("two_shot_all_reduce", declare.ALL_REDUCE, two_shot, _TWO_SHOT, ("group",), 60),
            ("all_reduce_add_rms_norm", declare.ALL_REDUCE_ADD_RMS_NORM, _THEN_NORM, ONE_SHOT, ("group", "eps"), 60),
        )
    ),
)
