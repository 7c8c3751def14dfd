"""The commands that tell orchestrators how a deployment stands: ``ready`` and ``serve-health``."""

from __future__ import annotations

from typing import Annotated

import typer

from layerzero.cli.calls import AsJson, Modules
from layerzero.cli.measuring import ManifestFile, Model, Where
from layerzero.cli.output import FINE, NO, Answer, examples, import_modules, say

Sets = Annotated[
    list[str] | None,
    typer.Option("--for", metavar="SET", help="A set of operations that must be served, as serving; again for more."),
]


def ready(
    manifest: ManifestFile = None,
    model: Model = "",
    device: Where = None,
    module: Modules = None,
    asked_for: Sets = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 where a part is degraded, too.")] = False,
    json: AsJson = False,
) -> Answer:
    """Tell whether traffic may come.

    A line for each part: builds, settings, descriptors, tables (each call finds a kernel), headroom (workspaces fit
    into what is free), the database of times, health (kernels that rest, suspects, bans), frozen choices, ranks,
    sets. Looks at every call of the manifest, or else at what this machine called so far. What libraries keep on
    disk counts as built; of what only the serving process can build, and of kernels that rest there,
    lz.readiness_check tells in that process, as do the probes of serve-health. Nothing runs, and nothing is built.
    A build that failed on this machine is listed with its reason and with the kernel that serves in its place;
    traffic need not wait for it. Exits with 0 if traffic may come, with 1 if a part is not ready: a build is
    missing that warmup would make, or calls would raise or run out of memory. With --strict also with 1 where a
    part is degraded.
    """
    from layerzero.serving.readiness import readiness_check

    import_modules(module or ())
    found = readiness_check(manifest, model=model, device=device, sets=asked_for or ())
    fine = found.ready and not (strict and found.degraded)
    return Answer(found.to_dict(), lambda: str(found).splitlines(), FINE if fine else NO)


def serve_health(
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", help="Where to listen; 0 takes any free one.", min=0, max=65535)
    ] = 9400,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 lets other machines ask.")
    ] = "127.0.0.1",
    manifest: ManifestFile = None,
    model: Model = "",
    device: Where = None,
    module: Modules = None,
    asked_for: Sets = None,
    json: AsJson = False,
) -> Answer:
    """Serve /livez, /readyz and /metrics until Ctrl-C.

    /livez is 200 while the process can work, /readyz is 200 or 503 with the lines of `layerzero ready`, /metrics has
    the numbers of lz.metrics for Prometheus. This process sees what lies on disk: builds, times, bans, settings. A
    serving process calls lz.serve_health() or mounts layerzero.serving.probes:app, and has its own numbers in them.
    """
    from layerzero.serving import probes

    import_modules(module or ())
    server = probes.serve_health(port, host=host, manifest=manifest, model=model, device=device, sets=asked_for or ())
    say(f"{server.url} answers /livez, /readyz and /metrics; Ctrl-C ends it")
    try:
        server.wait()
    finally:
        server.close()
    return Answer({"url": server.url}, tuple)


def add_to(app: typer.Typer) -> None:
    """Register both commands."""
    app.command("ready", **examples("ready", "ready --strict", "ready --for decoder --for serving", "ready --json"))(
        ready
    )
    app.command(
        "serve-health",
        **examples("serve-health", "serve-health --port 9400 --host 0.0.0.0 --manifest workload.json"),
    )(serve_health)
