"""``layerzero perfdb export``, ``import``, ``diff`` and ``merge``: times, findings and builds of other machines."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from layerzero.cli.calls import argument, flag, option
from layerzero.cli.output import FINE, NO, Answer, Commands, existing
from layerzero.cli.perfdb import KernelGlob, OnlyHere, OperationGlob, named, readable, store_here

if TYPE_CHECKING:
    from layerzero.tuning.storage.machine_exchange import Finding, PassedBuild
    from layerzero.tuning.storage.rows import Row


def export(
    file: Annotated[Path, argument("FILE", "Where to write lines of JSON.")],
    kernel: KernelGlob = "*",
    operation: OperationGlob = "*",
    here: OnlyHere = False,
    prior: Annotated[
        bool, flag("--prior", "Write a table of priors, as the package ships them, of what counts here.")
    ] = False,
    with_builds: Annotated[
        bool, flag("--builds", "Also pass on what was compiled for the calls of this machine.")
    ] = False,
) -> Answer:
    """Write measured times to a file for other machines of this kind, and what was found out about kernels here.

    Findings are verdicts, proofs of captures, and measured workspaces. Each names its library, torch, device and
    capability. A build also names Python, the system's C library and the compilers. Builds that only a library can find
    (FlashInfer's, and those inside a process) are left out.
    """
    from layerzero.tuning.storage import archive, machine_exchange
    from layerzero.tuning.storage.tables import table_of

    database = store_here().database
    holds = archive.here() if here or prior else None
    kept = [each for each in named(database, kernel, operation) if holds is None or holds(each)]
    if prior:
        table = table_of(kept, "layerzero perfdb export --prior")
        count = sum(len(case.times_us) for family in table.families for case in family.cases)
        _written(file, lambda: archive.export_prior(table, file))
    else:
        count = len(kept)
        every = machine_exchange.found_here(_ledger())
        more = list(machine_exchange.matching(every, kernel=kernel, operation=operation, here=here))
        builds = _builds(kernel, operation) if with_builds else []
        _written(file, lambda: archive.export(kept, file, more, builds))
        behind = f" and {len(more)} findings" if more else ""
        behind += f" and {len(builds)} builds" if with_builds else ""
        left = len(every) - len(more)
        data = {"file": str(file), "rows": count, "findings": len(more), "findings_left": left, "builds": len(builds)}
        told = [f"{left} findings left out: the options ask for others"] if left else []
        if with_builds and not builds:
            told.append("no build: none lies here for a call that this machine made; a warmup alone calls nothing")
        return Answer(data, lambda: [f"{file}: {count} times{behind} written", *told])
    return Answer({"file": str(file), "rows": count}, lambda: [f"{file}: {count} times written"])


def take(
    file: Annotated[Path, argument("FILE", "What `perfdb export` wrote elsewhere.")],
    with_builds: Annotated[bool, flag("--builds", "Take builds, too: they are code that will run here.")] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Check the file and take nothing.")] = False,
) -> Answer:
    """Take over times from a file, and what was found out about kernels.

    Times are marked as imported, count less than what was measured here, and only on the same device with the same
    versions. A finding of another library, torch, device or capability is left, and the difference is named. So is one
    that was made here, too. Builds are taken only with --builds. Builds of another Python, C library or compiler are
    left, and so are those in whose place other files lie. Exits with 1 and takes nothing if anything in the file is
    wrong.
    """
    from layerzero.tuning.storage import archive, machine_exchange

    exported = _exported(file)
    if isinstance(exported, Answer):
        return exported
    found, more, builds = exported
    holds = archive.here()
    count = sum(holds(each) for each in found)
    built, unbuilt = _taken(builds, with_builds=with_builds, dry_run=dry_run)  # first: a disk may refuse them
    if not dry_run:
        _keep(found)
    verb = "would be taken" if dry_run else "taken"
    kept, left = machine_exchange.take(_ledger(), more, dry_run=dry_run)
    data = {"file": str(file), "valid": True, "problems": [], "rows": len(found), "here": count, "taken": not dry_run}
    data |= {"findings": kept, "findings_left": dict(left), "builds": built, "builds_left": dict(unbuilt)}
    lines = [f"{file}: {len(found)} times {verb}; {count} count on this machine as it is now"]
    lines += [f"{kept} findings {verb}"] if more else []
    lines += [f"{number} findings left: {why}" for why, number in left.items()]
    lines += [f"{built} builds {verb}"] if with_builds else []
    lines += [f"{number} builds left: {why}" for why, number in unbuilt.items()]
    return Answer(data, lambda: lines)


def diff(
    file: Annotated[Path, argument("FILE", "What `perfdb export` wrote elsewhere.")],
    limit: Annotated[int, option("N", "Times to show, farthest apart.", min=0)] = 20,
) -> Answer:
    """Compare a file of times with those of this machine: what is in both, and in what the environments differ.

    Nothing is taken. Exits with 1 if anything in the file is wrong, or none of it counts on this machine.
    """
    from layerzero.tuning.storage import archive, machine_exchange

    exported = _exported(file)
    if isinstance(exported, Answer):
        return exported
    found, more, builds = exported
    database = store_here().database
    with readable(database):
        counts, lines = machine_exchange.differences(archive.rows(database), found, limit)
    kept, left = machine_exchange.take(_ledger(), more, dry_run=True)
    unlike = archive.unlike(found)
    built, unbuilt = _taken(builds, with_builds=True, dry_run=True)
    lines += [f"{number} times: {why}" for why, number in unlike.items()]
    lines += [f"{number} findings: {why}" for why, number in left.items()]
    lines += [f"{built} builds would be taken with --builds"] if built else []
    lines += [f"{number} builds: {why}" for why, number in unbuilt.items()]
    told = ", ".join(f"{number} {what}" for what, number in counts.items())
    data = {"file": str(file), "valid": True, "times": dict(counts), "unlike": dict(unlike)}
    data |= {"findings": kept, "findings_left": dict(left), "builds": built, "builds_left": dict(unbuilt)}
    fits = len(found) > sum(unlike.values()) or kept or built
    return Answer(
        data, lambda: [f"{file}: times: {told}; {kept} findings would be taken", *lines], FINE if fits else NO
    )


def merge(file: Annotated[Path, argument("FILE", "Another database of your own.")]) -> Answer:
    """Take over all times of another database of yours, as if they had been measured here.

    Of two times of the same thing the later stays. The other file is not changed.
    """
    from layerzero.tuning.storage import archive

    existing(file, "a file of times")
    found = archive.read_database(file)
    _keep(found)
    return Answer({"file": str(file), "rows": len(found)}, lambda: [f"{file}: {len(found)} times merged"])


def _builds(kernel: str, operation: str) -> list[PassedBuild]:
    """The builds that lie here for calls of this machine."""
    from layerzero.core.device import devices_here
    from layerzero.engine.registry import REGISTRY
    from layerzero.tuning.measurement.tune import every_call
    from layerzero.tuning.storage.machine_exchange import builds_of, covered

    kinds = dict.fromkeys(each.torch_type for each in devices_here())
    covers = covered(operation)
    calls = (job.facts(kind) for kind in kinds for job in every_call(kind) if covers(job.operation))
    return builds_of(calls, [each for each in REGISTRY.kernels() if fnmatch.fnmatchcase(each.id, kernel)])


def _taken(builds: list[PassedBuild], *, with_builds: bool, dry_run: bool) -> tuple[int, dict[str, int]]:
    """How many builds of a file are taken, and why the others are not."""
    from layerzero.tuning.storage import machine_exchange

    if builds and not with_builds:
        return 0, {"they are code; --builds takes them from a file that you trust": len(builds)}
    try:
        taken, left = machine_exchange.take_builds(builds, dry_run=dry_run)
    except OSError as error:
        raise ValueError(f"--builds: wanted a place to write to, got: {error}; nothing else was taken") from error
    return taken, dict(left)


def _exported(file: Path) -> tuple[list[Row], list[Finding], list[PassedBuild]] | Answer:
    """What an exported file has, or the answer that says what is wrong in it."""
    from layerzero.tuning.storage import archive

    existing(file, "a file of times")
    try:
        return archive.read_export(file)
    except OSError as error:
        raise ValueError(f"{file}: wanted a file that can be read, got: {error.strerror or error}") from error
    except archive.BadFileError as error:
        problems, data = error.problems, {"file": str(file), "valid": False, "problems": error.problems}
        return Answer(data, lambda: [f"{file}: {problem}" for problem in problems], NO)


def _ledger() -> Any:
    from layerzero.engine.dispatch import ENGINE

    return ENGINE.ledger


def _keep(rows: Sequence[Row]) -> None:
    """Write rows, and learn from all of them now, not at the next question.

    Raises: ValueError where they could not be written: in this process's memory they end with the command.
    """
    store = store_here()
    store.add(rows)
    store.settle()
    if store.spool.ends_here:
        memory = "memory alone; name a folder in LAYERZERO_CACHE_DIR, or set perfdb.enabled: true"
        got = "; ".join(store.notes()) or memory
        raise ValueError(f"{store.database.path or 'times'}: wanted a database on disk, got {got}")


def _written(file: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise ValueError(f"{file}: wanted a place to write to, got: {error.strerror or error}") from error


def add_to(perfdb: Commands) -> None:
    """Register the commands."""
    for name, command, lines in (
        (
            "export",
            export,
            ("times.jsonl", 'h200.jsonl --operation "attention.*"', "h200.json --prior", "all.jsonl --builds"),
        ),
        ("import", take, ("times.jsonl", "times.jsonl --dry-run", "all.jsonl --builds")),
        ("diff", diff, ("times.jsonl", "times.jsonl --json")),
    ):
        perfdb.command(name, *(f"perfdb {name} {line}" for line in lines), modules=True)(command)
    perfdb.command("merge", "perfdb merge other/perfdb.sqlite")(merge)
