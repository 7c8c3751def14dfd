"""``layerzero perfdb``: the measured times of this machine, to look at, pass on, take over, forget and check."""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

from layerzero.cli.calls import flag, option
from layerzero.cli.output import FINE, NO, Answer, Commands

if TYPE_CHECKING:
    from layerzero.tuning.prediction.fitting import HeldOut
    from layerzero.tuning.storage.database import Database
    from layerzero.tuning.storage.rows import Row
    from layerzero.tuning.storage.store import TimeStore

perfdb = Commands(help="Show, pass on, take over, forget and check measured times.", no_args_is_help=True)
perfdb.info.epilog = "\b\nExamples:\n  layerzero perfdb show\n  layerzero perfdb export times.jsonl"

KernelGlob = Annotated[str, option("KERNEL", "Only this kernel; a glob.", "--kernel")]
OperationGlob = Annotated[str, option("OPERATION", "Only this function or operation; a glob.", "--operation")]
OnlyHere = Annotated[bool, flag("--here", "Only times that count on this machine as it is now.")]


_MOST = 40
"""Rows that are shown by default."""


@perfdb.command("show", "perfdb show", 'perfdb show --kernel "torch.*" --here', "perfdb show --json", modules=True)
def show(
    kernel: KernelGlob = "*",
    operation: OperationGlob = "*",
    here: OnlyHere = False,
    limit: Annotated[int | None, option("N", "Rows to show, latest first; 40 by default.", min=0)] = None,
    everything: Annotated[
        bool, flag("--all", "Of each time also its spread, samples, and the state of the machine.")
    ] = False,
) -> Answer:
    """Show measured times, latest first, a line each where a terminal is wide enough.

    Where they do not fit on the screen and no option says which, each operation has a line.
    """
    from layerzero.cli import bench_tables
    from layerzero.tuning.storage import archive

    database = store_here().database
    holds = archive.here()
    found = named(database, kernel, operation)
    if here:
        found = [each for each in found if holds(each)]
    most = _MOST if limit is None else limit
    shown = sorted(found, key=lambda each: each.written_at, reverse=True)[:most]
    data = {
        "path": str(database.path) if database.path else None,
        "rows": len(found),
        "notes": list(database.notes()),
        "times": [_plain(each) | {"here": holds(each)} for each in shown],
    }
    head = [f"{database.path or 'memory'}: {len(found)} times"]
    latest = [f"the latest {most} of them:"] if len(found) > most else []
    if not found:
        head.append("next step: `layerzero tune` measures here; with a filter, look without it")

    def rows() -> list[Any]:
        table = bench_tables.times(shown, [holds(each) for each in shown], everything=everything)
        return [*database.notes(), *head, *latest, *table]

    def by_operation() -> list[Any]:
        table = bench_tables.on_a_small_screen(found, [holds(each) for each in found])
        return [*database.notes(), *head, *table]

    as_asked = not shown or (kernel, operation, limit, everything) != ("*", "*", None, False)
    code = FINE if found or (kernel, operation) == ("*", "*") else NO
    return Answer(data, rows, code, None if as_asked else by_operation)


@perfdb.command("prune", "perfdb prune --stale", "perfdb prune --older-than 90 --dry-run", modules=True)
def prune(
    kernel: KernelGlob = "*",
    operation: OperationGlob = "*",
    older_than: Annotated[int | None, option("DAYS", "Only older times.", min=0, max=99999)] = None,
    stale: Annotated[bool, flag("--stale", "Only times that do not count on this machine now.")] = False,
    imported: Annotated[bool, flag("--imported", "Only imported times.")] = False,
    unknown: Annotated[
        bool, flag("--unknown", "With --stale: also times of kernels that nothing here registers.")
    ] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Tell how many, and remove none.")] = False,
) -> Answer:
    """Forget times. Every option given must hold; without any, nothing is forgotten.

    Whether a time is stale is known for a kernel that is registered: by itself, or by a --module. Times of others are
    kept, and counted, unless --unknown says that they are to go as well.
    """
    from layerzero.tuning.storage import archive

    if (kernel, operation, older_than, stale, imported) == ("*", "*", None, False, False):
        raise ValueError("prune: wanted an option that says which times to forget, got none")
    if unknown and not stale:
        raise ValueError("prune: --unknown says what --stale takes in: wanted --stale with it, got none")
    before = "" if older_than is None else (datetime.now(UTC) - timedelta(days=older_than)).isoformat()
    database = store_here().database
    holds, times = archive.here(), named(database, kernel, operation)
    found = archive.matching(times, before=before, imported=imported)
    gone = [each for each in found if not (stale and holds(each))]
    kept = [each for each in gone if stale and not unknown and not archive.registered(each)]
    if kept:
        gone = [each for each in gone if archive.registered(each)]
    if not dry_run:
        archive.forget(database, gone)
    verb = "would be forgotten" if dry_run else "forgotten"
    lines = [f"{len(gone)} times {verb}"]
    if kept:
        why = "kernels that nothing here registers (--module imports what does, --unknown forgets them)"
        lines.append(f"{len(kept)} times kept of {why}: {', '.join(sorted({each.kernel for each in kept}))}")
    return Answer({"rows": len(gone), "forgotten": not dry_run, "kept_unknown": len(kept)}, lambda: lines)


