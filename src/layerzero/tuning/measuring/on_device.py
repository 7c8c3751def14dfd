"""Device times of the kernels of one call: each in a CUDA graph of its own, on copies of the call beyond the cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from layerzero.core.handle import CAPTURABLE, Handle
from layerzero.core.plan import Report
from layerzero.engine.functions import CALLS
from layerzero.testing.generate import RandomCall
from layerzero.tuning.measuring.baseline import torch_default
from layerzero.tuning.measuring.contest import plan_in_a_capture, window
from layerzero.tuning.measuring.device_time import Device, Run, cache_bytes, copies_needed, device_times

MOST_BYTES = 4 * 2**30
"""What copies of a call may need; a call that brings more finds in the cache what an earlier one left there."""

UNSAFE = "its kernel is not graph-safe"


class Timed(StrEnum):
    """What a call's time is."""

    CALL = "call"
    """What a caller waits for."""
    DEVICE = "device"
    """What the device needs, however slow the host launches."""
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The device's time of one kernel on one call.

    Attributes:
        time_us: microseconds of a call; None where it could not be captured.
        cache: ``cold`` where calls took turns through more copies than the cache holds, else ``warm``.
        problem: why it was not captured.
    """

    time_us: float | None
    cache: str
    problem: str = ""


def on_device(
    call: RandomCall,
    report: Report,
    kernels: Collection[str],
    *,
    beside: str = "",
    samples: int = 10,
    graphs: Device | None = None,
    cache: int | None = None,
) -> dict[str, OnDevice]:
    """Time what the device needs for a call, by kernels that ran it and were right.

    Args:
        kernels: ids; those among the report's that may run.
        beside: also time torch's own function, under this name, where there is one.
        samples: of the median.
        graphs: what captures; CUDA graphs if None.
        cache: bytes of the device's cache; asked of the device if None.
    """
    held = cache_bytes(_tensors(call)[0].device) if cache is None else cache
    calls, cold = _copies(call, report, held)
    runs: dict[str, list[Run]] = {}
    found: dict[str, OnDevice] = {}
    state = "cold" if cold else "warm"
    with window():
        for candidate in report.candidates:
            if candidate.kernel.id not in kernels:
                continue
            if not candidate.kernel.graph_safe:
                found[candidate.kernel.id] = OnDevice(None, state, UNSAFE)
                continue
            inside = plan_in_a_capture(candidate.kernel, report, call)
            if isinstance(inside, str):
                found[candidate.kernel.id] = OnDevice(None, state, inside)
                continue
            plan, _ = inside
            bind = CALLS[call.function].dispatcher.function.bind
            runs[candidate.kernel.id] = [
                functools.partial(plan.run, *bind((), each.arguments).values()) for each in calls
            ]
        default = [torch_default(each.function, each.arguments) for each in calls] if beside else []
        if default and default[0] is not None:
            runs[beside] = [each for each in default if each is not None]
        times = device_times(runs, samples=samples, device=graphs)
    return found | {name: OnDevice(each.time_us, state, each.problem) for name, each in times.items()}


def _copies(call: RandomCall, report: Report, held: int) -> tuple[list[RandomCall], bool]:
    """The call and copies of it, and whether each finds the cache cold."""
    tensors, operation = _tensors(call), report.facts.operation
    size = sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors)
    count, cold = copies_needed(operation.work(report.facts).bytes if operation.work is not None else size, held)
    owned = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    if (count - 1) * sum(owned.values()) > MOST_BYTES:
        count, cold = 1, False
    copies = [call, *(_copy(call) for _ in range(count - 1))]
    return copies, cold and not _is_shared(copies)


def _tensors(call: RandomCall) -> list[Tensor]:
    return [value for value in call.arguments.values() if isinstance(value, Tensor)]


def _is_shared(calls: Collection[RandomCall]) -> bool:
    """Whether copies of a call read what hangs on one handle: nobody could make another."""
    first, *others = calls
    kept = [each for each in first.arguments.values() if isinstance(each, Handle)]
    return any(mine is each for copy in others for mine in copy.arguments.values() for each in kept)


def _copy(call: RandomCall) -> RandomCall:
    """The same call on other memory; what shared memory shares it again, since a plan may build on that."""
    memory: dict[int, torch.UntypedStorage] = {}
    arguments: dict[str, Any] = dict(call.arguments)
    for name, value in call.arguments.items():
        if isinstance(value, Tensor):
            own = value.untyped_storage()
            if own.data_ptr() not in memory:
                memory[own.data_ptr()] = own.clone()  # type: ignore[no-untyped-call]
            there = memory[own.data_ptr()]
            copy = torch.empty(0, dtype=value.dtype, device=value.device)
            arguments[name] = copy.set_(there, value.storage_offset(), value.shape, value.stride())
    function = CALLS[call.function].dispatcher.function
    for name in function.handles:  # what kernels keep there is of these tensors, too
        param, handle = function.param(name), arguments.get(name)
        if param is not None and param.make is not None and handle is not None:
            arguments[name] = param.make(arguments, getattr(handle, "kind", "") == CAPTURABLE)
    return RandomCall(call.function, arguments, call.name)
