"""Collectives: what ranks of a process group compute together.

comm.all_reduce              the sum over ranks, on each of them
comm.all_gather              what all ranks have, one behind the other, on each
comm.reduce_scatter          the sum over ranks, a piece of it on each
comm.all_to_all              rows of every rank to every rank: tokens to the ranks of their experts, and back
comm.all_reduce_add_rms_norm the sum over ranks, added to a residual, and its norm: what ends each half of a layer

Ranks that run different kernels wait for each other for ever. So these are chosen by priority and facts that all ranks
have, or by what ranks agreed on, never by times of one rank, and a kernel that fails is replaced by no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, Role, SizeCodes, told
from layerzero.core.errors import InvalidCallError
from layerzero.core.judge import Exact
from layerzero.core.operation import Case, Function, Operation, OpKind, Random, Tolerance, Work
from layerzero.core.reasons import ReasonCode
from layerzero.ops.comm.ranks import (
    DENSE,
    REDUCTIONS,
    ProcessGroup,
    Ranks,
    along,
    back,
    distributed,
    facts_of_group,
    gathered,
    kind_of_group,
    problem_of,
    ranks_of,
    reduced,
    then_norm,
    torch_all_reduce,
    torch_reduce_scatter,
)
from layerzero.ops.declaration import cases, eps_problems, function, operation, same_shape, tensor
from layerzero.ops.norm.declare import rms_norm

_NUMBERS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_ADDED = _NUMBERS | {torch.int64, torch.int32}
_MOVED = _ADDED | {torch.uint8}
_GROUP = Param(
    "group",
    tuple(each for each in (ProcessGroup, Ranks) if each is not None),
    None,
    Role.HANDLE,
    made_of=("input",),
    kind=kind_of_group,
    make=lambda _arguments, _capturable: Ranks.alone(),
    changes_result=True,
)
_OP = Param("reduce_op", str, "sum", example="max")
_FACTS: dict[str, tuple[str, ...]] = {"rank_count": (), "transport": (), "group_reach": ()}
_COUNT = Axis("rank_count", works=False, codes=SizeCodes(too_large=ReasonCode.TP_SIZE_EXCEEDED))
_AXES = (Axis("payload", scales=True, live=True, leading=True), _COUNT)
_TOLERANCE = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(4e-3, 4e-3),
    torch.bfloat16: Tolerance(3e-2, 3e-2),
}
_TOLERANCE_ADDED = _TOLERANCE | dict.fromkeys((torch.int64, torch.int32), Tolerance(0.0, 0.0))
_ROUNDED = "each of up to eight sums may round to the dtype"
_CASES = cases("payload", {"token": (8192,), "prefill": (4194304,), "small": (96,)})


def _alone(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    return {"group": Ranks.alone()}


def _bytes(facts: Mapping[str, Any]) -> Work:
    return Work(0.0, 2.0 * facts["payload"] * facts["dtype"].itemsize)


def _sums(facts: Mapping[str, Any]) -> Work:
    return Work(float(facts["payload"]), _bytes(facts).bytes)  # of a rank's own part, as of ring and tree


def _collective(name: str, summary: str, reference: Callable[..., Any], **more: Any) -> Operation:
    defaults: dict[str, Any] = {
        "inputs": ("input: ...",),
        "outputs": ("output: ...",),
        "axes": _AXES,
        "cases": _CASES,
        "tolerance": _TOLERANCE,
        "tolerance_reason": _ROUNDED,
        "derived_from": _FACTS,
        "derive": facts_of_group,
        "aliases": {"tp_size": "rank_count"},
        "work": _bytes,
    }
    return operation(
        f"comm.{name}", summary, reference, examples=_alone, kind=OpKind.COMMUNICATION, **{**defaults, **more}
    )


def _of(name: str, of: Operation, fits: Callable[[dict[str, Any]], list[str]]) -> Function:
    """A function whose group is looked at first.

    No plan serves another size: which sizes came before, and when tables were emptied, differs between ranks.
    """

    def values(arguments: dict[str, Any]) -> list[str]:
        group, input_ = arguments["group"], arguments["input"]
        problem = problem_of(group)
        if problem or not isinstance(input_, Tensor) or input_.is_meta:
            return [problem] if problem else []
        problems = _misplaced(input_, ranks_of(group))
        if (op := arguments.get("reduce_op", "sum")) not in REDUCTIONS:
            problems.append(f"reduce_op: wanted {', '.join(REDUCTIONS)}, got {told(op)}")
        return problems

    return function(name, of, varies=(), values=values, fits=fits, weight=0)


def _misplaced(input: Tensor, ranks: Ranks) -> list[str]:
    device = input.device.type
    transport = ranks.transport(device)
    if not transport:
        moving = ", ".join(sorted({each.type for each in ranks.group._device_types}))
        return [f"input: wanted a tensor on {moving}, as the group's backends take, got one on {device}"]
    if transport not in ("nccl", "none") and input.is_cuda and torch.cuda.is_current_stream_capturing():
        return [f"input: wanted nccl inside of a CUDA graph capture, or a call outside, got {transport} inside"]
    return []


def _no_gradient(arguments: dict[str, Any]) -> list[str]:
    needing = [each for each in arguments.values() if isinstance(each, Tensor) and each.requires_grad]
    if needing and torch.is_grad_enabled():
        return [
            "input: wanted no gradients, as under torch.no_grad, got some; torch.distributed.nn has collectives with"
        ]
    return []


def _axis_problems(arguments: dict[str, Any], name: str, parts: int = 1) -> list[str]:
    input_, dim = arguments["input"], arguments[name]
    if not -input_.ndim <= dim < input_.ndim:
        return [f"{name}: wanted an axis of input, {-input_.ndim} to {input_.ndim - 1}, got {dim}"]
    size = input_.shape[dim]
    if size % parts:
        return [f"input: wanted a multiple of {parts}, the number of ranks, along axis {dim}, got {size}"]
    return _no_gradient(arguments)


def all_reduce(input: Tensor, reduce_op: str = "sum", group: ProcessGroup | Ranks | None = None) -> Tensor:
    """Add up a tensor over all ranks of a group; each gets the sum.

    Every rank of the group calls it, with the same shape, dtype and ``reduce_op``: no rank sees the others' shapes, and
    ranks that differ hang or get wrong numbers. Calls of one group come one after the other, on one stream at a time.

    Shapes: input (*), the same on all ranks → (*)
    Dtype: floating, int32 or int64, returned; torch's kernels round each sum to it.
    Args:
        reduce_op: ``sum``, ``max`` or ``min``.
        group: whose ranks; the default group if None.
    Raises: InvalidCallError for a group that is not there, was destroyed, or moves no tensors of this device, for
        tensors that need gradients, and in a capture whose group cannot.
    """
    return reduced(input, reduce_op, group)


def all_gather(input: Tensor, gather_dim: int = 0, group: ProcessGroup | Ranks | None = None) -> Tensor:
    """Put what all ranks have one behind the other, in the order of the ranks, on each of them.

    Shapes: input (*), the same on all ranks → (*) with the axis ``gather_dim`` so many times longer, contiguous
    Dtype: floating, int32, int64 or uint8, returned.
    Args:
        gather_dim: along which axis.
        group: whose ranks; the default group if None.
    Raises: InvalidCallError for an axis that is not there, and as :func:`all_reduce` does.
    """
    parts = gathered(along(input, gather_dim), group)
    return back(parts.reshape(-1, *parts.shape[2:]), gather_dim)


def reduce_scatter(
    input: Tensor, scatter_dim: int = 0, reduce_op: str = "sum", group: ProcessGroup | Ranks | None = None
) -> Tensor:
    """Add up a tensor over all ranks of a group; each gets its piece of the sum, in the order of the ranks.

    Shapes: input (*), the same on all ranks → (*) with the axis ``scatter_dim`` so many times shorter, contiguous
    Dtype: floating, int32 or int64, returned.
    Args:
        scatter_dim: along which axis.
        reduce_op: ``sum``, ``max`` or ``min``.
        group: whose ranks; the default group if None.
    Raises: InvalidCallError for an axis that is not there, or that the number of ranks does not divide, and as
        :func:`all_reduce` does.
    """
    ranks = ranks_of(group)
    piece = input.shape[scatter_dim] // ranks.size
    return reduced(input, reduce_op, group).narrow(scatter_dim, ranks.rank * piece, piece).clone(memory_format=DENSE)


def all_to_all(
    input: Tensor,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    group: ProcessGroup | Ranks | None = None,
) -> Tensor:
    """Send rows to each rank of a group, and get the rows that each sends here: tokens to experts, and back.

    Shapes: input (N, *): first the rows for rank 0, then those for rank 1, and so on → (M, *), in the order of the
        ranks that sent them
    Dtype: floating, int32, int64 or uint8, returned.
    Args:
        send_sizes: rows for each rank, which add up to N; equal numbers if None.
        receive_sizes: rows from each rank, which add up to M: what each of them has in its ``send_sizes`` for this one.
        group: whose ranks; the default group if None.
    Raises: InvalidCallError for sizes that do not add up or divide, or come alone, and as :func:`all_reduce` does.
    """
    ranks = ranks_of(group)
    problems = _sizes_problems(input, send_sizes, receive_sizes, ranks.size)  # no key has the sizes
    if problems:
        raise InvalidCallError("all_to_all", problems)
    rows = input.shape[0] if receive_sizes is None else sum(receive_sizes)
    if ranks.group is None:
        return input.clone(memory_format=DENSE)
    output = input.new_empty((rows, *input.shape[1:]))
    sizes = [None if each is None else list(each) for each in (receive_sizes, send_sizes)]
    distributed.all_to_all_single(output, input.contiguous(), *sizes, group=ranks.group)
    return output


def _sizes_problems(input: Tensor, send: Any, receive: Any, ranks: int) -> list[str]:
    rows = input.shape[0] if input.ndim else 0
    if (send is None) != (receive is None):
        return ["send_sizes and receive_sizes: wanted both or none, got one"]
    if send is None or receive is None:
        return [] if rows % ranks == 0 else [f"input: wanted a multiple of {ranks} rows, one part a rank, got {rows}"]
    problems = []
    for name, sizes in (("send_sizes", send), ("receive_sizes", receive)):
        if len(sizes) != ranks or not all(type(each) is int and each >= 0 for each in sizes):
            problems.append(f"{name}: wanted {ranks} numbers of rows, one for each rank, got {told(list(sizes))}")
    if not problems and sum(send) != rows:
        problems.append(f"send_sizes: wanted sizes that add up to the {rows} rows of input, got {sum(send)}")
    return problems


def all_reduce_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, group: ProcessGroup | Ranks | None = None
) -> tuple[Tensor, Tensor]:
    """Add up a tensor over all ranks, add the sum to a residual, and normalise that by its root mean square.

    Shapes: input and residual (*, D), the same on all ranks; weight (D,) → output (*, D), the new residual (*, D)
    Dtype: floating, the same for all; the sum over ranks and the new residual are rounded to it, the norm is computed
        in float32.
    Units: eps in x^2.
    Args:
        group: whose ranks; the default group if None.
    Raises: InvalidCallError for shapes that do not fit, and as :func:`all_reduce` does.
    Source: arXiv:1910.07467; fused as in TensorRT-LLM's and FlashInfer's all-reduce.
    """
    total = residual + reduced(input, "sum", group)
    return rms_norm(total, weight, eps), total


def _longer(input: Tensor, gather_dim: int = 0, group: Any = None) -> Tensor:
    shape = list(input.shape)
    shape[gather_dim] *= ranks_of(group).size
    return input.new_empty(shape)


def _shorter(input: Tensor, scatter_dim: int = 0, group: Any = None, **_given: Any) -> Tensor:
    shape = list(input.shape)
    shape[scatter_dim] //= ranks_of(group).size
    return input.new_empty(shape)


def _rows_received(input: Tensor, send_sizes: Any = None, receive_sizes: Any = None, group: Any = None) -> Tensor:
    rows = input.shape[0] if receive_sizes is None else sum(receive_sizes)
    return input.new_empty((rows, *input.shape[1:]))


ALL_REDUCE = _collective(
    "all_reduce",
    "The sum over ranks, on each of them",
    all_reduce,
    inputs=(tensor("input: ...", _ADDED),),
    outputs=(tensor("output: ...", None),),
    params=(_OP, _GROUP),
    tolerance=_TOLERANCE_ADDED,
    fake=lambda input, **_given: torch.empty_like(input, memory_format=DENSE),
    expression=torch_all_reduce,
    work=_sums,
)
ALL_GATHER = _collective(
    "all_gather",
    "What all ranks have, on each of them",
    all_gather,
    inputs=(tensor("input: ...", _MOVED),),
    outputs=(tensor("output:", None),),
    params=(Param("gather_dim", int, 0, example=-1), _GROUP),
    judge=Exact("numbers are only moved"),
    fake=_longer,
)
REDUCE_SCATTER = _collective(
    "reduce_scatter",
    "The sum over ranks, a piece of it on each",
    reduce_scatter,
    inputs=(tensor("input: ...", _ADDED),),
    outputs=(tensor("output:", None),),
    tolerance=_TOLERANCE_ADDED,
    params=(Param("scatter_dim", int, 0, example=-1), _OP, _GROUP),
    fake=_shorter,
    expression=torch_reduce_scatter,
    work=_sums,
)
ALL_TO_ALL = _collective(
    "all_to_all",
    "Rows of every rank to every rank",
    all_to_all,
    inputs=(tensor("input: ...", _MOVED),),
    outputs=(tensor("output:", None),),
    params=(*(Param(f"{each}_sizes", (tuple, list), None, Role.PASSED) for each in ("send", "receive")), _GROUP),
    judge=Exact("numbers are only moved"),
    fake=_rows_received,
)
ALL_REDUCE_ADD_RMS_NORM = _collective(
    "all_reduce_add_rms_norm",
    "The sum over ranks, added to a residual, and its norm",
    all_reduce_add_rms_norm,
    inputs=("input: ... hidden", "residual: ... hidden", "weight: hidden"),
    outputs=("output: ... hidden", "residual_sum: ... hidden"),
    params=(Param("eps", float, 1e-6, example=0.1), _GROUP),
    axes=(
        Axis("rows", scales=True, live=True, leading=True),
        Axis("hidden", scales=True),
        Axis("payload", scales=True, live=True, implied=True),
        _COUNT,
    ),
    cases=cases("rows hidden", {"decode": (1, 8192), "batch_decode": (64, 8192), "small": (3, 96)}),
    derive=lambda arguments, values: {
        **facts_of_group(arguments, values),
        "payload": math.prod(arguments["input"].shape),
    },
    derived_from={**_FACTS, "payload": ("...", "hidden")},
    work=lambda facts: Work(5.0 * facts["payload"], 5.0 * facts["payload"] * facts["dtype"].itemsize),
    fake=lambda input, *_given, **_named: (input.new_empty(input.shape), input.new_empty(input.shape)),
    expression=then_norm(torch_all_reduce),
)


def _rows_fit(arguments: dict[str, Any]) -> list[str]:
    input_ = arguments["input"]
    if not input_.ndim:
        return ["input: wanted at least one axis, got none"]
    sizes = arguments["send_sizes"], arguments["receive_sizes"]
    return _sizes_problems(input_, *sizes, ranks_of(arguments["group"]).size) or _no_gradient(arguments)


OPERATIONS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, ALL_REDUCE_ADD_RMS_NORM)
FUNCTIONS = (
    _of("all_reduce", ALL_REDUCE, _no_gradient),
    _of("all_gather", ALL_GATHER, lambda given: _axis_problems(given, "gather_dim")),
    _of(
        "reduce_scatter",
        REDUCE_SCATTER,
        lambda given: _axis_problems(given, "scatter_dim", ranks_of(given["group"]).size),
    ),
    _of("all_to_all", ALL_TO_ALL, _rows_fit),
    _of(
        "all_reduce_add_rms_norm",
        ALL_REDUCE_ADD_RMS_NORM,
        lambda given: same_shape("residual", "input")(given) + eps_problems(given) or _no_gradient(given),
    ),
)
