"""What a call should give, and how far from it a result is.

The operation's own reference in float64, on the very values that the kernel got, is the truth; a kernel may be
``atol + rtol * |want|`` away from it. NaN and infinities must be where the truth has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.dtypes import dtype_name
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Routed, Tolerance
from layerzero.engine.config import current_policy
from layerzero.engine.functions import CALLS
from layerzero.engine.reference import reference_call
from layerzero.testing.generate import RandomCall

GUARD_BYTES = 512
"""What is watched on either side of a tensor that is written into; keeps its address aligned as it was."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The truth about one call.

    Attributes:
        operation: the operation that the call is routed to.
        results: what it returns, in float64 where it is floating, in the caller's layout.
        dtypes: dtypes that the results must have.
        mutated: what the arguments that it writes into hold afterwards.
        tolerance: how far a kernel may be.
        dtype: that of the call.
    """

    operation: str
    results: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    mutated: Mapping[str, Tensor]
    tolerance: Tolerance
    dtype: torch.dtype


def expected(call: RandomCall) -> Expected:
    """Evaluate a call in float64 by its operation's reference.

    Raises: InvalidCallError if the call means nothing.
    """
    routed = route(call)
    schema, dtype = routed.operation.schema, call_dtype(routed)
    wide = {name: widened(value) for name, value in routed.arguments.items()}
    with torch.no_grad():
        result = reference_call(replace(routed, arguments=wide))
    results = as_tuple(result)
    dtypes = tuple(each.dtype if each.dtype != torch.float64 else dtype for each in results)
    mutated = {name: wide[name] for name in schema.mutated}
    return Expected(routed.operation.name, results, dtypes, mutated, routed.operation.tolerance[dtype], dtype)


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Results as a tuple; a function that only writes into its arguments has none."""
    return result if isinstance(result, tuple) else () if result is None else (result,)


def for_kernel(truth: Expected, kernel: Kernel) -> Expected:
    """The same truth with the kernel's own tolerance, where it has one that is wider."""
    own = kernel.tolerance.get(dtype_name(truth.dtype))
    if own is None:
        return truth
    wide = Tolerance(max(own.rtol, truth.tolerance.rtol), max(own.atol, truth.tolerance.atol))
    return replace(truth, tolerance=wide)


def route(call: RandomCall) -> Routed:
    """The operation, canonical arguments and layout of a call, as the engine finds them."""
    function = CALLS[call.function].function
    return function.route(function.bind((), call.arguments), current_policy().layout)


def call_dtype(routed: Routed) -> torch.dtype:
    """The dtype of a call: that of its first tensor."""
    first = routed.arguments[routed.operation.schema.inputs[0].name]
    assert isinstance(first, Tensor)
    return first.dtype


