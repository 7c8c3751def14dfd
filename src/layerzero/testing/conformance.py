"""Put kernels against their operations' references: all that they declare, at its boundaries, in other processes.

    from layerzero.testing import conformance

    report = conformance.run(kernels=["mine.*"])
    print(report)
    assert report.ok and report.passed

Kernels run in a child process, so that one that dies or hangs is a finding: the check that it died in is recorded, and
another child goes on after it. :func:`play` is what a child does.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import platform
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from layerzero.core.device import Device, device_here
from layerzero.core.errors import LayerZeroError
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import home_of
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import log
from layerzero.engine.failures import out_of_memory
from layerzero.engine.policy import names_any
from layerzero.engine.probe import this_machine
from layerzero.engine.registry import REGISTRY
from layerzero.testing.battery import Battery, KernelCheck
from layerzero.testing.child_main import Message, Tell
from layerzero.testing.children import DEATHS, End, Task, run_apart
from layerzero.testing.report import ConformanceReport, KernelReport, Result
from layerzero.testing.single_run import lost_context, raised

__all__ = ["ConformanceReport", "KernelReport", "Result", "run"]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Which kernels there are of those that are named, by id, glob or library; and what draws the calls for them."""

    kernels: list[str] | None
    backends: list[str] | None
    operation: str
    device: str
    seed: int
    calls: int
    modules: list[str]


class Play(msgspec.Struct, frozen=True, tag=True):
    """Checks of a kernel in an operation: all of what is declared, or of what lies ``beyond``; without those done."""

    asked: Ask
    kernel: str
    operation: str
    beyond: bool
    done: list[str]


Job = Ask | Play


def selected(job: Ask) -> list[Kernel]:
    """The kernels that a job names, of the operations that it names; those of one library follow each other."""
    found = [
        kernel
        for kernel in REGISTRY.kernels(job.operation)
        if (job.backends is None or kernel.source in job.backends)
        and (job.kernels is None or names_any(job.kernels, kernel))
        # others than kernels of tensors are proved by vetting, for the calls in question
        and any(REGISTRY.operation(name).plain is None for name in kernel.operations)
    ]
    return sorted(found, key=lambda kernel: (kernel.source, kernel.id))


def described(kernel: Kernel, operation: str, device: Device) -> KernelReport:
    """The empty report of a kernel: what it is, and why it cannot run here, if so."""
    names = set(REGISTRY.operations_named(operation))
    state = this_machine().state(kernel.backend, device)
    reason = None if state.untested else state.reason  # an untested version is what may be tested
    if reason is None and device.platform not in kernel.backend.platforms and kernel.backend.origin != "decorator":
        wanted = " or ".join(kernel.backend.platforms)
        reason = Reason(ReasonCode.PLATFORM_MISMATCH, "platform", wanted, device.platform)
    package = next((name for name in kernel.backend.distributions if name), "")
    widened = ", ".join(f"{name}: rtol {each.rtol}, atol {each.atol}" for name, each in kernel.tolerance.items())
    return KernelReport(
        kernel.id,
        kernel.source,
        tuple(name for name in kernel.operations if name in names),
        f"{package} {state.version}".strip(),
        str(reason) if reason else "",
        tolerance=f"{widened}, because {kernel.tolerance_reason}" if widened else "",
    )


def machine(device: Device) -> dict[str, object]:
    """What a run was made with: versions, and the device with its runtime and driver, or a CPU's instructions."""
    from layerzero import __version__

    return {
        "date": time.strftime("%Y-%m-%d"),
        "layerzero": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": device.platform,
        "device": device.name,
        "instructions": sorted(device.instruction_sets),
        "runtime": device.runtime,
        "driver": device.driver,
    }


@functools.cache
def battery(kernel: str, operation: str, device: str, seed: int, calls: int) -> Battery:
    """What a kernel's two jobs share: looking for calls that it takes costs as much as some checks."""
    return Battery(REGISTRY.kernel(kernel), REGISTRY.operation(operation), device, seed, calls)


def play(job: Play, tell: Tell) -> None:
    """Run every check that is not done yet."""
    mine = battery(job.kernel, job.operation, job.asked.device, job.asked.seed, job.asked.calls)
    for check in mine.probes() if job.beyond else mine.checks():
        if check.name not in job.done:
            _run(check, job, tell)


