"""``layerzero bench``: every legal kernel of a call side by side, with what the machine could do and what is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerzero.asking.answers import explain
from layerzero.core.dtypes import dtype_name
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Work
from layerzero.core.reasons import Reason
from layerzero.engine.policy import names_kernel
from layerzero.tuning.measuring.baseline import torch_default
from layerzero.tuning.measuring.ceiling import Ceiling, ceiling
from layerzero.tuning.measuring.contest import Contest, Entry, contest
from layerzero.tuning.measuring.jobs import Job
from layerzero.tuning.measuring.timing import Clock, Effort, measurement

TORCH = "torch's own function"

ROUGH = frozenset({"load=high", "power=throttled"})
"""Conditions under which kernels are told apart badly: other work takes the cores, or the clock is held down."""


@dataclass(frozen=True, slots=True)
class Line:
    """One kernel on one call.

    Attributes:
        name: the kernel's id, or :data:`TORCH`.
        status: what became of it, a :class:`layerzero.tuning.measuring.contest.Status`.
        chosen: whether LayerZero chose it before anything was measured here.
        median_us, p95_us, noise, samples, first_call_us: its times, None where it has none.
        gb_s, tflop_s: by the operation's declared work.
        ceiling_share: the least time that the machine's ceiling allows over its time; above 1 from a cache.
        against_torch: how many times quicker than torch's own function.
        error: largest distance from the reference in float64.
        detail: why it has no time.
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


@dataclass(frozen=True, slots=True)
class Benched:
    """One call.

    Attributes:
        name, operation, call: which call; ``call`` names its sizes.
        work: what it must do; None where the operation does not say.
        ceiling: what the machine can do.
        lines: fastest first, then those without a time.
        refused: kernels that may not run, and every reason.
        chosen: the kernel that LayerZero chose.
        condition: the machine's state while it measured, ``load=low``; empty where nothing can be read.
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

    @property
    def rough(self) -> str:
        """What of the condition makes the times rough; empty if nothing does."""
        return ", ".join(sorted(ROUGH & set(self.condition.split(","))))

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
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
) -> Benched:
    """Measure one call; its times are not remembered, and the choice shown is the one before.

    A wrong result is remembered as vetting's are: the kernel is banned until its library has another version or it
    passes again. Failures are remembered, too.
    """
    call = job.make(device)
    with torch.no_grad():
        before = explain(call.function, **call.arguments)
        default = torch_default(call.function, call.arguments)
    beside = {TORCH: default} if default is not None else {}
    found = contest(call, effort=effort, clock=clock, leave_out=leave_out, only=only, beside=beside, origin="bench")
    operation = found.facts.operation
    work = operation.work(found.facts) if operation.work else None
    dtype: Any = found.facts["dtype"]
    best = ceiling(device, dtype_name(dtype)) if work is not None else None
    default_us = measurement(found.others[TORCH]).median_us if default is not None else None
    lines = [_line(entry, before.kernel_id, work, best, default_us) for entry in found.entries]
    if default is not None:
        lines.append(_of_torch(found, work, best))
    lines.sort(key=lambda line: (line.median_us is None, line.median_us or 0.0))
    sizes: dict[str, object] = dict(found.facts.sizes())
    described = {**sizes, **job.case.params, "dtype": dtype_name(dtype), "layout": found.facts.layout}
    asked = {each.kernel.id for each in found.report.candidates if not only or _named(only, each.kernel)}
    refused = {name: reasons for name, reasons in found.report.failures.items() if name in asked}
    state = next((each.measurement.condition for each in found.entries if each.measurement is not None), "")
    return Benched(job.name, operation.name, described, work, best, tuple(lines), refused, before.kernel_id, state)


def _named(patterns: Sequence[str], kernel: Kernel) -> bool:
    return any(names_kernel(pattern, kernel) for pattern in patterns)


def _line(entry: Entry, chosen: str | None, work: Work | None, best: Ceiling | None, default_us: float | None) -> Line:
    kernel, measured = entry.kernel.id, entry.measurement
    if measured is None:
        return Line(kernel, str(entry.status), kernel == chosen, error=entry.error, detail=entry.detail)
    return Line(
        kernel,
        str(entry.status),
        kernel == chosen,
        measured.median_us,
        measured.p95_us,
        measured.noise,
        measured.samples,
        measured.first_call_us,
        *_rates(measured.median_us, work, best),
        default_us / measured.median_us if default_us is not None else None,
        entry.error,
    )


def _of_torch(found: Contest, work: Work | None, best: Ceiling | None) -> Line:
    kept = measurement(found.others[TORCH])
    rates = _rates(kept.median_us, work, best)
    return Line(TORCH, "timed", False, kept.median_us, kept.p95_us, kept.noise, kept.samples, None, *rates, 1.0)


def _rates(time_us: float, work: Work | None, best: Ceiling | None) -> tuple[float | None, float | None, float | None]:
    """GB/s, TFLOP/s, and the share of the ceiling."""
    if work is None or best is None:
        return None, None, None
    return work.bytes / time_us / 1e3, work.flops / time_us / 1e6, best.least_us(work) / time_us