def widened(value: Any) -> Any:
    """A float64 copy of a floating tensor; a copy of another tensor; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(torch.float64, copy=True) if value.is_floating_point() else value.detach().clone()


def difference(got: Any, want: Tensor, dtype: torch.dtype, tolerance: Tolerance) -> str:
    """Say in one line how a result is not what was wanted; empty if it is."""
    if not isinstance(got, Tensor):
        return f"wanted a tensor, got {type(got).__name__}"
    if got.shape != want.shape or got.dtype != dtype or got.device != want.device:
        return (
            f"wanted {dtype} {tuple(want.shape)} on {want.device}, got {got.dtype} {tuple(got.shape)} on {got.device}"
        )
    wide, truth = got.detach().to(torch.float64), want.to(torch.float64)
    if torch.allclose(wide, truth, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True):
        return ""
    return _worst(wide, truth, tolerance)


def _worst(got: Tensor, want: Tensor, tolerance: Tolerance) -> str:
    allowed = tolerance.atol + tolerance.rtol * want.abs()
    same = (got == want) | (got.isnan() & want.isnan())
    excess = ((got - want).abs() / allowed).masked_fill(same, 0.0)
    excess = excess.masked_fill(~same & ~(got.isfinite() & want.isfinite()), float("inf"))
    place = torch.unravel_index(excess.argmax(), excess.shape)
    where = tuple(int(axis) for axis in place)
    return (
        f"{int((excess > 1).sum())} of {want.numel()} elements too far; worst at {where}: "
        f"wanted {want[place].item():.8g}, got {got[place].item():.8g}, {float(excess[place]):.3g} times the tolerance "
        f"(rtol {tolerance.rtol}, atol {tolerance.atol})"
    )


def check(call: RandomCall, run: Callable[..., Any] | None = None, truth: Expected | None = None) -> list[str]:
    """Run a call and list what is wrong with it: results, what it wrote into, what it should not have touched.

    Args:
        run: what to call with the arguments; the library's own function by default.
        truth: what :func:`expected` said, if it was asked before.
    Mutated arguments are copied first, so that the call can be run again.
    """
    truth = truth or expected(call)
    arguments = {name: _guarded(value) if name in truth.mutated else value for name, value in call.arguments.items()}
    before = {name: _memory(value).clone() for name, value in _tensors(arguments)}
    found = problems((run or CALLS[call.function].fast)(**arguments), arguments, truth)
    for name, memory in before.items():
        after = _memory(arguments[name])
        if name in truth.mutated:
            around = _around(arguments[name])
            if not torch.equal(after[around], memory[around]):
                found.append(f"{name}: wanted what lies around it untouched, got other bytes there")
        elif not torch.equal(after, memory):
            found.append(f"{name}: wanted it untouched, got other bytes in its memory")
    return found


def _guarded(tensor: Tensor) -> Tensor:
    """A copy with bytes on either side that nobody may write; read as floating numbers they are NaN."""
    memory = _memory(tensor)
    room = torch.full((memory.numel() + 2 * GUARD_BYTES,), 0xFF, dtype=torch.uint8, device=tensor.device)
    room[GUARD_BYTES : GUARD_BYTES + memory.numel()] = memory
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    offset = tensor.storage_offset() + GUARD_BYTES // tensor.itemsize
    copy.set_(room.untyped_storage(), offset, tensor.shape, tensor.stride())
    return torch._neg_view(copy) if tensor.is_neg() else copy


def _around(tensor: Tensor) -> Tensor:
    """Which bytes of the memory that a tensor is a view of are none of its elements'."""
    size = tensor.itemsize
    around = torch.ones(_memory(tensor).numel() // size, dtype=torch.bool, device=tensor.device)
    around.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return around.repeat_interleave(size)


def problems(result: Any, arguments: Mapping[str, Any], truth: Expected) -> list[str]:
    """List what is wrong with a result, and with the arguments that were written into."""
    results = as_tuple(result)
    if len(results) != len(truth.results):
        return [f"wanted {len(truth.results)} results, got {len(results)}"]
    found = []
    for index, (got, want, dtype) in enumerate(zip(results, truth.results, truth.dtypes, strict=True)):
        found.append(_told(f"result {index}", difference(got, want, dtype, truth.tolerance)))
    for name, want in truth.mutated.items():
        found.append(_told(name, difference(arguments[name], want, arguments[name].dtype, truth.tolerance)))
    return [problem for problem in found if problem]


def _told(name: str, problem: str) -> str:
    return f"{name}: {problem}" if problem else ""


def _tensors(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in arguments.items() if isinstance(value, Tensor)]


def _memory(tensor: Tensor) -> Tensor:
    """Every byte of the memory that a tensor is a view of, what lies around it included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def copied(value: Any) -> Any:
    """The same values in a copy of the whole memory, at the same strides and offset."""
    if not isinstance(value, Tensor):
        return value
    memory = _memory(value).clone().untyped_storage()
    copy = torch.empty(0, dtype=value.dtype, device=value.device)
    copy.set_(memory, value.storage_offset(), value.shape, value.stride())
    return torch._neg_view(copy) if value.is_neg() else copy
