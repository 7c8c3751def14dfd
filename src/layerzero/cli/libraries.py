"""``layerzero libraries``: what to install together; ``layerzero hub``: kernels of the Hugging Face hub here."""

from __future__ import annotations

from pathlib import Path
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


def try_builds() -> dict[str, str]:
    """Import every build that passed its checks in a child process; gives what is not used, and why."""
    from layerzero.engine.registry import REGISTRY

    REGISTRY.ready()
    if REGISTRY.hub is None:
        return {}
    REGISTRY.hub.admitted()
    return REGISTRY.hub.told()


def hub(
    lock: Annotated[
        Path | None,
        typer.Option("--lock", metavar="FILE", help="Pin what may be used here: commit, and a hash of each variant."),
    ] = None,
    json: AsJson = False,
) -> Answer:
    """List the kernels of the Hugging Face hub on this disk, and try each in a child process.

    Where they are looked for, and which may be used, the settings hub.enabled, hub.folder, hub.lockfile and hub.allow
    say. Nothing is downloaded. Exits with 1 if something is refused, and then writes no lockfile.
    """
    from layerzero.backends.hub.find import Found, text_of
    from layerzero.core.system.disk import write_whole
    from layerzero.engine.config import CONFIGURATION
    from layerzero.engine.registry import REGISTRY

    if not CONFIGURATION.policy["hub.enabled"]:
        raise ValueError("hub: wanted hub.enabled true, as by LAYERZERO_HUB_ENABLED=1, got false")
    refused = try_builds()
    builds = [each for each in REGISTRY.hub.builds if each.repo not in refused] if REGISTRY.hub else []
    lines = [
        f"{each.repo} {each.revision[:12]} {each.variant}, version {each.version}, "
        f"{'signed' if each.signed else 'not signed'}: kernels "
        + ", ".join(kernel.id for kernel in REGISTRY.kernels() if kernel.backend == each.backend)
        for each in builds
    ]
    lines += [f"{repo}: refused: {why}" for repo, why in refused.items()]
    if lock is not None and not refused:
        found = [Found(each.repo, Path(each.path).parents[1], each.revision) for each in builds]
        write_whole(lock, text_of(found).encode())
        lines.append(f"{lock}: pins {len(found)}; set hub.lockfile to it")
    data = {
        "used": [
            {"repo": each.repo, "revision": each.revision, "variant": each.variant, "signed": each.signed}
            for each in builds
        ],
        "refused": refused,
    }
    return Answer(data, lambda: lines or ["nothing of the hub is on this disk"], NO if refused else FINE)


def add_to(app: typer.Typer) -> None:
    """Register both commands."""
    lines = "libraries --for serving --device H100", "libraries --for decoder", "libraries --device MI300X --json"
    app.command("libraries", **examples(*lines))(libraries)
    app.command(**examples("hub", "hub --lock hub.lock", "hub --json"))(hub)
