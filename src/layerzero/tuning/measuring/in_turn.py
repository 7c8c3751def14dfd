"""What measures calls in turn until its time is over: a tuning run, and a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from layerzero.asking.answers import explain
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Report
from layerzero.engine.failing import out_of_memory
from layerzero.testing.trial import lost_context, raised
from layerzero.tuning.measuring.clocks import Clock
from layerzero.tuning.measuring.contest import taking_part, window
from layerzero.tuning.measuring.jobs import Job
from layerzero.tuning.measuring.machine_state import needed_bytes
from layerzero.tuning.measuring.timing import Deadline, Effort, Pace
from layerzero.tuning.proving.vetting import Vetted


@dataclass(slots=True, kw_only=True)
class InTurn:
    """What both know while they go on; children know it as what they work for."""

    jobs: Sequence[Job]
    device: torch.device
    clock: Clock
    effort: Effort
    deadline: Deadline
    modules: Sequence[str]
    leave_out: Sequence[str]
    only: Sequence[str] = ()
    graph: bool = False
    pace: Pace = field(default_factory=Pace)
    vetted: list[Vetted] = field(default_factory=list)
    not_built: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    needs_bytes: dict[str, int] = field(default_factory=dict)

    def report(self, job: Job) -> Report:
        """Who would take part, judged without the call's data."""
        with window():
            return explain(job.facts(self.device))

    def asked(self, facts: Facts) -> Facts:
        """A call as it is when what is measured serves it."""
        return facts.on(facts.device, capturing=self.graph)

    def serving(self, report: Report) -> Report:
        """The same where what is measured serves: in a replay, for graphs."""
        if not self.graph:
            return report
        with window():
            return explain(self.asked(report.facts))

    def parties(self, report: Report) -> list[Kernel]:
        """The kernels that would be measured if all were built."""
        return [each.kernel for each in taking_part(report, self.leave_out, self.only, graph=self.graph)]

    def trouble(self, error: Exception, job: Job, report: Report) -> str:
        """Why a call was not measured, so that one call's trouble is told, and the others are measured.

        Raises: the error itself where the device's context is lost with it.
        """
        if lost_context(report.facts.device):
            raise error
        if not out_of_memory(error):
            return raised(error)
        self.needs_bytes[job.name] = needed_bytes(report.facts)
        return f"too little memory: {raised(error)}"