@perfdb.command("check", "perfdb check", "perfdb check --json")
def check() -> Answer:
    """Check the database: its file, every row in it, and how well times predict each other.

    For the last, every fifth time is predicted from the others, in turn. Exits with 1 if something is wrong.
    """
    from layerzero.tuning.storage import archive

    spool = store_here().spool
    database = spool.database
    problems = [*spool.notes(), *database.notes()]
    if database.path is not None and os.path.exists(database.path):  # noqa: PTH110  # notes tell what may not be read
        damage = archive.damage(database.path)
        problems += [f"{database.path}: {damage}"] if damage else []
    problems += _first(f"{database.path}: {problem}" for problem in archive.problems(database))
    count = sum(found for (found,) in database.read("SELECT count(*) FROM times"))
    held_out = archive.prediction_error(database.path) if count and not problems and database.path else None
    data = {
        "path": str(database.path) if database.path else None,
        "rows": count,
        "problems": problems,
        "held_out": None if held_out is None else _plain(held_out),
    }
    told = problems or [f"{database.path or 'memory'}: fine, {count} times", *_prediction(held_out)]
    return Answer(data, lambda: told, NO if problems else FINE)


def _first(problems: Iterator[str]) -> list[str]:
    """The first problems, and how many more there are."""
    from layerzero.tuning.storage.archive import MAX_PROBLEMS

    found = list(itertools.islice(problems, MAX_PROBLEMS))
    more = sum(1 for _ in problems)
    return [*found, f"and {more} more"] if more else found


def _prediction(found: HeldOut | None) -> list[str]:
    if found is None or not found.predicted:
        return ["prediction: too few times to tell how good it is"] if found is not None else []
    share = f"{found.predicted} of {found.points} times held out were predicted"
    errors = f"median error {found.median_error:.1%}, 90th percentile {found.p90_error:.1%}"
    return [f"prediction: {share}; {errors}; {found.within_claim:.0%} within twice what was claimed"]


def store_here() -> TimeStore:
    """The times of this process's ledger; those on disk where it keeps none."""
    from layerzero.engine.dispatch import ENGINE
    from layerzero.tuning.storage.store import StoreLedger, TimeStore

    ledger = ENGINE.ledger
    return ledger.times if isinstance(ledger, StoreLedger) else TimeStore()


def named(database: Database, kernel: str, operation: str) -> list[Row]:
    """The rows that globs name. Raises: ValueError for a glob that names nothing, here or in a row."""
    from layerzero.engine.registry import REGISTRY
    from layerzero.engine.settings import nearest
    from layerzero.ops.quantize.schemes import LOSSES
    from layerzero.tuning.storage import archive
    from layerzero.tuning.storage.machine_exchange import covered

    with readable(database):
        rows = list(archive.rows(database))
    found = list(archive.matching(rows, kernel=kernel, operation=operation))
    kernels = {each.kernel for each in rows}.union(each.id for each in REGISTRY.kernels())
    operations = {each.facts.get("operation", "") for each in rows}.union(REGISTRY.operations())
    operations |= {f"optimize.weights.{each}" for each in LOSSES}  # what lz.optimize found that a weight loses
    of_kernels = "--kernel", kernel, kernels, fnmatch.filter(kernels, kernel)
    of_operations = "--operation", operation, operations, [*filter(covered(operation), operations)]
    for named_by, glob, known, meant in (of_kernels, of_operations):
        if not found and not meant:
            got = f"got {glob!r}, which is none here{nearest(glob, known)}; `layerzero {named_by[2:]}s` lists them"
            raise ValueError(f"{named_by}: wanted a name or a glob of some, {got}")
    return found


@contextlib.contextmanager
def readable(database: Database) -> Iterator[None]:
    """Say what to do about a row that no command can read."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{database.path}: {error}; `layerzero perfdb check` tells more") from error


def _plain(value: Row | HeldOut) -> dict[str, Any]:
    import math

    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(value)
    return {key: None if isinstance(each, float) and math.isnan(each) else each for key, each in data.items()}
