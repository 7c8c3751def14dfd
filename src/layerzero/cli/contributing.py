"""Commands for those who write backends or work on LayerZero itself: ``new-backend`` and ``docs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerzero.cli.calls import AsJson
from layerzero.cli.output import Answer, examples


def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The library's module, which names the backend.")],
    operation: Annotated[
        list[str],
        typer.Option(
            "--operation", metavar="OPERATION", help="A function, operation or alias that it implements; one."
        ),
    ],
    root: Annotated[
        Path | None,
        typer.Option("--root", metavar="FOLDER", help="The source checkout; by default the one of this folder."),
    ] = None,
    json: AsJson = False,
) -> Answer:
    """Write the files of a new backend: declaration, test, table line.

    In a checkout of LayerZero a built-in one; elsewhere a package in ./NAME whose entry point brings the kernel. What
    it writes runs at once, and fails with the next step until the library's calls are filled in. Nothing is
    overwritten.
    """
    from layerzero.cli import new_backend as command

    if len(operation) > 1:
        got = ", ".join(operation)
        raise ValueError(f"--operation: wanted one, got {got}; further kernels go into KERNELS of the file it writes")
    return command.answer(name, operation[0], root)


def docs(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if a file is stale.")] = False,
    root: Annotated[
        Path | None, typer.Option("--root", metavar="FOLDER", help="The source checkout; found by itself.")
    ] = None,
    json: AsJson = False,
) -> Answer:
    """Write the generated documentation, or check it.

    It follows from the declarations: the table of fields in docs/backends.md, and whole pages of docs/.
    """
    from layerzero.cli import docs as generated

    return generated.answer(root, check=check)


def add_to(app: typer.Typer) -> None:
    """Register both commands."""
    lines = "new-backend my_library --operation rms_norm", "new-backend my_library --operation attention"
    app.command("new-backend", **examples(*lines))(new_backend)
    app.command("docs", **examples("docs", "docs --check"))(docs)
