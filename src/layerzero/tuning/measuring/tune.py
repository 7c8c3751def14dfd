"""``lz.tune``: measure kernels on the calls that matter, and remember the times for calls like them.

Nothing is measured outside this window, never by surprise. What is known already, in this environment and still valid,
is not measured again: an interrupted run goes on where it ended.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from layerzero.asking.answers import explain
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.errors import LayerZeroWarning
from layerzero.core.evidence import Provenance
from layerzero.core.facts import Facts
from layerzero.core.ledger import class_text
from layerzero.core.operation import Case
from layerzero.core.plan import Report
from layerzero.core.recipe import CallRecipe
from layerzero.engine import legality
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.failing import out_of_memory
from layerzero.engine.policy import names_kernel
from layerzero.engine.registry import REGISTRY
from layerzero.testing.trial import lost_context, raised
from layerzero.tuning.measuring.asked import asked_jobs
from layerzero.tuning.measuring.contest import Contest, contest, taking_part, window
from layerzero.tuning.measuring.jobs import Job, Shape
from layerzero.tuning.measuring.manifest import dtype_of, text_of
from layerzero.tuning.measuring.timing import MIN_SAMPLES, Clock, Effort, clock_of
from layerzero.tuning.measuring.tuned import Choice, Progress, Step, Tuned
from layerzero.tuning.predicting.weighing import FULL_SAMPLES
from layerzero.tuning.predicting.winner import record_times
from layerzero.tuning.proving.rehearsal import is_new, rehearse
from layerzero.tuning.proving.vetting import Vetted, vet_calls

AT_ONCE, GROWTH = 16, 4
"""Calls whose new kernels child processes run before the first is timed, and how many times more the next time: each
round costs seconds, most of them for importing torch and compiling anew, but the first times should not wait long."""

USABLE = 0.5
"""Confidence from which on times decide more than priority does; below it they are measured again."""


def tune(
    operation: str = "*",
    shapes: Sequence[Shape] | str | None = None,
    dtype: torch.dtype | str | Sequence[torch.dtype | str] | None = None,
    device: str | torch.device | None = None,
    *,
    manifest: str | os.PathLike[str] | None = None,
    model: str = "",
    head_dim: int | None = None,
    seq_lens: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    layout: str | None = None,
    samples: int | None = None,
    budget_s: float | None = None,
    again: bool = False,
    graph: bool = False,
    isolate: bool = True,
    modules: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    progress: Progress | None = None,
) -> Tuned:
    """Measure every legal kernel on calls of an operation, and let what was found choose from then on.

    Kernels may compile while this runs. Each is compared with the reference before its time is believed; one that never
    ran on this machine runs in a child process first, and one that has to be vetted is vetted there. A time includes
    LayerZero's adapters.

    Args:
        operation: a function, operation, alias or glob.
        shapes: of the first tensor, or of query and key where they differ; ``"cases"`` for the operations' own cases;
            the default grid if None (:mod:`layerzero.tuning.measuring.grid`).
        dtype: one or several; bfloat16 on a GPU, float32 and bfloat16 on a CPU.
        device: where; the current CUDA device if there is one, else the CPU.
        manifest: a file that ``lz.record`` wrote, in place of shapes; the most frequent calls come first.
        model: what the manifest must have been recorded of; a manifest of another model is an error.
        head_dim, seq_lens, batch_sizes: of the default grid, only attention with this head dim, with these lengths and
            batches in place of the grid's.
        layout: of attention's tensors or the caches.
        samples: samples of each kernel; the setting ``tune_samples`` if None.
        budget_s: seconds after which no further call is begun.
        again: measure what is known, too.
        graph: time replays of CUDA graphs in place of eager calls; kept apart from them.
        isolate: run what is new on this machine in a child process first.
        modules: modules that register kernels, for those child processes.
        leave_out: libraries or kernel globs that are not measured.
        progress: told of each call before and after.
    Returns: what was measured. Raises: KeyError or ValueError for operations, shapes or files that mean nothing.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    jobs = asked_jobs(
        operation,
        shapes,
        dtypes_of(dtype, target),
        target.type,
        manifest=manifest,
        model=model,
        head_dim=head_dim,
        seq_lens=seq_lens,
        batch_sizes=batch_sizes,
        layout=layout,
    )
    wanted = current_policy()["tune_samples"] if samples is None else samples
    if samples is not None and samples < MIN_SAMPLES:
        raise ValueError(f"samples: wanted at least {MIN_SAMPLES} of each kernel, got {samples}")
    return run_jobs(
        jobs,
        target,
        effort=Effort(wanted, fill=target.type == "cpu"),
        budget_s=budget_s,
        again=again,
        graph=graph,
        isolate=isolate,
        modules=modules,
        leave_out=leave_out,
        progress=progress,
    )


