"""The flags of ``layerzero tune``, ``bench`` and ``ready``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from layerzero.cli.calls import AsJson, Modules
from layerzero.cli.output import FINE, NO, Answer, examples, import_modules, live, say

BENCH_S, VET_S = 60.0, 100.0
"""Seconds that `bench` and `vet` take by default."""

Name = Annotated[str, typer.Argument(metavar="OPERATION", help="A function, operation, alias or glob.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shapes",
        metavar="SIZES",
        help="Shape of the query or input, 1x2048x32x128; with :1x2048x8x128 for other keys; with commas or again for "
        "more.",
    ),
]
Cases = Annotated[bool, typer.Option("--cases", help="The operations' own cases; `layerzero operations` lists them.")]
ManifestFile = Annotated[
    Path | None, typer.Option("--manifest", metavar="FILE", help="A workload that lz.record wrote.")
]
Model = Annotated[
    str,
    typer.Option("--model", metavar="NAME", help="What the manifest must have been recorded of; another is an error."),
]
Dtypes = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="With commas for more; by default bfloat16, on a CPU float32 and bfloat16."
    ),
]
Layout = Annotated[
    str | None, typer.Option("--layout", metavar="LAYOUT", help="BSHD or BHSD of attention, NHD or HND of a cache.")
]


def _device(text: str | None) -> str | None:
    """A device's name as torch reads it. Raises: BadParameter."""
    if text is not None:
        import torch

        try:
            torch.device(text)
        except RuntimeError as error:
            raise typer.BadParameter(f"wanted a device such as cpu, cuda or cuda:1, got {text!r}") from error
    return text


Where = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="Where; a GPU where there is one, else the CPU.", callback=_device),
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="Threads on a CPU; by default as torch has them.", min=1)
]
Samples = Annotated[
    int | None,
    typer.Option("--samples", metavar="N", help="Samples of each kernel; by default the setting tune_samples.", min=3),
]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="KERNEL", help="Leave this library or kernel glob out. Again for more."),
]

Param = Annotated[
    list[str] | None,
    typer.Option(
        "--param", metavar="NAME=VALUE", help="A parameter of the operation, in every call measured. Again for more."
    ),
]


