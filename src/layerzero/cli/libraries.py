"""``layerzero libraries``: what to install together."""

from __future__ import annotations

from typing import Annotated

import typer

from layerzero.cli.calls import AsJson
from layerzero.cli.output import FINE, NO, Answer, examples
from layerzero.cli.plans import Sets


def libraries(
    asked_for: Sets = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="For which device, as H100; this machine's best.")
    ] = None,
    torch_version: Annotated[
        str, typer.Option("--torch", metavar="VERSION", help="With which torch; the one that is here.")
    ] = "",
    json: AsJson = False,
) -> Answer:
    """Tell which libraries to install together, for sets of operations on a device.

    Each at the newest version that was tested and fits torch, CUDA, driver and device, unless it does harm to one
    that serves more operations. Those that are left out have their reason. Exits with 1 where there is none.
    """
    from layerzero.cli.question import device_of
    from layerzero.inspection.library_sets import together

    found = together(asked_for or (), device_of(device), torch_version)
    return Answer(found.to_dict(), found.lines, FINE if found.libraries else NO)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    lines = "libraries --for serving --device H100", "libraries --for decoder", "libraries --device MI300X --json"
    app.command("libraries", **examples(*lines))(libraries)
