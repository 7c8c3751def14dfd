"""The commands that check kernels and files of settings: ``fuzz``, ``conformance`` and ``config check``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from layerzero.asking.descriptors import DESCRIPTORS
from layerzero.cli import describe
from layerzero.cli.calls import AsJson, Modules
from layerzero.cli.output import FINE, NO, Answer, examples, import_modules, say
from layerzero.cli.tables import new_row, table_of
from layerzero.core.errors import DescriptorError, PolicyError
from layerzero.engine.config import plain_yaml
from layerzero.engine.policy import Policy, names_kernel, read_policy
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import SETTINGS, Setting, checked, nearest


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

    from layerzero.cli import listing
    from layerzero.testing import fuzz as fuzzing

    import_modules(module or ())
    kernels_exist(kernel or [])
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


def conformance(
    backend: Annotated[
        list[str] | None, typer.Option("--backend", metavar="LIBRARY", help="Check this library only; again for more.")
    ] = None,
    operation: Annotated[
        str, typer.Option("--operation", metavar="OPERATION", help="An operation, function, alias or glob.")
    ] = "*",
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            "--kernel", metavar="KERNEL", help="Check these kernels only: id, glob or library; again for more."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="DEVICE", help="Device of the tensors; a GPU where there is one, else the CPU."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed that draws the random calls.")] = 0,
    calls: Annotated[
        int, typer.Option("--calls", metavar="N", help="Random calls of each operation and dtype.", min=1)
    ] = 20,
    module: Modules = None,
    json: AsJson = False,
) -> Answer:
    """Put kernels against their references, in other processes.

    Cases, random calls, memory layouts, large axes, NaN, threads, gradients, and both sides of every limit. Exits with
    1 if a kernel is wrong, dies or hangs, or if nothing passed.
    """
    from layerzero.testing import conformance as suite

    backends, kernels, modules = backend or [], kernel or [], module or []
    import_modules(modules)
    report = suite.run(
        kernels or None,
        operation,
        backends=backends or None,
        device=device,
        seed=seed,
        calls=calls,
        modules=modules,
        progress=say,
    )
    if not report.kernels:
        of = [] if operation == "*" else [f"operation {operation}"]
        asked = ", ".join([*(f"library {name}" for name in backends), *kernels, *of])
        raise ValueError(f"wanted kernels, got none of {asked}; `layerzero kernels` lists them, --module brings yours")
    if not report.passed:
        say("nothing passed: none of these kernels may run here")
    return Answer(report.to_dict(), lambda: [str(report)], FINE if report.ok and report.passed else NO)


def add_to(app: typer.Typer) -> None:
    """Register both commands."""
    app.command(
        **examples(
            "fuzz --calls 1000",
            "fuzz --operation rms_norm --calls 200",
            'fuzz --calls 1000 --seed 7 --kernel "torch.*"',
        )
    )(fuzz)
    app.command(
        **examples(
            "conformance",
            'conformance --backend onnxruntime --operation "norm.*"',
            'conformance --kernel "mine.*" --module my_package.kernels --calls 200 --json',
        )
    )(conformance)


def problems(file: Path) -> list[str]:
    """List what is wrong, with file, key, wanted and got; empty if the file is fine.

    A name that no kernel has is wrong although the engine takes it: the plugin that brings it may not be installed, but
    far more often it is misspelt, and a denied kernel would run.
    """
    values: dict[str, Any] = {}
    found: list[str] = []
    try:
        said = plain_yaml(file)
    except PolicyError as error:
        return list(error.problems)
    for key, value in said.items():  # each by itself: names are checked whatever is wrong elsewhere
        try:
            values |= checked({key: value}, str(file))
        except PolicyError as error:
            found += error.problems
    defaults = {name: setting.default for name, setting in SETTINGS.items()}
    policy, wrong = read_policy(defaults | values)
    wrong += _wrong_descriptors(policy)
    REGISTRY.ready()
    return [*found, *(f"{file}: {problem}" for problem in wrong), *REGISTRY.names.problems(policy, str(file))]


def _wrong_descriptors(policy: Policy) -> Iterator[str]:
    for path in policy["descriptors"]:
        try:
            DESCRIPTORS.check(path)
        except DescriptorError as error:
            yield from (f"descriptors: {path}: {problem}" for problem in error.problems)


def kernels_exist(patterns: Iterable[str]) -> None:
    """Refuse a pattern that names no kernel. Raises: ValueError with the nearest name."""
    for pattern in patterns:
        if not _names_something(pattern):
            raise ValueError(f"--kernel: {_unknown(pattern)}")


def _names_something(pattern: str) -> bool:
    return any(names_kernel(pattern, kernel) for kernel in REGISTRY.kernels())


def _unknown(pattern: str) -> str:
    known = {name for kernel in REGISTRY.kernels() for name in (kernel.id, kernel.source)}
    return f"wanted a library or kernel, got {pattern!r}, which names none here{nearest(pattern, sorted(known))}"


def effective(settings: Mapping[str, tuple[Any, str]]) -> Iterator[RenderableType]:
    """A row for each setting; those that were set stand out."""
    table = table_of("key", "value", "origin")
    for key, (value, origin) in settings.items():
        style = "" if origin == "default" else "bold green"
        new_row(table, Text(key, style=style), Text(repr(value), style=style), Text(origin, style=style or "dim"))
    yield table


def keys(settings: Mapping[str, Setting]) -> Iterator[RenderableType]:
    """A row for each key."""
    table = table_of("key", "type", "default", "meaning")
    for key, setting in settings.items():
        meaning = setting.meaning if setting.built else f"{setting.meaning} (not built yet: the default only)"
        new_row(table, key, describe.kind(setting.kind), repr(setting.default), meaning)
    yield table
