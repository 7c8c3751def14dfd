"""``lz.tune``: measure kernels on the calls that matter, and remember the times for calls like them.

Nothing is measured outside this window, never by surprise. What is known already, in this environment and still valid,
is not measured again: an interrupted run goes on where it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerzero.core.evidence import Measurement, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Report
from layerzero.engine.answers import explain
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.failing import out_of_memory
from layerzero.tuning.contest import Contest, contest, window
from layerzero.tuning.jobs import Job
from layerzero.tuning.timing import Effort, clock_of

Progress = Callable[["Step"], None]


@dataclass(frozen=True, slots=True)
class Step:
    """Where a tuning run is: told before and after each call that it looks at.

    Attributes:
        job: the call.
        number, total: which of how many.
        contest: what was found; None before, and where there was nothing to measure.
        skipped: why nothing was measured; empty where something was, or will be.
    """

    job: Job
    number: int
    total: int
    contest: Contest | None = None
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a tuning run did.

    Attributes:
        contests: what was measured, in order.
        known: calls whose times were known before.
        skipped: calls that could not be measured, with the reason.
        left: calls that time did not suffice for.
        winners_changed: calls for which another kernel is chosen now.
        seconds: how long it took; ``compile_s`` of them went into first calls.
    """

    contests: tuple[Contest, ...]
    known: int
    skipped: Mapping[str, str]
    left: int
    winners_changed: int
    seconds: float
    compile_s: float

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "measured": [_contest_data(each) for each in self.contests],
            "known": self.known,
            "skipped": dict(self.skipped),
            "left": self.left,
            "winners_changed": self.winners_changed,
            "seconds": self.seconds,
            "compile_s": self.compile_s,
        }

    def __str__(self) -> str:
        text = f"{len(self.contests)} calls measured in {self.seconds:.0f} s, {self.compile_s:.0f} s of it first calls"
        text += f"; {self.known} were known, {self.left} are left"
        return f"{text}; {len(self.skipped)} could not be measured" if self.skipped else text


def _contest_data(found: Contest) -> dict[str, object]:
    return {
        "call": found.name,
        "operation": found.report.operation,
        "before": found.report.kernel_id,
        "kernels": [entry.to_dict() for entry in found.entries],
    }


def run_jobs(
    jobs: Sequence[Job],
    device: torch.device,
    *,
    effort: Effort,
    budget_s: float | None = None,
    again: bool = False,
    graph: bool = False,
    leave_out: Sequence[str] = (),
    progress: Progress | None = None,
) -> Tuned:
    """Measure jobs in their order until the budget is spent."""
    started = time.perf_counter()
    tell = progress or _silent
    clock = clock_of(device, graph=graph)
    contests: list[Contest] = []
    skipped: dict[str, str] = {}
    known = changed = looked_at = 0
    for number, job in enumerate(jobs, 1):
        if budget_s is not None and time.perf_counter() - started > budget_s:
            break
        looked_at = number
        tell(Step(job, number, len(jobs)))
        with window():
            before = explain(job.facts(device))
        if not again and _known(before):
            known += 1
            tell(Step(job, number, len(jobs), skipped="known"))
            continue
        try:
            found = contest(job.make(device), effort=effort, graph=graph, leave_out=leave_out, clock=clock)
        except Exception as error:
            if not out_of_memory(error):
                raise
            skipped[job.name] = f"too little memory: {str(error).splitlines()[0][:200]}"
            tell(Step(job, number, len(jobs), skipped=skipped[job.name]))
            continue
        changed += bool(found.times) and _record_times(found.facts, found.times)
        contests.append(found)
        tell(Step(job, number, len(jobs), found))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    first_us = sum(each.first_call_us or 0.0 for found in contests for each in found.times.values())
    seconds = time.perf_counter() - started
    return Tuned(tuple(contests), known, skipped, len(jobs) - looked_at, changed, seconds, first_us / 1e6)


def _silent(_: Step) -> None:
    return None


def _record_times(facts: Facts, times: Mapping[Kernel, Measurement]) -> bool:
    """Write times; tell whether another kernel is ahead by more than the noise, and let calls be chosen anew then."""
    kernels = list(times)
    before = _winner(ENGINE.ledger.evidence(kernels, facts))
    for kernel, found in times.items():
        ENGINE.ledger.record_time(kernel, facts, found)
    changed = _winner(ENGINE.ledger.evidence(kernels, facts)) != before
    if changed:
        ENGINE.bump()
    return changed


def _winner(evidence: Mapping[str, Any]) -> str | None:
    return min(evidence, key=lambda name: evidence[name].time_us, default=None)


def _known(report: Report) -> bool:
    """Whether every kernel that would take part has a time that was measured here, or failed here before."""
    legal = [each for each in report.candidates if each.legal]
    taking_part = [each for each in legal if not each.kernel.is_reference] or legal
    failures = ENGINE.ledger.failures()
    return all(
        each.provenance == Provenance.MEASURED or (each.kernel.id, report.operation) in failures for each in taking_part
    )
