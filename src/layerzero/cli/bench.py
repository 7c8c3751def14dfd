"""``layerzero bench``: a table for each call, and charts where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import RenderableType
from rich.text import Text

from layerzero.cli import check, describe
from layerzero.cli.modules import import_modules
from layerzero.cli.output import FINE, NO, Answer, say
from layerzero.cli.question import pair_of, value_of
from layerzero.cli.rows import new_row, new_table
from layerzero.cli.sizes import shapes_of, with_threads
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.config import current_policy
from layerzero.engine.failing import out_of_memory
from layerzero.engine.policy import names_kernel
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measuring.asked import asked_jobs
from layerzero.tuning.measuring.bench import Benched, Line, bench
from layerzero.tuning.measuring.contest import Status
from layerzero.tuning.measuring.jobs import operations_named
from layerzero.tuning.measuring.on_device import Timed
from layerzero.tuning.measuring.room import too_large
from layerzero.tuning.measuring.timing import Effort, clock_of
from layerzero.tuning.measuring.tune import dtypes_of

_ABSENT = frozenset({ReasonCode.NOT_INSTALLED, ReasonCode.PLATFORM_MISMATCH})
"""A library that is not here, or made for other hardware: one line for all of them."""


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
    leave_out: Sequence[str],
    only: Sequence[str],
    params: Sequence[str],
    modules: Sequence[str],
    timed: str | None,
    plot: Path | None,
    html: Path | None,
    quiet: bool,
) -> Answer:
    """Measure, draw and tell. Raises: ValueError or KeyError for flags that mean nothing."""
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
        operation, wanted, dtypes, target.type, manifest=manifest, layout=layout, params=_params(params, operation)
    )
    if not jobs:
        raise ValueError(f"{operation}: wanted calls on {target.type}, got none")
    effort = Effort(samples or current_policy()["tune_samples"], fill=target.type == "cpu")
    found = []
    with with_threads(threads):
        clock = clock_of(target)
        for number, job in enumerate(jobs, 1):
            if not quiet:
                say(f"measuring {job.name} ({number} of {len(jobs)})")
            try:
                why = too_large(job.facts(target))
                if not why:
                    made = bench(job, target, effort=effort, clock=clock, leave_out=leave_out, only=only, timed=times)
                    found.append(made)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                why = f"too little memory: {str(error).partition(chr(10))[0]}"
            if why:
                say(f"not measured: {job.name}: {why}")
    bad = not found or any(line.status in (Status.WRONG, Status.FAILED) for each in found for line in each.lines)
    try:
        if plot is not None and found:
            charts.plot(found, plot)
        if html is not None and found:
            charts.page(found, html)
    except OSError as error:  # what was measured is told all the same
        say(f"error: {error.filename}: wanted a place to write to, got: {error.strerror}")
        bad = True
    return Answer([each.to_dict() for each in found], lambda: _shown(found), NO if bad else FINE)


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


def _params(texts: Sequence[str], operation: str) -> dict[str, object]:
    """What ``--param`` says, of the types that the operations declare. Raises: ValueError with wanted and got."""
    _, names = operations_named(operation)
    schemas = [REGISTRY.operation(name).schema for name in names]
    known = {name: schema.param(name) for schema in schemas for name in (*schema.chosen, *schema.scalars)}
    found = {}
    for name, text in (pair_of(text, "--param", "name=value") for text in texts):
        if name not in known:
            raise ValueError(f"--param: wanted one of {', '.join(sorted(known)) or 'no parameters'}, got {name!r}")
        found[name] = value_of(known[name].types, text, f"--param {name}")
        problem = known[name].problem(found[name])
        if problem:
            raise ValueError(f"--param {problem}")
    return found


def _taken(only: Sequence[str], operation: str, usual: Sequence[str]) -> Sequence[str]:
    """Of the usual dtypes those that some of these kernels take, or else what the kernels name."""
    kernels = [each for each in REGISTRY.kernels(operation) if any(names_kernel(name, each) for name in only)]
    named = [describe.dtypes(each) for each in kernels]
    if not all(named):
        return usual
    taken = dict.fromkeys(name for names in named for name in names)
    return [name for name in usual if name in taken] or list(taken)


def _shown(found: Sequence[Benched]) -> Iterator[RenderableType]:
    for each in found:
        yield Text(each.name, style="bold")
        yield Text(described(each), style="dim")
        headers = columns(each.timed)
        table = new_table("", *headers, right=[header for header in headers if header not in ("kernel", "device from")])
        for line in each.lines:
            mark = Text(">", style="bold green") if line.chosen else ""
            new_row(table, mark, Text(line.name, style="bold green" if line.chosen else ""), *cells(line, each.timed))
        yield table
        if each.rough:
            yield Text(f"{each.rough}: these times are rough", style="yellow")
        for line in each.lines:
            for told in details(line):
                yield Text(told, style="yellow")
        yield from (Text(text, style="dim") for text in refusals(each.refused))
        yield ""


def described(each: Benched) -> str:
    """What the call must do, what the machine can, and who is chosen."""
    parts = [f"chosen: {each.chosen}"]
    if each.work is not None and each.ceiling is not None:
        parts.append(f"{each.work.bytes / 1e6:.3g} MB and {each.work.flops / 1e9:.3g} GFLOP")
        parts.append(f"ceiling {each.ceiling.gb_s:.3g} GB/s, {each.ceiling.tflop_s:.3g} TFLOP/s, measured")
        parts.append(f"at best {each.ceiling.least_us(each.work):.3g} us from memory")
    return "; ".join(parts)


def columns(timed: Timed) -> list[str]:
    """What stands above the cells of a line, its kernel first."""
    of_call = [] if timed is Timed.DEVICE else ["median us", "p95 us", "noise"]
    of_device = [] if timed is Timed.CALL else ["device us", "device from"]
    return ["kernel", *of_call, *of_device, "GB/s", "TFLOP/s", "of ceiling", "vs torch", "error"]


def cells(line: Line, timed: Timed) -> list[str]:
    """Numbers of a line as text; a kernel without a time has its status in their place."""
    if line.median_us is None or line.p95_us is None:
        return [line.status, *[""] * (len(columns(timed)) - 3), _error(line.error)]
    noise = "" if line.noise is None else f"{100 * line.noise:.1f} %"
    of_call = [] if timed is Timed.DEVICE else [f"{line.median_us:.1f}", f"{line.p95_us:.1f}", noise]
    device = "" if line.device_us is None else f"{line.device_us:.1f}"
    of_device = [] if timed is Timed.CALL else [device, line.device_from]
    share = "" if line.ceiling_share is None else f"{100 * line.ceiling_share:.0f} %"
    torch_ = "" if line.against_torch is None else f"{line.against_torch:.2f}x"
    rates = ["" if rate is None else f"{rate:.3g}" for rate in (line.gb_s, line.tflop_s)]
    return [*of_call, *of_device, *rates, share, torch_, _error(line.error)]


def details(line: Line) -> Iterator[str]:
    """Why a line has no time, or why its device time is no graph's."""
    if line.detail:
        yield f"{line.name}: {line.detail}"
    if line.device_detail:
        instead = "one launch between two events instead" if line.device_from else "no device time"
        yield f"{line.name}: not captured in a CUDA graph: {line.device_detail}; {instead}"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def refusals(refused: Mapping[str, Sequence[Reason]]) -> Iterator[str]:
    """Why kernels may not run: a line each, and one for all whose library or hardware is not here."""
    absent = []
    for kernel, reasons in refused.items():
        if any(reason.code in _ABSENT for reason in reasons):
            absent.append(kernel)
        else:
            yield f"refused: {kernel}: {'; '.join(f'{reason.code}: {reason.message}' for reason in reasons)}"
    if absent:
        yield f"not for this machine: {', '.join(absent)}"
