"""Build what compiles before it is needed: a JIT kernel may be chosen only where its artefact exists."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Module

from layerzero.core.device import Device, device_here
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Operation
from layerzero.core.reasons import ReasonCode
from layerzero.core.recipe import CallRecipe
from layerzero.core.system import log
from layerzero.engine import legality, plan_source
from layerzero.engine.config import CONFIGURATION, SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE, Dispatcher
from layerzero.engine.events import EVENTS
from layerzero.engine.first_run import first_run
from layerzero.engine.frozen_choices import class_name
from layerzero.engine.functions import CALLS
from layerzero.engine.jit import BUILT, BuildIdentity, BuildOutcome, build_of
from layerzero.engine.proofs import SETTING
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.agreement import agreeing
from layerzero.ops.calls import accepted, function_for, listed
from layerzero.serving.background_builds import BUILDS
from layerzero.serving.own_builds import outcome_of, wanted
from layerzero.tuning.measurement.jobs import Job, Shape, check_params, jobs_of_cases, jobs_of_shape, operations_named
from layerzero.tuning.measurement.workload import every_call_of_file, jobs_of_file, jobs_of_model, model_compared
from layerzero.tuning.storage.host_notes import shortened
from layerzero.tuning.verification.build_child import short_of_memory


@dataclass(frozen=True, slots=True)
class Artefact:
    """One artefact that warmup made: kernel, operation, seconds, and the error where it failed."""

    kernel_id: str
    operation: str
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A kernel that was not built for a call, and why: it is built already, or what keeps it from the call.

    ``*`` stands for every kernel, of a call whose tensors this machine's memory does not hold.
    """

    kernel_id: str
    call: str
    why: str


class Warmed(list[Artefact]):
    """What was built, in order; ``skipped`` has the kernels that compile and were not built."""

    def __init__(self, built: Iterable[Artefact] = (), skipped: Iterable[Skipped] = ()) -> None:
        super().__init__(built)
        self.skipped = list(skipped)
        self._failed: dict[BuildIdentity | str, BuildOutcome] = {}

    def failed(self, kernel: Kernel, facts: Facts, outcome: BuildOutcome) -> None:
        """Note that a build failed: for calls like this one, or for all where the machine lacks a program."""
        self._failed[kernel.id if outcome.lacks else build_of(kernel, facts)] = outcome

    def failure(self, kernel: Kernel, facts: Facts) -> BuildOutcome | None:
        """How this warmup failed to build a kernel for calls like this one; None if it did not."""
        return self._failed.get(kernel.id) or self._failed.get(build_of(kernel, facts))

    def __str__(self) -> str:
        """What was built and what failed, a line each; what was not built, a line for each kernel and reason.

        Those for other hardware are one line.
        """
        lines = [
            f"{each.kernel_id} for {each.operation} "
            + (
                f"did not build: {shortened(each.error.splitlines()[0])}"
                if each.error
                else f"built in {each.seconds:.1f} s"
            )
            for each in self
        ]
        calls: dict[tuple[str, str], list[str]] = {}
        elsewhere = {skip.kernel_id for skip in self.skipped if str(ReasonCode.PLATFORM_MISMATCH) in skip.why}
        for skip in self.skipped:
            if skip.kernel_id not in elsewhere:
                calls.setdefault((skip.kernel_id, skip.why), []).append(skip.call)
        for (kernel_id, why), named in calls.items():
            more = f" and {len(named) - 1} more" if len(named) > 1 else ""
            what = "no kernel was built" if kernel_id == "*" else f"{kernel_id} was not built"
            lines.append(f"{what} for {named[0]}{more}: {why}")
        lines += [f"not for this device: {len(elsewhere)} kernels that compile"] if elsewhere else []
        return "\n".join(lines) or "nothing had to be built"


Progress = Callable[[str, int, int], None]
"""Called before each call with what is looked at, how many calls are done, and of how many."""


