"""What a child of conformance does: find the kernels in question, or run the checks of one of them.

:mod:`layerzero.testing.conformance` asks, and goes on where a child died.
"""

from __future__ import annotations

import functools
import importlib
import time
import traceback
from collections.abc import Sequence

import msgspec
import torch

from layerzero.core.device import Device
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import home_of
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.policy import names_kernel
from layerzero.engine.probe import this_machine
from layerzero.engine.registry import REGISTRY
from layerzero.testing.battery import Battery, KernelCheck
from layerzero.testing.child_main import Tell
from layerzero.testing.report import KernelReport, Result
from layerzero.testing.single_run import lost_context, raised


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

    def named(kernel: Kernel) -> bool:
        of_library = job.backends is None or kernel.source in job.backends
        return of_library and (job.kernels is None or any(names_kernel(name, kernel) for name in job.kernels))

    found = [kernel for kernel in REGISTRY.kernels(job.operation) if named(kernel) and _has_tensors(kernel)]
    return sorted(found, key=lambda kernel: (kernel.source, kernel.id))


def _has_tensors(kernel: Kernel) -> bool:
    """Whether it is a kernel of tensors; others are proved by vetting, for the calls in question."""
    return any(REGISTRY.operation(name).plain is None for name in kernel.operations)


def described(kernel: Kernel, operation: str, device: Device) -> KernelReport:
    """The empty report of a kernel: what it is, and why it cannot run here, if so."""
    names = set(REGISTRY.operations_named(operation))
    state = this_machine().state(kernel.backend, device)
    reason = None if state.untested else state.reason  # an untested version is what may be tested
    if reason is None and device.platform not in kernel.backend.platforms and kernel.backend.origin != "decorator":
        wanted = " or ".join(kernel.backend.platforms)
        reason = Reason(ReasonCode.PLATFORM_MISMATCH, "platform", wanted, device.platform)
    widened = ", ".join(f"{name}: rtol {each.rtol}, atol {each.atol}" for name, each in kernel.tolerance.items())
    return KernelReport(
        kernel.id,
        kernel.source,
        tuple(name for name in kernel.operations if name in names),
        refused=str(reason) if reason else "",
        tolerance=f"{widened}, because {kernel.tolerance_reason}" if widened else "",
    )


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
        status, message = "wrong", f"the check itself {raised(error)} ({where.name}, line {where.lineno})"
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
        except Exception as error:  # noqa: BLE001  # whatever a module of somebody else's raises
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
