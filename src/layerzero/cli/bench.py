"""``layerzero bench``: measure calls until the time is over, each result as it comes, then the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from layerzero.cli import check, describe
from layerzero.cli.bench_screen import result, shown_on_screen
from layerzero.cli.live import Live, live
from layerzero.cli.modules import import_modules
from layerzero.cli.output import FINE, NO, Answer, say
from layerzero.cli.sizes import deadline_of, params_of, shapes_of, with_threads
from layerzero.engine.config import current_policy
from layerzero.engine.policy import names_kernel
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measuring.bench import Timed
from layerzero.tuning.measuring.clocks import clock_of, current
from layerzero.tuning.measuring.comparison import NO_TIME, Looked, compare, long_calls
from layerzero.tuning.measuring.contest import Status
from layerzero.tuning.measuring.jobs import telling
from layerzero.tuning.measuring.timing import Effort
from layerzero.tuning.measuring.tune import asked_jobs, dtypes_of


def answer(
    operation: str,
    *,
    shapes: Sequence[str] | None,
    manifest: Path | None,
    dtype: str | None,
    layout: str | None,
    device: str | None,
    threads: int | None,
    samples: int | None,
    budget_s: float,
    leave_out: Sequence[str],
    only: Sequence[str],
    params: Sequence[str],
    modules: Sequence[str],
    timed: str | None,
    plot: Path | None,
    html: Path | None,
    everything: bool,
    quiet: bool,
) -> Answer:
    """Measure, draw and tell. Raises: ValueError or KeyError for flags that mean nothing."""
    deadline = deadline_of(budget_s)
    if plot is not None or html is not None:
        from layerzero.cli import charts

        charts.check(plot, html)
    import_modules(modules)
    check.kernels_exist(only)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    times = timed_of(timed, target)
    dtypes: Sequence[str] = dtypes_of(dtype.split(",") if dtype else None, target)
    if only and dtype is None:
        dtypes = _taken(only, operation, dtypes)
    wanted = shapes_of(shapes) or (None if manifest else "cases")
    jobs = asked_jobs(
        operation,
        wanted,
        dtypes,
        target.type,
        manifest=manifest,
        layout=layout,
        params=params_of(params, operation),
        named=None if dtype is None else dtypes,
    )
    if not jobs:
        raise ValueError(f"{operation}: wanted calls on {target.type}, got none")
    if wanted == "cases":
        jobs = telling(jobs)
    with with_threads(threads), current(target), live(quiet=quiet) as shown:
        compared = compare(
            jobs,
            target,
            effort=Effort(samples or current_policy()["tune_samples"], fill=target.type == "cpu"),
            clock=clock_of(target),
            deadline=deadline,
            leave_out=leave_out,
            only=only,
            timed=times,
            modules=modules,
            is_long=long_calls(target, deadline) if wanted == "cases" else lambda _: False,
            told=lambda looked: _told(shown, looked),
        )
    found = compared.found
    bad = not found or any(line.status in (Status.WRONG, Status.FAILED) for each in found for line in each.lines)
    try:
        if plot is not None and found:
            charts.plot(found, plot)
        if html is not None and found:
            charts.page(found, html)
    except OSError as error:  # what was measured is told all the same
        say(f"error: {error.filename}: wanted a place to write to, got: {error.strerror}")
        bad = True
    data = {**compared.to_dict(), "budget_s": None if budget_s == math.inf else budget_s}
    return Answer(
        data, lambda: shown_on_screen(compared, operation, budget_s, everything=everything), NO if bad else FINE
    )


def _told(shown: Live, looked: Looked) -> None:
    """Say what is measured, or what was found."""
    ended = looked.found is not None or looked.why
    text = "building what has to compile" if looked.builds else looked.job.name
    shown.at(text, looked.number - (not ended), looked.total, looked.left_s)
    if looked.found is not None:
        again = ", with what was built since" if looked.again else ""
        shown.row(f"{looked.number} of {looked.total}{again}: {result(looked.found)}")
    elif looked.why and looked.why != NO_TIME:
        shown.row(f"not measured: {looked.job.name}: {looked.why}")


def timed_of(text: str | None, device: torch.device) -> Timed:
    """Which times are asked for: both on a CUDA device where nobody says. Raises: ValueError with wanted and got."""
    if text is None:
        return Timed.BOTH if device.type == "cuda" else Timed.CALL
    if text not in list(Timed):
        raise ValueError(f"--timed: wanted one of {', '.join(Timed)}, got {text!r}")
    if text != Timed.CALL and device.type != "cuda":
        raise ValueError(
            f"--timed {text}: wanted a CUDA device, got {device.type}, where a call is all there is to time"
        )
    return Timed(text)


def _taken(only: Sequence[str], operation: str, usual: Sequence[str]) -> Sequence[str]:
    """Of the usual dtypes those that some of these kernels take, or else what the kernels name."""
    kernels = [each for each in REGISTRY.kernels(operation) if any(names_kernel(name, each) for name in only)]
    named = [describe.dtypes(each) for each in kernels]
    if not all(named):
        return usual
    taken = dict.fromkeys(name for names in named for name in names)
    return [name for name in usual if name in taken] or list(taken)
