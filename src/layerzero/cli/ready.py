"""``layerzero ready``: whether what a deployment calls is built, as a question with an exit code."""

from __future__ import annotations

import typer

from layerzero.cli import measuring
from layerzero.cli.calls import AsJson, Modules
from layerzero.cli.output import FINE, NO, Answer, examples


def ready(
    manifest: measuring.ManifestFile = None,
    model: measuring.Model = "",
    device: measuring.Where = None,
    module: Modules = None,
    json: AsJson = False,
) -> Answer:
    """Tell whether what calls would choose is built, before traffic comes.

    Looks at every call of the manifest, or else at what this machine called so far. What libraries keep on disk counts
    as built; of what only the serving process can build, lz.readiness_check tells in that process. Nothing runs, and
    nothing is built. Exits with 1 if a build is missing.
    """
    from layerzero.cli.modules import import_modules
    from layerzero.serving.readiness import readiness_check

    import_modules(module or ())
    found = readiness_check(manifest, model=model, device=device)
    return Answer(found.to_dict(), lambda: str(found).splitlines(), FINE if found else NO)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("ready", **examples("ready", "ready --json"))(ready)
