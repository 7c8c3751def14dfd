"""The commands that check kernels: ``fuzz`` and ``conformance``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from layerzero.cli.calls import NONE, Kernels, Where, device_here, option
from layerzero.cli.output import FINE, NO, Answer, Commands, Modules, say

if TYPE_CHECKING:
    from layerzero.testing.fuzz import FuzzReport


def fuzz(
    calls: Annotated[int, option("N", "Random calls to make.", min=1)] = 1000,
    seed: Annotated[
        int, option("N", "Seed that draws them; it draws the same calls for the same kernels and operations.")
    ] = 0,
    kernel: Kernels = NONE,
    operation: Annotated[
        list[str] | None,
        option(
            "OPERATION",
            "Make calls of this only: an operation, function, alias or glob; again for more.",
            "--operation",
        ),
    ] = None,
    device: Annotated[
        str, option("DEVICE", "Device of the tensors, as torch names it.", "--device", callback=device_here)
    ] = "cpu",
) -> Answer:
    """Compare random calls with float64.

    Exits with 1 if a result is wrong, or if nothing was compared. Each wrong one comes with a line of Python that
    shows it again.
    """
    import logging

    from layerzero.engine.registry import REGISTRY
    from layerzero.testing import fuzz as fuzzing

    REGISTRY.check_named(kernel)
    log = logging.getLogger("layerzero")
    level = log.level
    log.setLevel(logging.ERROR)  # fallbacks are expected here, and counted
    try:
        report = fuzzing.run(
            calls, seed, progress=_Progress(calls), kernels=kernel or None, operations=operation or (), device=device
        )
    finally:
        log.setLevel(level)
    proved = report.ok and report.comparisons > 0
    if report.comparisons == 0:
        say(f"nothing was compared: none of {calls} calls was legal for {', '.join(kernel) or 'any kernel'}")
    return Answer(_fuzz_data(report), lambda: [str(report)], FINE if proved else NO)


def conformance(
    backend: Annotated[list[str], option("LIBRARY", "Check this library only; again for more.")] = NONE,
    operation: Annotated[str, option("OPERATION", "An operation, function, alias or glob.", "--operation")] = "*",
    kernel: Kernels = NONE,
    device: Where = None,
    seed: Annotated[int, option("N", "Seed that draws the random calls.")] = 0,
    calls: Annotated[int, option("N", "Random calls of each operation and dtype.", min=1)] = 20,
    module: Modules = None,
) -> Answer:
    """Put kernels against their references, in other processes.

    Cases, random calls, memory layouts, large axes, NaN, threads, gradients, and both sides of every limit. Exits with
    1 if a kernel is wrong, dies or hangs, or if nothing passed.
    """
    from layerzero.testing import conformance as suite

    report = suite.run(
        kernel or None,
        operation,
        backends=backend or None,
        device=device,
        seed=seed,
        calls=calls,
        modules=module or (),
        progress=say,
    )
    if not report.kernels:
        of = [] if operation == "*" else [f"operation {operation}"]
        asked = ", ".join([*(f"library {name}" for name in backend), *kernel, *of])
        raise ValueError(f"wanted kernels, got none of {asked}; `layerzero kernels` lists them, --module brings yours")
    if not report.passed:
        say("nothing passed: none of these kernels may run here")
    return Answer(report.to_dict(), lambda: [str(report)], FINE if report.ok and report.passed else NO)


def _fuzz_data(report: FuzzReport) -> dict[str, Any]:
    names = ("number", "kernel_id", "way", "problem", "call", "reproducer")
    failures = [{name: getattr(each, name) for name in names} for each in report.failures]
    data = {name: getattr(report, name) for name in ("ok", "seed", "calls", "comparisons", "reused")}
    return {
        **data,
        "seconds": round(report.seconds, 3),
        "kernels": dict(report.kernels.most_common()),
        "failures": failures,
    }


@dataclass(slots=True)
class _Progress:
    """Says how far a run is, and each wrong result at once: a run that is cut off prints no report."""

    calls: int
    wrong: int = 0

    def __call__(self, report: FuzzReport) -> None:
        from layerzero.testing.fuzz import SHOWN

        for failure in report.failures[self.wrong : SHOWN]:
            say(str(failure))
        self.wrong = len(report.failures)
        say(f"{report.calls} of {self.calls} calls, {self.wrong} wrong, {report.rate:.0f} calls a second")


def add_to(app: Commands) -> None:
    """Register both commands."""
    app.command(
        "fuzz",
        "fuzz --calls 1000",
        "fuzz --operation rms_norm --calls 200",
        'fuzz --calls 1000 --seed 7 --kernel "torch.*"',
        modules=True,
    )(fuzz)
    app.command(
        "conformance",
        "conformance",
        'conformance --backend onnxruntime --operation "norm.*"',
        'conformance --kernel "mine.*" --module my_package.kernels --calls 200 --json',
        modules=True,
    )(conformance)
