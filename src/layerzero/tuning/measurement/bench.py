"""One call of ``layerzero bench``: every legal kernel side by side, with what the machine could do and what is chosen.

Device times are taken of each kernel in a CUDA graph of its own, on copies of the call beyond the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from layerzero.core.dtypes import dtype_name
from layerzero.core.evidence import Measurement
from layerzero.core.handle import Handle
from layerzero.core.operation import Work
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason
from layerzero.engine.failures import out_of_memory
from layerzero.engine.functions import CALLS
from layerzero.engine.policy import names_any
from layerzero.inspection.answers import explain
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import duplicate, tensors
from layerzero.tuning.measurement.admission import Ceiling, ceiling
from layerzero.tuning.measurement.clocks import Clock, DeviceTime, Graphs, Run, cache_bytes, copies_needed, device_times
from layerzero.tuning.measurement.contest import (
    Contest,
    ContestEntry,
    contest,
    plan_in_a_capture,
    torch_default,
    window,
)
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.measurement.timing import Effort, carried, measurement

MOST_BYTES = 4 * 2**30
"""What copies of a call may need; a call that brings more finds in the cache what an earlier one left there."""

UNSAFE = "its kernel is not graph-safe"


class TimedBy(StrEnum):
    """What a call's time is."""

    CALL = "call"
    """What a caller waits for."""
    DEVICE = "device"
    """What the device needs, however slow the host launches."""
    BOTH = "both"


def on_device(
    call: RandomCall,
    report: Report,
    kernels: Collection[str],
    *,
    beside: str = "",
    samples: int = 10,
    graphs: Graphs | None = None,
    cache: int | None = None,
) -> dict[str, DeviceTime]:
    """Time what the device needs for a call, by kernels that ran it and were right.

    Args:
        kernels: ids; those among the report's that may run.
        beside: also time torch's own function, under this name, where there is one.
        samples: of the median.
        graphs: what captures; CUDA graphs if None.
        cache: bytes of the device's cache; read from the device if None.
    """
    held = cache_bytes(next(iter(tensors(call).values())).device) if cache is None else cache
    calls, cold = _copies(call, report, held)
    runs: dict[str, list[Run]] = {}
    found: dict[str, DeviceTime] = {}
    with window():
        for candidate in report.candidates:
            if candidate.kernel.id not in kernels:
                continue
            if not candidate.kernel.graph_safe:
                found[candidate.kernel.id] = DeviceTime(None, problem=UNSAFE)
                continue
            inside = plan_in_a_capture(candidate.kernel, report, call)
            if isinstance(inside, str):
                found[candidate.kernel.id] = DeviceTime(None, problem=inside)
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
    return {name: replace(each, cache="cold" if cold else "warm") for name, each in (found | times).items()}


def _copies(call: RandomCall, report: Report, held: int) -> tuple[list[RandomCall], bool]:
    """The call and copies of it, and whether each finds the cache cold."""
    given, operation = [*tensors(call).values()], report.facts.operation
    size = sum(math.prod(each.shape) * each.dtype.itemsize for each in given)
    count, cold = copies_needed(operation.work(report.facts).bytes if operation.work is not None else size, held)
    owned = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in given}
    if (count - 1) * sum(owned.values()) > MOST_BYTES:
        count, cold = 1, False
    copies = [call, *(duplicate(call) for _ in range(count - 1))]
    return copies, cold and not _is_shared(copies)


def _is_shared(calls: Collection[RandomCall]) -> bool:
    """Whether copies of a call read what hangs on one handle, of which there is no second."""
    first, *others = calls
    kept = [each for each in first.arguments.values() if isinstance(each, Handle)]
    return any(mine is each for copy in others for mine in copy.arguments.values() for each in kept)


TORCH = "torch's own function"

ROUGH = frozenset({"load=high", "power=throttled"})
"""Conditions under which kernels are hard to distinguish: other work takes the cores, or the clock is held down."""


