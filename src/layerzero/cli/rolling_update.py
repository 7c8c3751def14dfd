"""``layerzero rolling-update``: instances are updated a few at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from layerzero.cli.calls import AsJson
from layerzero.cli.output import FINE, NO, Answer, examples, say


def _hook(name: str, meaning: str) -> Any:
    return typer.Option(name, metavar="COMMAND", help=meaning)


def rolling_update(
    instances: Annotated[
        list[str], typer.Argument(metavar="NAME=URL...", help="Instances, with the addresses of their probes.")
    ],
    update: Annotated[str, _hook("--update", "Ends an instance, and has the new one listen before it ends.")],
    fallback_on: Annotated[str, _hook("--fallback-on", "Makes the instance's fallback file.")] = "",
    fallback_off: Annotated[str, _hook("--fallback-off", "Removes it.")] = "",
    no_fallback: Annotated[
        bool, typer.Option("--no-fallback", help="Let old and new instances run different kernels meanwhile.")
    ] = False,
    checkpoint: Annotated[
        str, _hook("--checkpoint", "Keeps measured times and the like, before anything changes.")
    ] = "",
    max_unavailable: Annotated[
        int, typer.Option("--max-unavailable", metavar="N", help="Instances that are updated at a time.", min=1)
    ] = 1,
    ready_s: Annotated[
        float,
        typer.Option("--ready-s", metavar="SECONDS", help="How long an instance may take until it is ready.", min=0),
    ] = 600.0,
    hook_s: Annotated[
        float, typer.Option("--hook-s", metavar="SECONDS", help="How long a command may take.", min=0)
    ] = 600.0,
    file: Annotated[
        Path | None,
        typer.Option("--state", metavar="FILE", help="Keeps what was reached; the next run goes on from it."),
    ] = None,
    json: AsJson = False,
) -> Answer:
    """Update instances a few at a time, all of them on torch's own kernels meanwhile.

    First every instance must be ready and of one version, and follow a fallback file (serve-health --fallback-file,
    lz.serve_health); then each is forced to torch's own kernels, and shows it. Each is updated and must come back as a
    new process that is alive, ready, still forced, and of the version of those before it. At the end all are compared,
    and choose their kernels again. Stops at the first that is not as it should be, with the state of each; the same
    command with the same --state goes on. Commands run without a shell; {name} and {url} stand for the instance's, and
    each command may run again on an instance. Exits with 1 where the update stopped.
    """
    import msgspec

    from layerzero.core.system.disk import check_place
    from layerzero.serving.rolling_update import Hooks, RollingUpdate, command

    if bool(fallback_on and fallback_off) == no_fallback or bool(fallback_on) != bool(fallback_off):
        raise ValueError("--fallback-on, --fallback-off: wanted both, or --no-fallback in their place")
    named = dict(each.partition("=")[::2] for each in instances)
    if len(named) < len(instances):
        raise ValueError(f"NAME=URL: wanted each name once, got {', '.join(instances)}")
    hooks = (command(each, hook_s) if each else None for each in (fallback_on, fallback_off, checkpoint))
    if file is not None:
        check_place(file)
    run = RollingUpdate(
        named,
        Hooks(command(update, hook_s), *hooks),
        max_unavailable=max_unavailable,
        ready_s=ready_s,
        file=file,
        say=say,
    )
    reached = run.run()
    return Answer(msgspec.to_builtins(reached), reached.lines, FINE if reached.done else NO)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(
        "rolling-update",
        **examples(
            "rolling-update a=http://10.0.0.7:9400 b=http://10.0.0.8:9400 --state update.json"
            " --update 'ssh {name} systemctl restart service' --fallback-on 'ssh {name} touch /run/service/fallback'"
            " --fallback-off 'ssh {name} rm -f /run/service/fallback'"
        ),
    )(rolling_update)