def dtypes_of(dtype: torch.dtype | str | Sequence[torch.dtype | str] | None, device: torch.device) -> tuple[str, ...]:
    """The dtypes to measure, by name; those that a device is used with where nobody says.

    Raises: ValueError for an unknown name.
    """
    if dtype is None:
        return ("bfloat16",) if device.type == "cuda" else ("float32", "bfloat16")
    several = (dtype,) if isinstance(dtype, (str, torch.dtype)) else tuple(dtype)
    return tuple(dtype_name(dtype_named(each)) for each in several)


@dataclass(slots=True)
class _Run:
    """One tuning run as it goes on."""

    jobs: Sequence[Job]
    device: torch.device
    clock: Clock
    effort: Effort
    again: bool
    graph: bool
    isolate: bool
    modules: Sequence[str]
    leave_out: Sequence[str]
    banned: dict[tuple[str, str], str] = field(default_factory=dict)
    vetted: list[Vetted] = field(default_factory=list)
    in_process: dict[str, str] = field(default_factory=dict)
    rehearsed: int = 0
    at_once: int = AT_ONCE
    looked_at: int = 0
    look_at: int = AT_ONCE

    def known(self, report: Report) -> bool:
        """Whether every kernel that would take part has a usable time that was measured here, or failed here before."""
        if self.again:
            return False
        kernels = [each.kernel for each in taking_part(report, self.leave_out, graph=self.graph)]
        facts = report.facts.on(report.facts.device, capturing=self.graph)
        evidence, failures = ENGINE.ledger.evidence(kernels, facts), ENGINE.ledger.failures()
        return all(
            (
                kernel.id in evidence
                and evidence[kernel.id].provenance == Provenance.MEASURED
                and evidence[kernel.id].confidence >= self.usable
            )
            or (kernel.id, report.operation) in failures
            for kernel in kernels
        )

    @property
    def usable(self) -> float:
        """The confidence that is enough: fewer samples, where they were asked for, cannot be worth more."""
        return USABLE * min(1.0, self.effort.samples / FULL_SAMPLES)

    def choice(self, found: Contest) -> Choice:
        """What a call gets now that its times are recorded."""
        facts = found.facts.on(found.facts.device, capturing=self.graph)
        evidence = ENGINE.ledger.evidence(list(found.times), facts)
        confidence = min((each.confidence for each in evidence.values()), default=0.0)
        return Choice(explain(facts).kernel_id, confidence, bool(found.times) and confidence < self.usable)

    def report(self, job: Job) -> Report:
        """Who would take part, judged without the call's data."""
        with window():
            return explain(job.facts(self.device))

    def vet_from(self, index: int) -> None:
        """Let kernels that only vetting keeps from the next calls prove themselves in a child."""
        if not self.isolate or index < self.looked_at:
            return
        here = Device.detect(str(self.device))
        if not any(legality.untrusted(each, here) for each in REGISTRY.kernels()):
            return
        self.looked_at = index + self.look_at
        self.look_at *= GROWTH
        asked = {(each.kernel_id, each.call_class) for each in self.vetted}
        pairs = [
            (kernel, report.facts)
            for report in map(self.report, self.jobs[index : self.looked_at])
            for kernel in legality.awaiting(report.candidates, report.facts)
            if (kernel.id, class_text(report.facts)) not in asked
            and not any(names_kernel(pattern, kernel) for pattern in self.leave_out)
            and (kernel.graph_safe or not self.graph)
        ]
        self.vetted += vet_calls(pairs, modules=self.modules, go_on=True)

    def rehearse_from(self, index: int) -> None:
        """Let a child run what the next calls would run for the first time."""
        if not self.isolate or index < self.rehearsed:
            return
        self.rehearsed = index + self.at_once
        self.at_once *= GROWTH
        pairs = []
        for job in self.jobs[index : self.rehearsed]:
            report = self.report(job)
            if not self.known(report):
                parties = taking_part(report, self.leave_out, graph=self.graph)
                pairs += [(each.kernel, report.facts) for each in parties if is_new(each.kernel, report.facts)]
        for each in rehearse(pairs, modules=self.modules) if pairs else ():
            if each.guilty or each.unsafe:
                self.banned[each.kernel.id, class_text(each.facts)] = f"{each.verdict or 'not tried'}: {each.detail}"
            elif each.verdict is None and each.kernel.id not in self.in_process:
                self.in_process[each.kernel.id] = each.detail
                what = f"{each.kernel.id} runs in this process for the first time, although isolate=True"
                repair = "modules=[...] names what registers it, leave_out leaves it out"
                text = f"{what}: no child process could be asked: {each.detail}; {repair}"
                warnings.warn(text, LayerZeroWarning, stacklevel=2)

    def contest(self, job: Job, facts: Facts) -> Contest:
        """Measure one call."""
        banned = {kernel: text for (kernel, class_), text in self.banned.items() if class_ == class_text(facts)}
        return contest(
            job.make(self.device),
            effort=self.effort,
            graph=self.graph,
            leave_out=self.leave_out,
            banned=banned,
            clock=self.clock,
        )