def tune(
    operation: Name = "*",
    shapes: Shapes = None,
    cases: Cases = False,
    manifest: ManifestFile = None,
    model: Model = "",
    dtype: Dtypes = None,
    layout: Layout = None,
    device: Where = None,
    threads: Threads = None,
    samples: Samples = None,
    budget_s: Annotated[
        float | None,
        typer.Option("--budget-s", metavar="SECONDS", help="End after so long; a second run goes on.", min=0),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure what is known, too.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Time replays of CUDA graphs, not eager calls.")] = False,
    no_isolation: Annotated[
        bool, typer.Option("--no-isolation", help="Run what is new on this machine in this very process.")
    ] = False,
    module: Modules = None,
    without: Without = None,
    param: Param = None,
    everything: Annotated[bool, typer.Option("--all", help="Show each call, not only those that changed.")] = False,
    json: AsJson = False,
) -> Answer:
    """Measure kernels, so that the fastest is chosen.

    Without --shapes, --cases or --manifest: a grid of sizes between which times can be predicted. What is known is
    skipped, so that an interrupted run goes on. Every kernel is compared with the reference first; a new one runs in a
    child process before. Kernels may compile. Exits with 1 if nothing was measured or known. --dtype and --layout leave
    out what was called or recorded in others. --param goes with --shapes or --cases; operations without tensors take it
    alone: what their kernels are measured for.
    """
    import torch

    from layerzero.cli import plain
    from layerzero.cli import tune as screen
    from layerzero.cli.flags import left_of, params_of, shapes_of, with_threads
    from layerzero.tuning.measurement.tune import tune as run

    if plain.covers(operation):
        return plain.tune(
            operation, param or [], samples=samples, budget_s=budget_s, again=again, leave_out=without or [], quiet=json
        )
    if shapes and cases:
        raise ValueError("--cases: wanted either --shapes or --cases, got both")
    import_modules(module or ())
    usual = torch.get_num_threads()
    with with_threads(threads), live(quiet=json) as shown:
        tuned = run(
            operation, "cases" if cases else shapes_of(shapes), dtype.split(",") if dtype else None, device,
            manifest=manifest, model=model, layout=layout, params=params_of(param or [], operation), samples=samples,
            budget_s=None if budget_s is None else left_of(budget_s), again=again, graph=graph,
            isolate=not no_isolation, modules=module or [], leave_out=without or [],
            progress=lambda step: screen.tell(shown, step),
        )  # fmt: skip
        used = torch.get_num_threads()
    return Answer(
        tuned.to_dict(),
        lambda: screen.shown(tuned, used, usual, everything=everything),
        FINE if tuned.contests or tuned.known else NO,
    )


def bench(
    operation: Name,
    shapes: Shapes = None,
    manifest: ManifestFile = None,
    dtype: Dtypes = None,
    layout: Layout = None,
    device: Where = None,
    threads: Threads = None,
    samples: Samples = None,
    budget_s: Annotated[
        float,
        typer.Option("--budget-s", metavar="SECONDS", help="End after so long, whatever compiles; inf has no end."),
    ] = BENCH_S,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", metavar="KERNEL", help="Run these kernels only: id, glob or library; again for more."),
    ] = None,
    without: Without = None,
    param: Param = None,
    module: Modules = None,
    timed: Annotated[
        str | None,
        typer.Option(
            "--timed",
            metavar="TIMES",
            help="call: what a caller waits for; device: what a GPU needs, launching apart; both. On a GPU both by "
            "default.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the times into a PNG or SVG file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one page with tables and a chart an operation.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="A table for each call, and each reason in full.")] = False,
    json: AsJson = False,
) -> Answer:
    """Run every legal kernel side by side, and compare.

    Without --shapes or --manifest: the operations' own cases, those first that tell most of models. With --kernel and
    without --dtype: the usual dtypes that these kernels take. Each result is printed as it comes. The end says which
    kernel is fastest where, what that gains over torch's own function, what LayerZero chooses now, and what time did
    not suffice for. With --all, or where it fits on a screen, each call has a table: median, p95 and noise, GB/s,
    TFLOP/s and the share of what this machine's copy and matrix product reach, speed against torch's own function,
    distance from the reference in float64, what LayerZero chooses, and why other kernels are refused. On a GPU there is
    the device's own time, too: of replays of a CUDA graph that holds many calls, which find their tensors outside of
    the L2 cache (cold) or, where a call is too small for that, in it (warm); a kernel that cannot be captured says why
    and has the time of one launch between two events. With --timed device, order, rates and speed go by it. Times are
    not remembered. A kernel that gives a wrong result is banned until its library has another version or `layerzero vet
    --again` passes it, and failures are remembered. What this machine's memory does not hold is left out. Exits with 1
    if a kernel is wrong or fails, or if nothing was measured.
    """
    import math

    import torch

    from layerzero.cli import bench as screen
    from layerzero.cli import bench_tables, describe, plain
    from layerzero.cli.flags import deadline_of, params_of, shapes_of, with_threads
    from layerzero.engine.config import current_policy
    from layerzero.tuning.measurement.clocks import clock_of, current
    from layerzero.tuning.measurement.comparison import compare, long_calls
    from layerzero.tuning.measurement.contest import Status
    from layerzero.tuning.measurement.jobs import telling
    from layerzero.tuning.measurement.timing import Effort
    from layerzero.tuning.measurement.tune import asked_jobs, dtypes_of

    if plain.covers(operation):
        if timed not in (None, "call"):
            raise ValueError(f"--timed: wanted call for an operation without tensors, got {timed!r}")
        return plain.bench(
            operation, param or [], samples=samples, budget_s=budget_s, only=kernel or [], leave_out=without or [],
            quiet=json,
        )  # fmt: skip
    deadline = deadline_of(budget_s)
    if plot is not None or html is not None:
        bench_tables.check(plot, html)
    import_modules(module or ())
    only = kernel or []
    describe.kernels_exist(only)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    times = screen.timed_of(timed, target)
    dtypes: Sequence[str] = dtypes_of(dtype.split(",") if dtype else None, target)
    if only and dtype is None:
        dtypes = screen.dtypes_taken(only, operation, dtypes)
    wanted = shapes_of(shapes) or (None if manifest else "cases")
    jobs = asked_jobs(
        operation,
        wanted,
        dtypes,
        target.type,
        manifest=manifest,
        layout=layout,
        params=params_of(param or [], operation),
        named=None if dtype is None else dtypes,
    )
    if not jobs:
        raise ValueError(f"{operation}: wanted calls on {target.type}, got none")
    if wanted == "cases":
        jobs = telling(jobs)
    with with_threads(threads), current(target), live(quiet=json) as shown:
        compared = compare(
            jobs,
            target,
            effort=Effort(samples or current_policy()["tune_samples"], fill=target.type == "cpu"),
            clock=clock_of(target),
            deadline=deadline,
            leave_out=without or [],
            only=only,
            timed=times,
            modules=module or [],
            is_long=long_calls(target, deadline) if wanted == "cases" else lambda _: False,
            told=lambda looked: screen.tell(shown, looked),
        )
    found = compared.found
    bad = not found or any(line.status in (Status.WRONG, Status.FAILED) for each in found for line in each.lines)
    try:
        if plot is not None and found:
            bench_tables.plot(found, plot)
        if html is not None and found:
            bench_tables.page(found, html)
    except OSError as error:  # what was measured is printed all the same
        say(f"error: {error.filename}: wanted a place to write to, got: {error.strerror}")
        bad = True
    data = {**compared.to_dict(), "budget_s": None if budget_s == math.inf else budget_s}
    return Answer(
        data, lambda: screen.shown_on_screen(compared, operation, budget_s, everything=everything), NO if bad else FINE
    )


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(
        "tune",
        **examples(
            "tune", "tune attention --dtype bfloat16 --budget-s 120", "tune --manifest workload.json",
            "tune rms_norm --shapes 1x4096,64x4096 --dtype float32", "tune tokenize --param tokenizer_id=cl100k_base",
        ),
    )(tune)  # fmt: skip
    app.command(
        "bench",
        **examples(
            "bench attention", "bench attention --budget-s 300 --all",
            "bench attention --shapes 1x512x32x128:1x512x8x128 --dtype bfloat16",
            "bench rms_norm --shapes 1x4096,64x4096 --json", "bench rms_norm --shapes 8x64 --kernel torch.rms_norm",
            "bench rms_norm --shapes 64x4096 --timed device",
            "bench tokenize --param tokenizer_id=cl100k_base",
            'bench "norm.*" --html norms.html --plot norms.png',
        ),
    )(bench)  # fmt: skip
