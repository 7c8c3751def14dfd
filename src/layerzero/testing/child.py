"""The process in which kernels run that may kill it: reads a job from stdin, writes what it finds to stdout.

One JSON document a line: first the kernels, then each check as it starts, what it is about to run, and its result.
``python -m layerzero.testing.child``; :mod:`layerzero.testing.conformance` starts it and goes on where it died.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from layerzero.core.device import Device
from layerzero.core.errors import LayerZeroWarning
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import home_of
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.policy import names_kernel
from layerzero.engine.probe import this_machine
from layerzero.engine.registry import REGISTRY
from layerzero.testing.battery import Battery, Check
from layerzero.testing.report import KernelReport, Result
from layerzero.testing.trial import lost_context, raised

Write = Callable[[dict[str, Any]], None]
Key = tuple[str, str, str]

CONTEXT_LOST = 17
"""The exit code after a device error that stays; the check has been reported then."""


def selected(job: Mapping[str, Any]) -> list[Kernel]:
    """The kernels that a job names, of the operations that it names; those of one library follow each other."""

    def named(kernel: Kernel) -> bool:
        of_library = job["backends"] is None or kernel.source in job["backends"]
        return of_library and (job["kernels"] is None or any(names_kernel(name, kernel) for name in job["kernels"]))

    found = [kernel for kernel in REGISTRY.kernels(job["operation"]) if named(kernel)]
    return sorted(found, key=lambda kernel: (kernel.source, kernel.id))


def described(kernel: Kernel, operation: str, device: Device) -> KernelReport:
    """The empty report of a kernel: what it is, and why it cannot run here, if so."""
    names = set(REGISTRY.operations_named(operation))
    state = this_machine().state(kernel.backend, device)
    reason = None if state.untested else state.reason  # a version that nobody tested is what may be tested
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


def play(kernels: Iterable[tuple[Kernel, KernelReport]], job: dict[str, Any], write: Write) -> None:
    """Run every check that is not done yet: first all of what is declared, then what lies beyond the limits."""
    done = {tuple(key) for key in job["done"]}
    batteries = [
        (kernel.id, Battery(kernel, REGISTRY.operation(name), job["device"], job["seed"], job["calls"]))
        for kernel, report in kernels
        if kernel.id not in job["given_up"]
        for name in report.operations
    ]
    for part in (Battery.checks, Battery.probes):
        for kernel_id, battery in batteries:
            for check in part(battery):
                key = (kernel_id, battery.operation.name, check.name)
                if key not in done:
                    _run(key, check, job["device"], write)


def _run(key: Key, check: Check, device: str, write: Write) -> None:
    write({"start": key, "seconds": check.seconds})
    started = time.perf_counter()
    try:
        outcome = check.play(lambda text: write({"at": text}))
        status, message = (outcome.status, outcome.message) if outcome else ("nothing", "")
    except Exception as error:  # noqa: BLE001  # a check that fails itself is told, as something wrong
        where = traceback.extract_tb(error.__traceback__)[-1]
        status, message = "wrong", f"the check itself {raised(error)} ({where.name}, line {where.lineno})"
    lost = lost_context(Device.detect(device))
    if lost:
        status = "needed" if check.name.startswith("beyond ") else "died"
        message = f"{message}; {lost}" if message else lost
    write({"result": asdict(Result(*key, status, message, time.perf_counter() - started))})
    if lost:
        os._exit(CONTEXT_LOST)


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


def main() -> None:
    """Do one job: the kernels of the first library that has something left to do."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what libraries print, from Python or from C, is not an answer

    def write(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    job = json.loads(sys.stdin.read())
    problem = imported(job["modules"])
    if problem:
        write({"error": problem})
        return
    warnings.simplefilter("ignore", LayerZeroWarning)  # what a kernel cannot do is what this looks for
    torch.set_num_threads(1)  # small tensors gain nothing from more; some checks take all
    device = Device.detect(job["device"])
    try:
        kernels = selected(job)
    except KeyError as error:
        write({"error": str(error.args[0])})
        return
    reports = [(kernel, described(kernel, job["operation"], device)) for kernel in kernels]
    write({"kernels": [asdict(report) for _, report in reports]})
    able = [(kernel, report) for kernel, report in reports if not report.refused]
    left = list(dict.fromkeys(report.source for _, report in able if report.source not in job["finished"]))
    for source in left[:1]:
        play([pair for pair in able if pair[1].source == source], job, write)
    write({"finished": left[:1], "more": len(left) > 1})


if __name__ == "__main__":
    main()
