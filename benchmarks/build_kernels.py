"""Compile what compiles, before anything is timed: each kernel once for each of its artefacts, not for each call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

import layerzero as lz
from layerzero.core.errors import in_short
from layerzero.core.kernel import Kernel
from layerzero.engine import jit
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.jit import BUILT, Built
from layerzero.tuning.measurement.contest import bound_plan, taking_part, window
from layerzero.tuning.measurement.jobs import Job


def artefacts(jobs: Sequence[Job], device: torch.device, leave_out: Sequence[str]) -> list[tuple[Kernel, Job]]:
    """Each (kernel, artefact) that these calls need and this process has not, with the first call that needs it."""
    seen, found = Built(), []
    for job in jobs:
        with window():
            report = lz.explain(job.facts(device))
        for candidate in taking_part(report, leave_out):
            kernel = candidate.kernel
            if kernel.jit and not BUILT.ready(kernel, report.facts) and not seen.ready(kernel, report.facts):
                seen.add(kernel, report.facts)
                found.append((kernel, job))
    return found


def compile_all(pairs: Sequence[tuple[Kernel, Job]], device: torch.device) -> Iterator[str]:
    """Run each kernel once on its call, so that it may be chosen from then on; a line for each slow or failed one."""
    for kernel, job in pairs:
        started = time.perf_counter()
        try:
            call = job.make(device)
            with window(), jit.opened_files() as opened:
                report = lz.explain(call.function, **call.arguments)
                candidate = next(each for each in report.candidates if each.legal and each.kernel.id == kernel.id)
                bound_plan(candidate, report, call)[1]()
                if device.type == "cuda":
                    torch.cuda.synchronize()
            BUILT.add(kernel, report.facts)
            jit.note(kernel, report.facts, opened)  # other processes find it: shards build, and one measures
        except Exception as error:  # noqa: BLE001  # what does not compile is a line, and is refused later
            yield f"{kernel.id} for {job.name}: {in_short(error)}"
            continue
        seconds = time.perf_counter() - started
        if seconds > 1.0:
            yield f"{kernel.id} for {job.name}: {seconds:.1f} s"
    ENGINE.bump()
