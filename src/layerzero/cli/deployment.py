"""What a deployment installs and updates: ``layerzero libraries``, ``formats``, ``hub`` and ``rolling-update``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from packaging.version import InvalidVersion, Version

from layerzero.cli.calls import argument, flag, option
from layerzero.cli.output import FINE, NO, Answer, Commands, say
from layerzero.cli.plans import Sets
from layerzero.cli.tables import new_row, table_of

_On = Annotated[str | None, option("DEVICE", "For which device, as H100; this machine's best.", "--device")]
_With = Annotated[str, option("VERSION", "With which torch; the one that is here.", "--torch")]


def _check_torch(version: str) -> None:
    try:
        Version(version or "2")
    except InvalidVersion:
        raise ValueError(f"--torch: wanted a version like 2.11.0, got {version!r}") from None


def formats(
    device: _On = None,
    rows: Annotated[int, option("N", "Rows of the product, 1 for a decode.", min=1, max=2**40)] = 1,
    dtype: Annotated[str, option("DTYPE", "Dtype of the rows.", "--dtype")] = "",
    torch_version: _With = "",
) -> Answer:
    """Tell what each format of weights loses, and which kernels multiply with it on a device.

    The loss is that of normal numbers, as a share of their norm. lz.quantize_weight(..., accuracy=) measures yours, and
    lz.optimize(weights="auto") takes the fastest within a bound. Kernels are those of all libraries that were tested
    and fit; the one in brackets runs with what is installed here. A star: the device computes in such numbers. Where
    all kernels write the numbers out first, "instead" names formats that a kernel takes as they are.
    """
    from layerzero.cli.question import device_of
    from layerzero.core.dtypes import dtype_named
    from layerzero.serving import advice

    _check_torch(torch_version)
    where = device_of(device)
    found = advice.formats(where, rows, dtype_named(dtype) if dtype else None, torch_version)
    columns = "format", "bits", "loses", "rows in", "kernels", "instead"
    table = table_of(*columns, right=("bits", "loses"), ids=("format",))
    for each in found:
        kernels = ", ".join(f"({one})" if one == each.here else one for one in each.kernels)
        star = "*" if each.native else ""
        numbers = f"{each.bits:.4g}", f"{each.loss:.3g}"
        new_row(table, f"{each.name}{star}", *numbers, each.rounded, kernels, ", ".join(each.instead))
    return Answer({"device": where.name, "formats": [asdict(each) for each in found]}, lambda: [table])


def libraries(asked_for: Sets = None, device: _On = None, torch_version: _With = "") -> Answer:
    """Tell which libraries to install together, for sets of operations on a device.

    Each at the newest version that was tested and fits torch, CUDA, driver and device, unless it does harm to one
    that serves more operations. Those that are left out have their reason. Exits with 1 where there is none.
    """
    from layerzero.cli.question import device_of
    from layerzero.inspection.model_sets import together

    _check_torch(torch_version)
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
        Path | None, option("FILE", "Pin what may be used here: commit, and a hash of each variant.")
    ] = None,
) -> Answer:
    """List the kernels of the Hugging Face hub on this disk, and try each in a child process.

    Where they are looked for, and which may be used, the settings hub.enabled, hub.folder, hub.lockfile and hub.allow
    say. Nothing is downloaded. Exits with 1 if something is refused, and then writes no lockfile.
    """
    from layerzero.backends.hub.checks import Found, text_of
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


def rolling_update(
    instances: Annotated[list[str], argument("NAME=URL...", "Instances, with the addresses of their probes.")],
    update: Annotated[str, option("COMMAND", "Ends an instance, and has the new one listen before it ends.")],
    fallback_on: Annotated[str, option("COMMAND", "Makes the instance's fallback file.")] = "",
    fallback_off: Annotated[str, option("COMMAND", "Removes it.")] = "",
    no_fallback: Annotated[
        bool, flag("--no-fallback", "Let old and new instances run different kernels meanwhile.")
    ] = False,
    checkpoint: Annotated[str, option("COMMAND", "Keeps measured times and the like, before anything changes.")] = "",
    max_unavailable: Annotated[int, option("N", "Instances that are updated at a time.", min=1)] = 1,
    ready_s: Annotated[float, option("SECONDS", "How long an instance may take until it is ready.", min=0)] = 600.0,
    hook_s: Annotated[float, option("SECONDS", "How long a command may take.", min=0)] = 600.0,
    file: Annotated[
        Path | None, option("FILE", "Keeps what was reached; the next run goes on from it.", "--state")
    ] = None,
) -> Answer:
    """Update instances a few at a time, all of them on torch's own kernels meanwhile.

    First every instance must be ready and of one version, and follow a fallback file (serve-health --fallback-file,
    lz.serve_health). Then each is forced to torch's own kernels, and shows it. Each is updated and must come back as a
    new process that is alive, ready, still forced, and of the version of those before it. At the end all are compared,
    and choose their kernels again. Stops at the first that is not as it should be, with the state of each. The same
    command with the same --state goes on. Commands run without a shell. {name} and {url} become the instance's, and
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


def add_to(app: Commands) -> None:
    """Register the commands."""
    app.command(
        "rolling-update",
        "rolling-update a=http://10.0.0.7:9400 b=http://10.0.0.8:9400 --state update.json"
        " --update 'ssh {name} systemctl restart service' --fallback-on 'ssh {name} touch /run/service/fallback'"
        " --fallback-off 'ssh {name} rm -f /run/service/fallback'",
    )(rolling_update)
    lines = "libraries --for serving --device H100", "libraries --for decoder", "libraries --device MI300X --json"
    app.command("libraries", *lines)(libraries)
    app.command("formats", "formats", "formats --device B200 --torch 2.11.0", "formats --rows 64 --json")(formats)
    app.command("hub", "hub", "hub --lock hub.lock", "hub --json")(hub)
