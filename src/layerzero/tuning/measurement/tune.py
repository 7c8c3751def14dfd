"""``lz.tune``: measure kernels on the calls that matter, and remember the times for calls like them.

Nothing is measured outside this window, never by surprise. What is known already, in this environment and still valid,
is not measured again: an interrupted run goes on where it ended. :func:`asked_jobs` makes jobs from what a user asks to
measure: shapes, cases, a recorded workload, or the default grid.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

import msgspec
import torch
from torch.nn import Module

from layerzero.core.device import device_here
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.facts import Facts
from layerzero.core.recipe import CallRecipe
from layerzero.engine.config import CONFIGURATION, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import ranks_choose
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.agreement import agreeing, is_first
from layerzero.ops.calls import listed
from layerzero.tuning.measurement import workload
from layerzero.tuning.measurement.clocks import clock_of, current
from layerzero.tuning.measurement.contest import Contest
from layerzero.tuning.measurement.jobs import (
    Job,
    Shape,
    check_params,
    default_grid,
    jobs_of_cases,
    jobs_of_shape,
    operations_named,
)
from layerzero.tuning.measurement.loop import Progress, run_loop
from layerzero.tuning.measurement.timing import MIN_SAMPLES, Deadline, Effort
from layerzero.tuning.measurement.tune_run import TunedChoice, TuningRun
from layerzero.tuning.storage.store import times_path
from layerzero.tuning.verification.vetting import Vetted

Params = ParamSpec("Params")

AT_ONCE, GROWTH = 16, 4
"""Calls whose new kernels child processes run before the first is timed, and how many times more the next time: each
round costs seconds, most of them for importing torch and compiling anew, but the first times should not wait long."""


def asked_jobs(
    operation: str,
    shapes: Sequence[Shape] | str | None,
    dtypes: Sequence[str],
    device: str,
    *,
    manifest: str | os.PathLike[str] | None = None,
    model: str | Module = "",
    head_dim: int | None = None,
    seq_lens: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    layout: str | None = None,
    params: Mapping[str, Any] | None = None,
    named: Sequence[str] | None = None,
) -> list[Job]:
    """List what :func:`layerzero.tune` measures, in order of what it is worth; its arguments are described there.

    Without arguments: what this machine called, then the operations' cases, then the grid.

    ``params`` are parameters that every call has, besides shapes or cases; operations without one of them, and cases
    that are no call with them, are left out. ``named`` are the wanted dtypes: what was called or recorded in another
    one is left out, as it is in another ``layout``, or without what an alias implies.
    """
    implied, covered = operations_named(operation)
    names = [name for name in covered if not REGISTRY.operation(name).is_collective]
    if covered and not names:
        raise ValueError(f"operation: wanted what a rank measures alone, got {operation}: times choose no collective")
    alike = functools.partial(_is_asked, names=names, dtypes=named, layout=layout, implied=dict(implied))
    if params:
        if shapes is None:
            raise ValueError(f"parameters: wanted them with shapes or cases, got {', '.join(params)}")
        check_params(names, params)
        having = [name for name in names if params.keys() <= REGISTRY.operation(name).schema.known]
        if names and not having:
            step = "give layout=, or name the operation that they choose"
            raise ValueError(f"parameters: wanted those of {' or '.join(names)}, got {', '.join(params)}; {step}")
        names, implied = having, {**implied, **params}
    dims = None if head_dim is None else (head_dim,)
    of_grid = dict(head_dim=dims, seq_lens=seq_lens, batch_sizes=batch_sizes)  # noqa: C408  # as they are called
    narrow = {name: sizes for name, sizes in of_grid.items() if sizes is not None}
    narrowing = list(narrow)
    model = workload.model_compared(model, manifest)
    if manifest is not None and (shapes is not None or narrowing):
        raise ValueError(f"manifest: wanted it alone, got {', '.join(narrowing) or 'shapes'}, too")
    if shapes is not None and narrowing:
        raise ValueError(f"{', '.join(narrowing)}: they narrow the default grid: wanted them without shapes, got both")
    if manifest is not None:
        return [job for job in workload.jobs_of_file(manifest, device, model=model) if alike(job)]
    if isinstance(shapes, str):
        if shapes != "cases":
            raise ValueError(f"shapes: wanted sizes, or 'cases' for the operations' own, got {shapes!r}")
        return list(jobs_of_cases(names, dtypes, layout, params))
    if shapes is not None:
        asked = [(shape, dtype) for dtype in dtypes for shape in listed(shapes)]
        return [job for shape, dtype in asked for job in jobs_of_shape(names, shape, dtype, implied, layout)]
    jobs = default_grid(device, dtypes, narrow=narrow)
    if not narrow:
        jobs = [*jobs_of_cases(names, dtypes), *jobs]
    kept = [job for job in jobs if alike(job)]
    kept = [dataclasses.replace(job, layout=layout) for job in kept] if layout else kept
    called = [] if narrow else [job for job in jobs_called(device) if alike(job)]
    return list({job.identity: job for job in reversed([*called, *kept])}.values())[::-1]


def jobs_called(device: str) -> list[Job]:
    """What this machine called, as misses left it in the ledger; calls that kernels are no longer known for are not."""
    return workload.jobs_of(_called(), device)


def every_call(device: str) -> list[Job]:
    """The same, none standing for others."""
    return workload.every_call_of(_called(), device)


def _called() -> workload.Manifest:
    known = REGISTRY.operations()
    calls = [workload.Recorded(count, call) for count, call in ENGINE.ledger.calls() if call.operation in known]
    return workload.Manifest(workload.FORMAT, time.time(), "", calls)


def _is_asked(
    job: Job, *, names: Sequence[str], dtypes: Sequence[str] | None, layout: str | None, implied: Mapping[str, Any]
) -> bool:
    """Whether a call is one of the wanted ones."""
    recipe = job.recipe
    params = job.case.params if recipe is None else recipe.params
    return (
        job.operation in names
        and (dtypes is None or job.dtype in dtypes)
        and (layout is None or recipe is None or recipe.layout in (None, layout))
        and all(params.get(name, value) == value for name, value in implied.items())
    )


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a tuning run did.

    Attributes:
        contests: what was measured, in order.
        choices: what each of these calls gets now, with as many threads as torch used meanwhile.
        known: calls whose times were known before.
        skipped: calls that could not be measured, with the reason.
        needs_bytes: what those of them need that memory does not hold.
        left: calls that time did not suffice for.
        vetted: what vetting said about kernels that may not run before; those without a verdict were not measured.
        in_process: kernels that ran here for the first time, since no child process could try them, and why not.
        not_built: kernels that compile and were not measured, and why not.
        winners_changed: calls for which another kernel is chosen now.
        spared: kernels that were not measured for a call, since what this machine knows rules them out.
        seconds: how long it took; ``compile_s`` of them went into first calls.
    """

    contests: tuple[Contest, ...]
    choices: tuple[TunedChoice, ...]
    known: int
    skipped: Mapping[str, str]
    needs_bytes: Mapping[str, int]
    left: int
    vetted: tuple[Vetted, ...]
    in_process: Mapping[str, str]
    not_built: Mapping[str, str]
    winners_changed: int
    spared: int
    seconds: float
    compile_s: float

    def to_dict(self) -> dict[str, object]:
        measured = []
        for found, choice in zip(self.contests, self.choices, strict=True):
            now = msgspec.to_builtins(choice)
            measured.append({**found.to_dict(), "after": now.pop("kernel_id"), **now})
        others = [name for name in Tuned.__slots__ if name not in ("contests", "choices")]
        return {"measured": measured, **msgspec.to_builtins({name: getattr(self, name) for name in others})}

    def __str__(self) -> str:
        text = f"{len(self.contests)} calls measured in {self.seconds:.0f} s, {self.compile_s:.0f} s of it first calls"
        text += f"; {self.known} were known, {self.left} are left"
        text += (
            f"; {self.spared} times were spared: they cannot win by what was measured before, or a capture refused them"
            if self.spared
            else ""
        )
        noisy = sum(each.too_noisy for each in self.choices)
        text += f"; {noisy} were too noisy to decide" if noisy else ""
        return f"{text}; {len(self.skipped)} could not be measured" if self.skipped else text


