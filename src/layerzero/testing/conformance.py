"""Put kernels against their operations' references: all that they declare, at its boundaries, in other processes.

    from layerzero.testing import conformance

    report = conformance.run(kernels=["mine.*"])
    print(report)
    assert report.ok and report.passed

Kernels run in a child process, so that one that dies or hangs is a finding: the check that it died in is recorded, and
another child goes on after it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from layerzero.core.device import Device
from layerzero.core.errors import LayerZeroError
from layerzero.testing import conformance_child
from layerzero.testing.child_main import Message, Tell
from layerzero.testing.children import DEATHS, End, Task, run_apart
from layerzero.testing.report import ConformanceReport, KernelReport, Result

__all__ = ["ConformanceReport", "KernelReport", "Result", "run"]

log = logging.getLogger("layerzero")

SECONDS = 60.0
"""How long a check may be silent before its process counts as hanging."""

CALLS = 20
"""Random calls of each operation and dtype."""

Progress = Callable[[str], None]


def run(
    kernels: Sequence[str] | None = None,
    operation: str = "*",
    *,
    backends: Sequence[str] | None = None,
    device: str | None = None,
    seed: int = 0,
    calls: int = CALLS,
    modules: Sequence[str] = (),
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> ConformanceReport:
    """Check kernels against the references of their operations.

    Args:
        kernels: ids, globs or libraries; every kernel if None.
        operation: an operation, function, alias or glob.
        backends: libraries; those of their kernels that ``kernels`` names.
        device: where the tensors lie; ``cuda`` where there is one, else ``cpu``.
        seed: draws the random calls; the same seed draws the same.
        calls: random calls of each operation and dtype.
        modules: modules to import first, whose import registers kernels.
        seconds: how long a check may be silent before it counts as hanging.
        progress: called with a line for each kernel and operation as its checks begin.
    Returns: the report. A kernel that only this process knows, registered by decorator, is checked in this process, and
        the report says so.
    Raises: ValueError for a module that does not import; KeyError for an unknown operation; RuntimeError if a process
        does not even start.
    """
    started = time.perf_counter()
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = ConformanceReport(seed, target)
    named = (None if kernels is None else list(kernels), None if backends is None else list(backends))
    ask = conformance_child.Ask(*named, operation, target, seed, calls, list(modules))
    checks = _Checks(report, ask, seconds, progress or (lambda _: None))
    run_apart(
        "layerzero.testing.conformance_child",
        checks.tasks,
        found=checks.found,
        ended=checks.ended,
        begins=checks.begins,
        modules=modules,
        environment={},
    )
    if not modules:
        checks.in_this_process()
    report.seconds = time.perf_counter() - started
    return report


class _Checks:
    """Has every check done in children, and records what each of them found or died of."""

    def __init__(
        self, report: ConformanceReport, ask: conformance_child.Ask, seconds: float, progress: Progress
    ) -> None:
        self.report, self.ask, self.seconds, self.progress = report, ask, seconds, progress
        self.tasks = deque([Task(ask, "", seconds)])
        self.told = ("", "")

    def in_this_process(self) -> None:
        """Check what no child could see."""
        seen = {each.kernel_id for each in self.report.kernels}
        conformance_child.battery.cache_clear()  # of kernels that had these names before
        for kernel in conformance_child.selected(self.ask):
            if kernel.id in seen:
                continue
            mine = conformance_child.described(kernel, self.ask.operation, Device.detect(self.ask.device))
            mine.note = "registered in this process only, and so checked in it: a crash or a hang would have ended it"
            self.report.kernels.append(mine)
            for task in self._checks([mine]):
                conformance_child.play(task.job, Tell(functools.partial(self._heard_here, task)))

    def _heard_here(self, task: Task, message: Message) -> None:
        if message.kind == "found":
            self.found(task, message.value)

    def _checks(self, reports: Sequence[KernelReport]) -> Iterator[Task]:
        """A library's kernels go to one child: all that they declare, then what lies beyond, which may do harm."""
        for source in dict.fromkeys(each.source for each in reports):
            able = [each for each in reports if each.source == source and not each.refused]
            for beyond, each in itertools.product((False, True), able):
                for name in each.operations:
                    job = conformance_child.Play(self.ask, each.kernel_id, name, beyond, [])
                    yield Task(job, each.kernel_id, self.seconds, source, each, harmful=beyond)

    def begins(self, task: Task) -> None:
        """Tell of a kernel and operation that comes up."""
        if self.told != (told := (task.owner, task.job.operation)):
            self.told = told
            self.progress(": ".join(told))

    def found(self, task: Task, value: Any) -> None:
        """Take in the kernels, or the result of a check."""
        if task.about is None:
            reports = msgspec.convert(value, list[KernelReport])
            self.report.kernels.extend(reports)
            self.tasks.extend(self._checks(reports))
            return
        result = msgspec.convert(value, Result, from_attributes=True)
        task.job.done.append(result.check)
        if result.status != "nothing":
            task.about.results.append(result)

    def ended(self, task: Task, end: End) -> Task | None:
        """Record the check that a child ended in; beyond a limit that only shows that the limit is needed."""
        given_up = f"given up after {DEATHS} processes that died or hung"
        how = {
            "died": f"died with {end.how}",
            "hung": f"no sign of life for {end.how}; the process was killed",
            "starved": f"no sign of life for {end.how} on a machine that had no room for it",
            "killed": f"its process was killed from outside with {end.how}",
        }
        if end.kind == "given up":
            if not any(each.message == given_up for each in task.about.results):
                self._add(task, "every other check", "not tried", given_up)
            return None
        if end.step is None:
            said = (end.reason.strip() or "without a word").splitlines()
            log.debug("a conformance process ended outside of any check: %s", end.reason)
            raise LayerZeroError(f"a conformance process ended outside of any check: {said[-1]}")
        message = f"{how[end.kind]} during {end.step!r}" + (f", {end.at}" if end.at else "")
        message += f" ({end.words[:200]})" if end.words else ""
        status = "not tried" if end.kind in ("killed", "starved") else str(end.kind)
        if task.job.beyond and status != "not tried":
            status, message = "needed", message.replace("died with", "dies with", 1)
        self._add(task, end.step, status, message, end.seconds)
        return task

    def _add(self, task: Task, check: str, status: str, message: str, seconds: float = 0.0) -> None:
        task.job.done.append(check)
        task.about.results.append(Result(task.job.kernel, task.job.operation, check, status, message, seconds))