@agreeing
def warmup(
    operation: str | Callable[..., Any] = "*",
    shapes: Any = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    manifest: str | os.PathLike[str] | None = None,
    model: str | Module = "",
    progress: Progress | None = None,
    **params: Any,
) -> Warmed:
    """Compile and load every legal kernel of an operation for given shapes, so that calls may choose it.

    It keeps no plans: the first call of each class is chosen for as ever (``layerzero_misses_total``). A plan is kept
    once its call ran, and a manifest has what was called after routing, not the arguments that find a plan.

    Args:
        operation: an operation, function, alias or glob. Or a model: it is called once, and what it calls is built.
        shapes: for a model its inputs: a tensor, a tuple, a dict. Else shapes of the first tensor, or of the first
            several: ``(1, 64, 8, 64)`` of a query, ``((1, 64, 32, 128), (1, 64, 8, 128))`` of query and key, ``(512,
            4096)`` of a norm. The operations' own cases if None.
        dtype: dtype of the tensors; float32 if None.
        device: where; the CPU, or the current CUDA device if there is one.
        manifest: a file that ``lz.record`` wrote, in place of shapes. Calls that stand for their classes have every
            legal kernel built, all others what they would choose.
        model: what the manifest must have been recorded of, a name or the model; another one is an error.
        progress: called for each call; a bar on a terminal if None.
        params: further arguments of the calls.
    Raises: ValueError for shapes that no operation of this name has, for a dtype that has no such name, and for a file
        that is no manifest, or of another model; KeyError for an unknown operation.
    Returns: what was built, with seconds and errors, and, as ``skipped``, what was not built, and why. A kernel that
        fails to build stays refused for calls like that one, and is tried for others. Where this machine lacks a
        program, such as a compiler, it is tried once. One that may not run before it was vetted is vetted first, in a
        child process, as ``lz.vet`` does. Where ``graph_strict_mode`` is set, captures of what these calls would choose
        are proved, as ``lz.vet(graph=True)`` does. Where ``auto_tune_on_warmup`` is set, every legal kernel is also
        measured on these calls, as ``lz.tune`` does. Ranks agree where this ends, if ``distributed_selection`` says so
        (:func:`layerzero.agree`), and raise as that does.
    """
    target = device_here(device)
    jobs = _asked(operation, shapes, dtype, target.type, manifest, model, params)
    warmed = Warmed()
    if target.type == "cpu":  # a GPU's allocator says so instead
        jobs = list(_that_fit(jobs, target, warmed))
    if any(legality.untrusted(kernel, Device.detect(str(target))) for kernel in REGISTRY.kernels()):
        from layerzero.tuning.verification.vetting import vet_calls

        vet_calls([pair for job in jobs for pair in _awaiting(*_bound(job, target, params))], go_on=True)
    with bar_or(progress) as tell:
        for number, job in enumerate(jobs):  # the tensors of one call at a time
            tell(job.name, number, len(jobs))
            _warm(job, warmed, *_bound(job, target, params))
        for job, kernel_id in _others(operation, manifest, target):
            tell(job.name, len(jobs), len(jobs))
            for fitting in _that_fit([job], target, warmed) if target.type == "cpu" else [job]:
                _warm(fitting, warmed, *_bound(fitting, target, params), only=kernel_id)
        tell("", len(jobs), len(jobs))
    if warmed:
        ENGINE.bump()
    if current_policy()[SETTING] and target.type == "cuda":
        from layerzero.tuning.verification.rehearsal import prove_chosen

        prove_chosen([_facts(*_bound(replace(job, for_graph=True), target, params)) for job in jobs])
    if current_policy()["auto_tune_on_warmup"]:
        from layerzero.tuning.measurement.tune import tune_calls

        tune_calls([_facts(*_bound(job, target, params)) for job in jobs])
    return warmed


def on_terminal() -> bool:
    """Whether errors go to a terminal. A service has no error stream or a closed one, a notebook may have its own."""
    return not getattr(sys.stderr, "closed", False) and bool(getattr(sys.stderr, "isatty", bool)())