def run_jobs(
    jobs: Sequence[Job],
    device: torch.device,
    *,
    effort: Effort,
    budget_s: float | None = None,
    again: bool = False,
    graph: bool = False,
    isolate: bool = True,
    modules: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    progress: Progress | None = None,
) -> Tuned:
    """Measure jobs in their order until the budget is spent."""
    started, tell = time.perf_counter(), progress or _silent
    run = _Run(jobs, device, clock_of(device, graph=graph), effort, again, graph, isolate, modules, leave_out)
    contests: list[Contest] = []
    choices: list[Choice] = []
    skipped: dict[str, str] = {}
    known = changed = looked_at = 0
    for number, job in enumerate(jobs, 1):
        if budget_s is not None and time.perf_counter() - started > budget_s:
            break
        looked_at = number
        tell(Step(job, number, len(jobs)))
        run.vet_from(number - 1)
        report = run.report(job)
        if run.known(report):
            known += 1
            tell(Step(job, number, len(jobs), skipped="known"))
            continue
        run.rehearse_from(number - 1)
        try:
            found = run.contest(job, report.facts)
        except Exception as error:  # one call's trouble is told, and the others are measured
            if lost_context(report.facts.device):
                raise
            skipped[job.name] = f"too little memory: {raised(error)}" if out_of_memory(error) else raised(error)
            tell(Step(job, number, len(jobs), skipped=skipped[job.name]))
            continue
        changed += bool(found.times) and record_times(found.facts, found.times)
        contests.append(found)
        choices.append(run.choice(found))
        tell(Step(job, number, len(jobs), found))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    first_us = sum(each.first_call_us or 0.0 for found in contests for each in found.times.values())
    seconds = time.perf_counter() - started
    left = len(jobs) - looked_at
    return Tuned(
        contests=tuple(contests),
        choices=tuple(choices),
        known=known,
        skipped=skipped,
        left=left,
        vetted=tuple(run.vetted),
        in_process=run.in_process,
        winners_changed=changed,
        seconds=seconds,
        compile_s=first_us / 1e6,
    )


def _silent(_: Step) -> None:
    return None


def tune_calls(calls: Iterable[Facts]) -> Tuned:
    """Measure calls of which the facts are known: those of ``lz.warmup``, where ``auto_tune_on_warmup`` is on."""
    made = list(calls)
    recipes = [CallRecipe.of(facts) for facts in made]
    jobs = [Job(each.operation, Case(text_of(each), {}), dtype_of(each), recipe=each) for each in recipes]
    device = torch.device(recipes[0].device if recipes else "cpu")
    effort = Effort(current_policy()["tune_samples"], fill=device.type == "cpu")
    return run_jobs(jobs, device, effort=effort)
