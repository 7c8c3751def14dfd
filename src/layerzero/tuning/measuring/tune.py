"""``lz.tune``: measure kernels on the calls that matter, and remember the times for calls like them.

Nothing is measured outside this window, never by surprise. What is known already, in this environment and still valid,
is not measured again: an interrupted run goes on where it ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.facts import Facts
from layerzero.core.operation import Case
from layerzero.core.recipe import CallRecipe
from layerzero.engine.config import current_policy
from layerzero.tuning.measuring.asked import asked_jobs
from layerzero.tuning.measuring.clocks import current
from layerzero.tuning.measuring.deadline import Deadline
from layerzero.tuning.measuring.jobs import Job
from layerzero.tuning.measuring.manifest import dtype_of, text_of
from layerzero.tuning.measuring.record import jobs_of_model
from layerzero.tuning.measuring.running import run_jobs
from layerzero.tuning.measuring.timing import MIN_SAMPLES, Effort
from layerzero.tuning.measuring.tuned import Progress, Tuned


def tune(
    operation: str | Callable[..., Any] = "*",
    shapes: Any = None,
    dtype: torch.dtype | str | Sequence[torch.dtype | str] | None = None,
    device: str | torch.device | None = None,
    *,
    manifest: str | os.PathLike[str] | None = None,
    model: str = "",
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

    Kernels may compile while this runs. Each is compared with the reference before its time is believed; one that never
    ran on this machine runs in a child process first, and one that has to be vetted is vetted there. A time includes
    LayerZero's adapters.

    Args:
        operation: a function, operation, alias or glob. Or a model: it is called once, and its calls are measured.
        shapes: of the first tensor, or of the first several where they differ; ``"cases"`` for the operations' own
            cases. If None: what this machine called, as misses left it in the ledger, then the cases, then the default
            grid (:mod:`layerzero.tuning.measuring.grid`). Beside a model its inputs: a tensor, a tuple, a dict.
        dtype: one or several; bfloat16 on a GPU, float32 and bfloat16 on a CPU. Of what was called or recorded, those
            of these dtypes alone, if any is given.
        device: where; the current CUDA device if there is one, else the CPU.
        manifest: a file that ``lz.record`` wrote, in place of shapes; the most frequent calls come first.
        model: what the manifest must have been recorded of; a manifest of another model is an error.
        head_dim, seq_lens, batch_sizes: of the default grid, only attention with this head dim, with these lengths and
            batches in place of the grid's.
        layout: of attention's tensors or the caches; of what was called or recorded, calls in it alone.
        params: parameters that every call has, beside shapes or cases; what is no call with them is left out.
        samples: samples of each kernel; the setting ``tune_samples`` if None.
        budget_s: seconds that it takes at most, whatever compiles or is vetted; a call that is being measured ends.
            With 0 nothing is measured. A second run goes on where the first ended.
        again: measure what is known, too.
        graph: time replays of CUDA graphs in place of eager calls; kept apart from them.
        isolate: run what is new on this machine in a child process first.
        modules: modules that register kernels, for those child processes.
        leave_out: libraries or kernel globs that are not measured.
        progress: told of each call before and after.
    Returns: what was measured.
    Raises: KeyError or ValueError for operations, shapes, dtypes or files that mean nothing.
    """
    deadline = Deadline(budget_s)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
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
        if params:
            raise ValueError(f"params: wanted them beside an operation's name, got {', '.join(params)} beside a model")
        jobs = jobs_of_model(operation, shapes, target.type)
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
    """The dtypes to measure, by name; those that a device is used with where nobody says.

    Raises: ValueError for an unknown name.
    """
    if dtype is None:
        return ("bfloat16",) if device.type == "cuda" else ("float32", "bfloat16")
    several = (dtype,) if isinstance(dtype, (str, torch.dtype)) else tuple(dtype)
    return tuple(dtype_name(dtype_named(each)) for each in several)


def tune_calls(calls: Iterable[Facts]) -> Tuned:
    """Measure calls of which the facts are known: those of ``lz.warmup``, where ``auto_tune_on_warmup`` is on."""
    made = list(calls)
    recipes = [CallRecipe.of(facts) for facts in made]
    jobs = [Job(each.operation, Case(text_of(each), {}), dtype_of(each), recipe=each) for each in recipes]
    device = torch.device(recipes[0].device if recipes else "cpu")
    effort = Effort(current_policy()["tune_samples"], fill=device.type == "cpu")
    return run_jobs(jobs, device, effort=effort)