@contextmanager
def bar_or(progress: Progress | None) -> Iterator[Progress]:
    """Where progress is shown: by the caller's function, or a bar on a terminal; not elsewhere."""
    if progress is not None or not on_terminal():
        yield progress or (lambda *_: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text, done, of: bar.update(task, description=text, completed=done, total=of)


def _asked(
    operation: str | Callable[..., Any],
    shapes: Any,
    dtype: torch.dtype | str | None,
    device: str,
    manifest: str | os.PathLike[str] | None,
    model: str | Module,
    params: Mapping[str, Any],
) -> list[Job]:
    """The wanted calls. Raises: ValueError for two ways to say which."""
    model = model_compared(model, manifest)
    if not isinstance(operation, str):
        return jobs_of_model(operation, shapes, device, {"dtype": dtype, "manifest": manifest, **params})
    if manifest is None:
        return _jobs(operation, shapes, dtype_name(dtype_named(torch.float32 if dtype is None else dtype)), params)
    if shapes is not None or dtype is not None or params:
        raise ValueError("manifest: wanted it alone, got shapes, a dtype or parameters, too; leave them out")
    names = operations_named(operation)[1]
    return [job for job in jobs_of_file(manifest, device, model=model) if job.operation in names]


def _others(
    operation: str | Callable[..., Any], manifest: str | os.PathLike[str] | None, device: torch.device
) -> Iterator[tuple[Job, str]]:
    """The calls of a manifest that would choose what is not built by then, with its kernel's id; computed one by one.

    Calls of one class may need several artefacts, and each fails for itself; where one fails, the call would choose the
    next kernel.
    """
    if manifest is None or not isinstance(operation, str):
        return

    def failed(kernel: Kernel, facts: Facts) -> bool:
        return BUILDS.failures.of(kernel, facts) is not None

    names = operations_named(operation)[1]
    for job in every_call_of_file(manifest, device.type):
        if job.operation not in names:
            continue
        facts, tried = job.facts(device), set[BuildIdentity]()
        _remember(function_for(job.operation).name, facts)
        while True:
            found = wanted(facts, failed)
            if found is None or found.identity in tried:
                break
            tried.add(found.identity)
            yield job, found.kernel.id


def _jobs(operation: str, shapes: Sequence[Shape] | None, dtype: str, params: Mapping[str, Any]) -> list[Job]:
    """The wanted calls: of the operations that the name covers, and of no sibling."""
    implied, names = operations_named(operation)
    check_params(names, params)
    given, layout = {**implied, **params}, params.get("layout")
    if shapes is None:
        return list(jobs_of_cases(names, [dtype], layout))
    return [job for shape in listed(shapes) for job in jobs_of_shape(names, shape, dtype, given, layout)]


def _bound(job: Job, device: torch.device, params: Mapping[str, Any]) -> tuple[Dispatcher, dict[str, Any]]:
    call = job.make(device)
    dispatcher = CALLS[call.function].dispatcher
    return dispatcher, dispatcher.function.bind((), {**call.arguments, **accepted(dispatcher.function, params)})


def _that_fit(jobs: Iterable[Job], device: torch.device, warmed: Warmed) -> Iterator[Job]:
    """The calls whose tensors memory holds; the others are skipped."""
    for job in jobs:
        why = short_of_memory(job.recipe or CallRecipe.of(job.facts(device)))
        if why:
            warmed.skipped.append(Skipped("*", job.name, f"too little memory: {why}"))
        else:
            yield job


def _facts(dispatcher: Dispatcher, bound: dict[str, Any]) -> Facts:
    return dispatcher.explain(bound, current_policy())[0].facts


def _awaiting(dispatcher: Dispatcher, bound: dict[str, Any]) -> Iterator[tuple[Kernel, Facts]]:
    """The kernels that only vetting keeps from a call."""
    with SCOPES.scope({"allow_jit_compile": True}):
        report, ranked = dispatcher.explain(bound, current_policy())
    for kernel in legality.awaiting(ranked, report.facts):
        yield kernel, report.facts


def _warm(job: Job, warmed: Warmed, dispatcher: Dispatcher, bound: dict[str, Any], *, only: str = "") -> None:
    """Build what a call may choose, or one kernel of it."""
    operation = REGISTRY.operation(job.operation)
    with SCOPES.scope({"allow_jit_compile": True}), torch.no_grad():
        policy = current_policy()
        report, ranked = dispatcher.explain(bound, policy)
        _remember(dispatcher.function.name, report.facts)
        for candidate in ranked:
            kernel = candidate.kernel
            if not kernel.jit or (only and kernel.id != only):
                continue
            ready = candidate.legal and BUILT.ready(kernel, report.facts)
            if ready or not candidate.legal:
                why = "it was built before" if ready else "; ".join(str(reason) for reason in candidate.reasons)
                warmed.skipped.append(Skipped(kernel.id, job.name, why))
                continue
            if before := warmed.failure(kernel, report.facts):  # tried and reported: this would end in the same way
                BUILDS.note(kernel, report.facts, before)
                warmed.skipped.append(Skipped(kernel.id, job.name, f"it failed to build: {before.log}"))
                continue
            started = time.perf_counter()
            error = ""
            try:
                plan = plan_source.build(dispatcher.function, candidate, report, policy)
                with first_run(plan, ENGINE.ledger):
                    for _ in range(2):  # the first call compiles; the second shows that it need not again
                        plan.run(**_copies(bound, operation))
                BUILT.add(kernel, report.facts)
                BUILDS.note(kernel, report.facts, BuildOutcome())
            except Exception as failure:  # noqa: BLE001  # a kernel that does not compile stays refused, and the list says why
                error = f"{type(failure).__name__}: {failure}"
                outcome = outcome_of(failure)
                BUILDS.note(kernel, report.facts, outcome)
                warmed.failed(kernel, report.facts, outcome)
                log.warning("warmup: %s did not build for %s: %s", kernel.id, operation.name, error)
            seconds = time.perf_counter() - started
            EVENTS.built(kernel, report.facts, seconds, error)
            warmed.append(Artefact(kernel.id, operation.name, seconds, error))


def _remember(function: str, facts: Facts) -> None:
    """Let ``lz.freeze`` and ``lz.agree`` hold what was warmed up as they do what was called."""
    policy = CONFIGURATION.policy  # what calls are made under later
    ENGINE.history.add(function, class_name(facts, policy), facts, policy)


def _copies(arguments: Mapping[str, Any], operation: Operation) -> dict[str, Any]:
    mutated = operation.schema.mutated
    return {name: value.clone() if name in mutated else value for name, value in arguments.items()}