@dataclass(frozen=True, slots=True)
class Line:
    """One kernel on one call.

    Attributes:
        name: the kernel's id, or :data:`TORCH`.
        status: what became of it, a :class:`layerzero.tuning.measurement.contest.Status`.
        chosen: whether LayerZero chose it before anything was measured here.
        median_us, p95_us, noise, samples, first_call_us: its times, None where it has none.
        gb_s, tflop_s: by the operation's declared work.
        ceiling_share: the least time that the machine's ceiling allows over its time; above 1 from a cache.
        against_torch: how many times quicker than torch's own function, by these times, whatever their noise.
        error: distance from the reference in float64, relative to its norm.
        detail: why it has no time.
        device_us: what the device needs, however slow the host launches; None on a CPU or where it was not wanted.
        device_from: ``graph, cold`` or ``graph, warm``: replays of a CUDA graph that finds the tensors outside of the
            L2 cache or in it; ``events``: one launch between two events, cold.
        device_detail: why it is no graph's.
        events_us: one launch between two events behind a full queue, cold, the host's launching included where that
            takes longer than the queue.
    """

    name: str
    status: str
    chosen: bool = False
    median_us: float | None = None
    p95_us: float | None = None
    noise: float | None = None
    samples: int = 0
    first_call_us: float | None = None
    gb_s: float | None = None
    tflop_s: float | None = None
    ceiling_share: float | None = None
    against_torch: float | None = None
    error: float | None = None
    detail: str = ""
    device_us: float | None = None
    device_from: str = ""
    device_detail: str = ""
    events_us: float | None = None

    def by(self, timed: TimedBy) -> float | None:
        """The time that lines are compared by."""
        return self.device_us if timed is TimedBy.DEVICE else self.median_us

    def gain_over(self, other: Line, timed: TimedBy) -> float | None:
        """How many times as long the other takes, as far as samples say so; 1 within the noise, None without times."""
        own_us, other_us = self.by(timed), other.by(timed)
        if not own_us or not other_us:
            return None
        if timed is TimedBy.DEVICE:  # a device's time is no part of what the noise of calls tells
            return other_us / own_us
        return carried(own_us, other_us, self.noise, other.noise) or 1.0


@dataclass(frozen=True, slots=True)
class Benched:
    """One call.

    Attributes:
        name, operation, call: which call; ``call`` names its sizes.
        work: what it must do; None where the operation does not say.
        ceiling: what the machine can do; None without work, and where memory is too little to measure it.
        lines: fastest first, then those without a time.
        refused: kernels that may not run, and every reason.
        chosen: the kernel that LayerZero chose.
        condition: the machine's state while it measured, ``load=low``; empty where nothing can be read.
        timed: which times were wanted; rates and order go by the device's where they alone were.
    """

    name: str
    operation: str
    call: dict[str, object]
    work: Work | None
    ceiling: Ceiling | None
    lines: tuple[Line, ...]
    refused: dict[str, tuple[Reason, ...]]
    chosen: str | None
    condition: str = ""
    timed: TimedBy = TimedBy.CALL

    @property
    def rough(self) -> str:
        """What of the condition makes the times rough; empty if nothing does."""
        return ", ".join(sorted(ROUGH & set(self.condition.split(","))))

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "operation": self.operation,
            "call": self.call,
            "flops": self.work.flops if self.work else None,
            "bytes": self.work.bytes if self.work else None,
            "ceiling_gb_s": self.ceiling.gb_s if self.ceiling else None,
            "ceiling_tflop_s": self.ceiling.tflop_s if self.ceiling else None,
            "chosen": self.chosen,
            "condition": self.condition,
            "timed": str(self.timed),
            "kernels": [{name: getattr(line, name) for name in Line.__slots__} for line in self.lines],
            "refused": {kernel: [str(reason) for reason in reasons] for kernel, reasons in self.refused.items()},
        }