def _by_one_of_a_host(measure: Callable[Params, Tuned]) -> Callable[Params, Tuned]:
    """Let one rank of a host measure for those with its processors and times, where a budget bounds their wait."""

    @functools.wraps(measure)
    def running(*args: Params.args, **kwargs: Params.kwargs) -> Tuned:
        policy = CONFIGURATION.policy
        if kwargs.get("budget_s") and ranks_choose(policy) and not is_first(times_path(policy)):
            return run_jobs((), torch.device("cpu"), effort=Effort(MIN_SAMPLES))
        return measure(*args, **kwargs)

    return running


@agreeing
@_by_one_of_a_host
def tune(
    operation: str | Callable[..., Any] = "*",
    shapes: Any = None,
    dtype: torch.dtype | str | Sequence[torch.dtype | str] | None = None,
    device: str | torch.device | None = None,
    *,
    manifest: str | os.PathLike[str] | None = None,
    model: str | Module = "",
    head_dim: int | None = None,
    seq_lens: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    layout: str | None = None,
    params: Mapping[str, Any] | None = None,
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

    Kernels may compile while this runs. Each is compared with the reference before its time is believed. One that never
    ran on this machine runs in a child process first. One that has to be vetted is vetted there. A time includes
    LayerZero's adapters. On a GPU the memory of a kernel that declares none is measured as well, which resets torch's
    count of the most that was allocated.

    Args:
        operation: a function, operation, alias or glob. Or a model: it is called once, and its calls are measured.
        shapes: of the first tensor, or of the first several where they differ; ``"cases"`` for the operations' own
            cases. If None: what this machine called, as misses left it in the ledger, then the cases, then the default
            grid (:mod:`layerzero.tuning.measurement.jobs`). For a model its inputs: a tensor, a tuple, a dict.
        dtype: one or several; bfloat16 on a GPU, float32 and bfloat16 on a CPU. Of what was called or recorded, those
            of these dtypes alone, if any is given.
        device: where; the current CUDA device if there is one, else the CPU.
        manifest: a file that ``lz.record`` wrote, in place of shapes; the most frequent calls come first.
        model: what the manifest must have been recorded of, a name or the model; another one is an error.
        head_dim, seq_lens, batch_sizes: of the default grid, only attention with this head dim, with these lengths and
            batches in place of the grid's.
        layout: of attention's tensors or the caches; of what was called or recorded, calls in it alone.
        params: parameters that every call has, besides shapes or cases; what is no call with them is left out.
        samples: samples of each kernel; the setting ``tune_samples`` if None.
        budget_s: seconds that it takes at most, whatever compiles or is vetted; a call that is being measured ends.
            With 0 nothing is measured. A second run goes on where the first ended.
        again: measure what is known, too.
        graph: time replays of CUDA graphs in place of eager calls; kept apart from them.
        isolate: run what is new on this machine in a child process first.
        modules: modules that register kernels, for those child processes.
        leave_out: libraries or kernel globs that are not measured.
        progress: called before and after each call.
    Returns: what was measured. Ranks agree where this ends, if ``distributed_selection`` says so. With a budget,
        the lowest rank of each host measures for those with the same processors and file of times. They get nothing.
    Raises: KeyError or ValueError for operations, shapes, dtypes or files that mean nothing; what ``lz.agree`` does.
    """
    deadline = Deadline(budget_s)
    target = device_here(device)
    if isinstance(operation, str):
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
            params=params,
            named=None if dtype is None else dtypes_of(dtype, target),
        )
    else:
        grid = {"head_dim": head_dim, "seq_lens": seq_lens, "batch_sizes": batch_sizes, "layout": layout}
        said: dict[str, Any] = {"params": params, "dtype": dtype, **grid, "manifest": manifest, "model": model}
        jobs = workload.jobs_of_model(operation, shapes, target.type, said)
    REGISTRY.check_named(leave_out, "tune: leave_out")
    wanted = current_policy()["tune_samples"] if samples is None else samples
    if samples is not None and samples < MIN_SAMPLES:
        raise ValueError(f"samples: wanted at least {MIN_SAMPLES} of each kernel, got {samples}")
    with current(target):
        return run_jobs(
            jobs,
            target,
            effort=Effort(wanted, fill=target.type == "cpu"),
            deadline=deadline,
            again=again,
            graph=graph,
            isolate=isolate,
            modules=modules,
            leave_out=leave_out,
            progress=progress,
        )


def dtypes_of(dtype: torch.dtype | str | Sequence[torch.dtype | str] | None, device: torch.device) -> tuple[str, ...]:
    """The dtypes to measure, by name; those that a device is used with by default.

    Raises: ValueError for an unknown name, TypeError for anything else than dtypes and names.
    """
    if dtype is None:
        return ("bfloat16",) if device.type == "cuda" else ("float32", "bfloat16")
    several = (dtype,) if isinstance(dtype, (str, torch.dtype)) else tuple(dtype)
    for each in several:
        if not isinstance(each, (str, torch.dtype)):
            raise TypeError(f"dtype: wanted dtypes or their names, got {type(each).__name__}")
    return tuple(dtype_name(dtype_named(each)) for each in several)


def tune_calls(calls: Iterable[Facts], *, deadline: Deadline | None = None, leave_out: Sequence[str] = ()) -> Tuned:
    """Measure calls of which the facts are known: those of ``lz.solve``, and, if ``auto_tune_on_warmup``, of warmup."""
    jobs = [workload.job_of(CallRecipe.of(facts)) for facts in calls]
    device = torch.device(jobs[0].recipe.device if jobs and jobs[0].recipe else "cpu")
    effort = Effort(current_policy()["tune_samples"], fill=device.type == "cpu")
    return run_jobs(jobs, device, effort=effort, deadline=deadline, leave_out=leave_out)


def run_jobs(
    jobs: Sequence[Job],
    device: torch.device,
    *,
    budget_s: float | None = None,
    deadline: Deadline | None = None,
    graph: bool = False,
    progress: Progress | None = None,
    **fields: Any,
) -> Tuned:
    """Measure jobs in their order until the budget is used up; ``deadline`` stands for it where a run began before.

    Args:
        fields: further ones of :class:`layerzero.tuning.measurement.tune_run.TuningRun`.
    """
    run = TuningRun(
        jobs=[dataclasses.replace(job, for_graph=True) for job in jobs] if graph else jobs,
        device=device,
        clock=clock_of(device, graph=graph),
        deadline=deadline or Deadline(budget_s),
        batch=AT_ONCE,
        growth=GROWTH,
        graph=graph,
        progress=progress or (lambda _: None),
        **fields,
    )
    left = run_loop(run)
    contests = tuple(run.contests[number] for number in sorted(run.contests))
    first_us = sum(each.first_call_us or 0.0 for found in contests for each in found.times.values())
    return Tuned(
        contests=contests,
        choices=tuple(run.choices()),
        known=run.known,
        skipped=run.skipped,
        needs_bytes={name: run.needs_bytes[name] for name in run.skipped if name in run.needs_bytes},
        left=len(left),
        vetted=tuple(run.verdicts.values()),
        in_process=run.in_process,
        not_built=run.not_built,
        winners_changed=len(run.changed),
        spared=len(run.spared),
        seconds=run.deadline.spent_s,
        compile_s=first_us / 1e6,
    )