def _run(check: KernelCheck, job: Play, tell: Tell) -> None:
    tell.begins(check.name, check.seconds)
    started = time.perf_counter()
    try:
        outcome = check.play(tell.runs)
        status, message = (outcome.status, outcome.message) if outcome else ("nothing", "")
    except Exception as error:  # noqa: BLE001  # a check that fails itself is reported, as something wrong
        where = traceback.extract_tb(error.__traceback__)[-1]
        status = "not tried" if out_of_memory(error) else "wrong"  # another process on the device may have it all
        message = f"the check itself {raised(error)} ({where.name}, line {where.lineno})"
    if lost := lost_context(Device.detect(job.asked.device)):
        tell.leave(f"{message}; {lost}" if message else lost)
    seconds = time.perf_counter() - started
    tell.found(Result(job.kernel, job.operation, check.name, status, message, seconds), more=True)


def imported(modules: Sequence[str]) -> str:
    """Import modules that should register kernels; say what is wrong with one that does not."""
    for module in modules:
        before = len(REGISTRY.kernels())
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a foreign module raises, or a script's end
            wanted = "wanted a module that imports and registers kernels"
            return f"--module {module}: {wanted}, got {type(error).__name__}: {error}"
        mine = any(f"{home_of(kernel)}.".startswith(f"{module}.") for kernel in REGISTRY.kernels())
        if len(REGISTRY.kernels()) == before and not mine:
            more = "register them where it is imported, with @lz.register_kernel or lz.register_backend"
            return f"--module {module}: wanted a module that registers kernels, got one that registers none; {more}"
    return ""


@functools.cache
def _prepared(modules: tuple[str, ...]) -> str:
    torch.set_num_threads(1)  # small tensors gain nothing from more; some checks take all
    return imported(modules)


def work(job: Job, tell: Tell) -> None:
    """Do one job."""
    asked = job if isinstance(job, Ask) else job.asked
    if problem := _prepared(tuple(asked.modules)):
        tell.refused(problem)
    elif isinstance(job, Play):
        play(job, tell)
    else:
        device = Device.detect(asked.device)
        try:
            tell.found([described(kernel, asked.operation, device) for kernel in selected(asked)])
        except KeyError as error:
            tell.refused(str(error.args[0]))


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
    target = str(device_here(device))
    report = ConformanceReport(seed, target)
    named = (None if kernels is None else list(kernels), None if backends is None else list(backends))
    ask = Ask(*named, operation, target, seed, calls, list(modules))
    checks = _Checks(report, ask, seconds, progress or (lambda _: None))
    run_apart(
        "layerzero.testing.conformance",
        checks.tasks,
        found=checks.found,
        ended=checks.ended,
        begins=checks.begins,
        modules=modules,
        environment={},
    )
    if not modules:
        checks.in_this_process()
    report.machine = machine(Device.detect(target))
    report.seconds = time.perf_counter() - started
    return report


class _Checks:
    """Has every check done in children, and records what each of them found or died of."""

    def __init__(self, report: ConformanceReport, ask: Ask, seconds: float, progress: Progress) -> None:
        self.report, self.ask, self.seconds, self.progress = report, ask, seconds, progress
        self.tasks = deque([Task(ask, "", seconds)])
        self.told = ("", "")

    def in_this_process(self) -> None:
        """Check what no child could see."""
        seen = {each.kernel_id for each in self.report.kernels}
        battery.cache_clear()  # of kernels that had these names before
        for kernel in selected(self.ask):
            if kernel.id in seen:
                continue
            mine = described(kernel, self.ask.operation, Device.detect(self.ask.device))
            mine.note = "registered in this process only, and so checked in it: a crash or a hang would have ended it"
            self.report.kernels.append(mine)
            for task in self._checks([mine]):
                play(task.job, Tell(functools.partial(self._heard_here, task)))

    def _heard_here(self, task: Task, message: Message) -> None:
        if message.kind == "found":
            self.found(task, message.value)

    def _checks(self, reports: Sequence[KernelReport]) -> Iterator[Task]:
        """A library's kernels go to one child: all that they declare, then what lies beyond, which may do harm."""
        for source in dict.fromkeys(each.source for each in reports):
            able = [each for each in reports if each.source == source and not each.refused]
            for beyond, each in itertools.product((False, True), able):
                for name in each.operations:
                    job = Play(self.ask, each.kernel_id, name, beyond, [])
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
        if end.kind == "not begun":
            raise LayerZeroError(end.reason)
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