def bench(
    job: Job,
    device: torch.device,
    *,
    effort: Effort,
    clock: Clock,
    leave_out: Sequence[str] = (),
    only: Sequence[str] = (),
    timed: TimedBy = TimedBy.CALL,
    passed: Callable[[], bool] = lambda: False,
) -> Benched:
    """Measure one call; its times are not remembered, and the choice shown is the one before.

    Unless ``timed`` is ``call``, kernels that were right are timed again by replays of CUDA graphs, on a CUDA device;
    one that cannot be captured keeps the time between two events, and the line says why.

    A wrong result is remembered as vetting's are: the kernel is banned until its library has another version or it
    passes again. Failures are remembered, too.

    Raises: TimeOverError where ``passed`` says that the time is over before all kernels were compared.
    """
    call = job.make(device)
    with torch.no_grad():
        before = explain(call.function, **call.arguments)
        default = torch_default(call.function, call.arguments)
    beside = {TORCH: default} if default is not None else {}
    found = contest(
        call, effort=effort, clock=clock, leave_out=leave_out, only=only, beside=beside, origin="bench", passed=passed
    )
    operation = found.facts.operation
    work = operation.work(found.facts) if operation.work else None
    dtype: Any = found.facts["dtype"]
    best = _ceiling(device, dtype_name(dtype)) if work is not None else None
    lines = [_line(entry, before.kernel_id) for entry in found.entries]
    if default is not None:
        lines.append(Line(TORCH, "timed", **_times(measurement(found.others[TORCH]))))
    if timed is not TimedBy.CALL:
        ran = {line.name for line in lines if line.median_us is not None}
        beside_name = TORCH if default is not None else ""
        alone = on_device(call, found.report, ran, beside=beside_name, samples=effort.samples)
        parts = {each.kernel.id: each.measurement.device_us for each in found.entries if each.measurement is not None}
        lines = [_with_device(line, alone.get(line.name), parts.get(line.name)) for line in lines]
    of_torch = next((line.by(timed) for line in lines if line.name == TORCH), None)
    lines = [_rated(line, line.by(timed), of_torch, work, best) for line in lines]
    lines.sort(key=lambda line: (line.by(timed) is None, line.by(timed) or 0.0))
    sizes: dict[str, object] = dict(found.facts.sizes())
    described = {**sizes, **job.case.params, "dtype": dtype_name(dtype), "layout": found.facts.layout}
    asked = {each.kernel.id for each in found.report.candidates if not only or names_any(only, each.kernel)}
    refused = {name: reasons for name, reasons in found.report.failures.items() if name in asked}
    state = next((each.measurement.condition for each in found.entries if each.measurement is not None), "")
    return Benched(
        job.name, operation.name, described, work, best, tuple(lines), refused, before.kernel_id, state, timed
    )


def _ceiling(device: torch.device, dtype: str) -> Ceiling | None:
    """What the machine can do; None where memory does not hold what that is measured by: the call's times stay."""
    try:
        return ceiling(device, dtype)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None


def benched(found: Contest) -> Benched:
    """A contest without more than its times: of a call that says neither its work nor its sizes."""
    report = found.report
    lines = tuple(_line(entry, report.kernel_id) for entry in found.entries)
    return Benched(found.name, report.operation, {}, None, None, lines, report.failures, report.kernel_id)


def _line(entry: ContestEntry, chosen: str | None) -> Line:
    name = entry.kernel.id
    return Line(
        name, str(entry.status), name == chosen, **_times(entry.measurement), error=entry.error, detail=entry.detail
    )


def _times(measured: Measurement | None) -> dict[str, Any]:
    names = ("median_us", "p95_us", "noise", "samples", "first_call_us") if measured is not None else ()
    return {name: getattr(measured, name) for name in names}


def _with_device(line: Line, alone: DeviceTime | None, events_us: float | None) -> Line:
    """A line with the device's time: a graph's, or what lay between two events."""
    line = replace(line, events_us=events_us)
    if alone is None:
        return line
    if alone.time_us is not None:
        return replace(line, device_us=alone.time_us, device_from=f"graph, {alone.cache}")
    told = "events" if events_us is not None else ""
    return replace(line, device_us=events_us, device_from=told, device_detail=alone.problem)


def _rated(line: Line, time_us: float | None, of_torch: float | None, work: Work | None, best: Ceiling | None) -> Line:
    """A line with GB/s, TFLOP/s, the share of the ceiling and the speed against torch, all by one time."""
    if time_us is None:
        return line
    rated = replace(line, against_torch=None if of_torch is None else of_torch / time_us)
    if work is None or best is None:
        return rated
    gb_s, tflop_s = work.bytes / time_us / 1e3, work.flops / time_us / 1e6
    return replace(rated, gb_s=gb_s, tflop_s=tflop_s, ceiling_share=best.least_us(work) / time_us)
