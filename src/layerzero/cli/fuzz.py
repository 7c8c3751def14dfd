"""``layerzero fuzz``: random calls against float64."""

from __future__ import annotations

from typing import Annotated

import typer

from layerzero.cli.calls import AsJson, Modules
from layerzero.cli.output import FINE, NO, Answer, examples, say


def fuzz(
    calls: Annotated[int, typer.Option("--calls", metavar="N", help="Random calls to make.", min=1)] = 1000,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed that draws them; the same seed draws the same calls.")
    ] = 0,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", metavar="KERNEL", help="Test these kernels only: id, glob or library."),
    ] = None,
    operation: Annotated[
        list[str] | None,
        typer.Option(
            "--operation",
            metavar="OPERATION",
            help="Make calls of this only: an operation, function, alias or glob; again for more.",
        ),
    ] = None,
    module: Modules = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Device of the tensors, as torch names it.")
    ] = "cpu",
    json: AsJson = False,
) -> Answer:
    """Compare random calls with float64.

    Exits with 1 if a result is wrong, or if nothing was compared. Each wrong one comes with a line of Python that
    shows it again.
    """
    import logging

    from layerzero.cli import check, listing
    from layerzero.cli.modules import import_modules
    from layerzero.testing import fuzz as fuzzing

    import_modules(module or ())
    check.kernels_exist(kernel or [])
    log = logging.getLogger("layerzero")
    level = log.level
    log.setLevel(logging.ERROR)  # fallbacks are expected here, and counted
    try:
        report = fuzzing.run(
            calls,
            seed,
            progress=lambda so_far: say(listing.progress(so_far, calls)),
            kernels=kernel,
            operations=operation or (),
            device=device,
        )
    finally:
        log.setLevel(level)
    proved = report.ok and report.comparisons > 0
    if report.comparisons == 0:
        say(f"nothing was compared: none of {calls} calls was legal for {', '.join(kernel or ['any kernel'])}")
    return Answer(listing.fuzz_data(report), lambda: [str(report)], FINE if proved else NO)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(
        **examples(
            "fuzz --calls 1000",
            "fuzz --operation rms_norm --calls 200",
            'fuzz --calls 1000 --seed 7 --kernel "torch.*"',
        )
    )(fuzz)
