"""``layerzero ready``: whether what a deployment calls is built, as a question with an exit code."""

from __future__ import annotations

from typing import Annotated

import typer

from layerzero.cli import measuring
from layerzero.cli.calls import AsJson, Modules
from layerzero.cli.output import FINE, NO, Answer, examples


def ready(
    manifest: measuring.ManifestFile = None,
    model: measuring.Model = "",
    device: measuring.Where = None,
    module: Modules = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 where a build failed, too.")] = False,
    json: AsJson = False,
) -> Answer:
    """Tell whether what calls would choose is built, before traffic comes.

    Looks at every call of the manifest, or else at what this machine called so far. What libraries keep on disk counts
    as built; of what only the serving process can build, lz.readiness_check tells in that process. Nothing runs, and
    nothing is built. A build that failed on this machine is told with its reason and with the kernel that serves in
    its place; traffic need not wait for it. Exits with 0 if traffic may come, with 1 if a build is missing that warmup
    would make, or if a build failed and nothing may serve in its place. With --strict also with 1 where any failed.
    """
    from layerzero.cli.modules import import_modules
    from layerzero.serving.readiness import readiness_check

    import_modules(module or ())
    found = readiness_check(manifest, model=model, device=device)
    fine = found.ready and not (strict and found.failed)
    return Answer(found.to_dict(), lambda: str(found).splitlines(), FINE if fine else NO)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("ready", **examples("ready", "ready --strict", "ready --json"))(ready)
