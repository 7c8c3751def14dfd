"""The whole database: every row, files of rows for other machines, what to forget, and whether it is sound."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import itertools
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch

from layerzero.core.device import Device, devices_here
from layerzero.core.dtypes import DTYPES
from layerzero.core.errors import printable
from layerzero.core.system.disk import write_whole
from layerzero.engine import probe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.prediction.fitting import HeldOut, held_out_error
from layerzero.tuning.storage import connections, journal_merge, learning, sql_schema
from layerzero.tuning.storage.connections import ForeignError, OtherVersionError
from layerzero.tuning.storage.database import Database
from layerzero.tuning.storage.environment import Environment, surroundings
from layerzero.tuning.storage.machine_exchange import Finding, PassedBuild, check_build, check_finding, covered, sealed
from layerzero.tuning.storage.rows import Row, check, is_to_come, stored_row
from layerzero.tuning.storage.store import StoreLedger
from layerzero.tuning.storage.tables import Table

FORMAT = 5

MAX_TEXT = 512
"""Longest text in an imported row; kernel ids and facts are far shorter."""

MAX_PROBLEMS = 20

MOST_REFUSED = 20_000
"""Rows that :func:`refused` looks at: a folder that many machines share may have very many."""

_PAGE = 5000

_ROWS = f"""SELECT work, graph, kernel, environment, condition, origin, source, works.facts, environments.facts,
    {sql_schema.WHOLE} FROM times LEFT JOIN works ON works.key = times.work
    LEFT JOIN environments ON environments.key = times.environment
    WHERE (work, graph, kernel, environment, condition, origin, source) > (?, ?, ?, ?, ?, ?, ?)
    ORDER BY work, graph, kernel, environment, condition, origin, source LIMIT ?"""  # noqa: S608  # names of ours


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """First line of an exported file."""

    format: int
    kind: str
    written_at: str
    rows: int
    findings: int = 0
    builds: int = 0


KIND = "layerzero times"


class BadFileError(ValueError):
    """A file of rows that cannot be taken; nothing of it was.

    Attributes:
        problems: each with its line.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def rows(database: Database) -> Iterator[Row]:
    """Every row, a page at a time. Raises: ValueError for one that is not what the database should hold."""
    for found in _raw(database):
        yield row_of(found)


def problems(database: Database) -> Iterator[str]:
    """What is wrong with any row, work, environment or model; every one is read and decoded."""
    to_come = 0
    for number, found in enumerate(_raw(database), 1):
        try:
            row = row_of(found)
            to_come += is_to_come(row.written_at)
        except ValueError as error:
            yield f"row {number}: {error}"
    if to_come:
        yield f"{to_come} times are dated in the future; they count as the oldest, and are replaced when measured anew"
    for model in database.read(f"SELECT {sql_schema.MODEL_COLUMNS}, crc FROM models"):  # noqa: S608  # names of ours
        if model[5] == learning.MODEL_FORMAT:
            try:
                learning.decode(model[6])
            except (msgspec.MsgspecError, TypeError) as error:
                yield f"a model of {printable(model[2])}: {error}"
            else:
                if not sql_schema.model_holds(model):
                    yield f"a model of {printable(model[2])}: its checksum does not hold; it counts for nothing"


def _raw(database: Database) -> Iterator[tuple[Any, ...]]:
    last: tuple[object, ...] = (b"", -1, "", b"", "", "", "")
    while True:
        page = database.read(_ROWS, (*last, _PAGE))
        yield from page
        if len(page) < _PAGE:
            return
        last = page[-1][:7]


def row_of(found: tuple[Any, ...]) -> Row:
    """A row as it was read. Raises: ValueError if it is not as it was written, or breaks a rule."""
    work, graph, _, _, _, _, _, facts, environment, *values = found
    try:
        return stored_row(work, graph, _decoded(facts), _decoded(environment), values)
    except ValueError as error:
        raise ValueError(printable(error)) from error


def _decoded(text: object) -> Any:
    if not isinstance(text, str):
        raise ValueError(f"wanted a work and an environment, got {text!r}")  # noqa: TRY004  # as for all of it
    try:
        return msgspec.json.decode(text)
    except UnicodeError as error:
        raise ValueError(f"wanted text, got: {error}") from None


def export(
    found: Iterable[Row], file: Path, findings: Iterable[Finding] = (), builds: Iterable[PassedBuild] = ()
) -> None:
    """Write rows as lines of JSON, and findings and builds behind them, whole or not at all. Raises: OSError."""
    lines = [msgspec.json.encode(each) for each in found]
    more = [msgspec.json.encode(sealed(each)) for each in findings]
    last = [msgspec.json.encode(each) for each in builds]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    header = Header(FORMAT, KIND, now, len(lines), len(more), len(last))
    write_whole(file, b"\n".join([msgspec.json.encode(header), *lines, *more, *last]) + b"\n")


def export_prior(table: Table, file: Path) -> None:
    """Write a table of priors, indented so that changes to it can be read. Raises: OSError."""
    write_whole(file, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")


def read_export(file: Path) -> tuple[list[Row], list[Finding], list[PassedBuild]]:
    """Read a file of rows of another machine, strictly; each says where it came from. And what lies behind them.

    Raises: BadFileError with the first problems and their lines, OSError.
    """
    content = file.read_bytes()
    source = f"{file.name} sha256:{hashlib.sha256(content).hexdigest()[:16]}"
    first, *lines = content.splitlines() or [b""]
    try:
        header = msgspec.json.decode(first, type=Header)
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: no UTF-8
        raise BadFileError([f"line 1: wanted the header of an exported file: {error}"]) from None
    if (header.format, header.kind) != (FORMAT, KIND):
        wanted = f"wanted format {FORMAT} of {KIND!r}"
        got = f"got format {header.format} of {header.kind!r}"
        raise BadFileError([f"line 1: {wanted}, {got}; `layerzero perfdb export` of this version writes one"])
    found: dict[type, list[Any]] = {Row: [], Finding: [], PassedBuild: []}
    first_finding = 2 + header.rows
    first_build = first_finding + header.findings
    problems = []
    for number, line in enumerate(lines, 2):
        kind = Row if number < first_finding else Finding if number < first_build else PassedBuild
        try:
            found[kind].append(msgspec.json.decode(line, type=kind))
            _CHECKS[kind](found[kind][-1])
        except (msgspec.DecodeError, ValueError) as error:
            problems.append(f"line {number}: {error}")
    if len(lines) != (wanted_lines := header.rows + header.findings + header.builds):
        problems.append(f"line 1: wanted {wanted_lines} rows after it, got {len(lines)}: the file was cut or joined")
    if problems:
        more = len(problems) - MAX_PROBLEMS
        raise BadFileError(problems[:MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else []))
    rows = [msgspec.structs.replace(row, source=" < ".join(filter(None, [source, row.source]))) for row in found[Row]]
    return rows, found[Finding], found[PassedBuild]


def _plausible(row: Row) -> None:
    """Refuse what no row of ours says. Raises: ValueError with wanted and got."""
    check(row)
    facts = row.facts
    for name, wanted in {
        "operation": facts.get("operation", "") != "",
        "dtype": facts.get("dtype") in DTYPES,
        "device_name": facts.get("device_name") == row.environment.device,
        "platform": facts.get("platform") == row.environment.platform,
    }.items():
        if not wanted:
            raise ValueError(f"facts: {name}: wanted one that the rest agrees with, got {facts.get(name)!r}")
    texts = [row.kernel, row.condition, row.origin, row.adapts, row.source, *facts, *facts.values()]
    texts += [str(value) for value in msgspec.structs.astuple(row.environment)]
    longest = max(texts, key=len)
    if not row.kernel or len(longest) > MAX_TEXT or not "".join(texts).isprintable():
        raise ValueError(f"wanted a kernel and printable text of at most {MAX_TEXT} characters, got {longest[:80]!r}")
    written = datetime.fromisoformat(row.written_at)
    if written.tzinfo is None or written > datetime.now(UTC) + timedelta(days=1):
        raise ValueError(f"written_at: wanted a date in UTC that is not to come, got {row.written_at!r}")


_CHECKS: dict[type, Callable[[Any], None]] = {Row: _plausible, Finding: check_finding, PassedBuild: check_build}


def read_database(file: Path) -> list[Row]:
    """Read another database of times without changing it.

    Raises: ValueError if it is none, or damaged, with what was found.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy.sqlite")
        problem = _copied(file, copy) or damage(copy)
        if problem:
            raise ValueError(f"{file}: wanted a sound database of times: {problem}")
        with contextlib.closing(Database(copy)) as database:
            return list(rows(database))


def _copied(file: Path, copy: Path) -> str:
    """Copy a database as of one moment, whatever writes it meanwhile; return what prevents that."""
    problem = ""
    for mode in ("ro", "ro&immutable=1"):  # the second for a medium on which nothing can be written
        try:
            with (
                contextlib.closing(sqlite3.connect(connections.uri(file, mode), uri=True)) as source,
                contextlib.closing(sqlite3.connect(copy)) as target,
            ):
                source.backup(target)
        except sqlite3.Error as error:
            problem = problem or str(error)
        else:
            return ""
    return problem


def damage(file: Path) -> str:
    """What is wrong with a file as a database of times; empty if it is sound. Reads all of it."""
    try:
        with contextlib.closing(sqlite3.connect(file)) as connection:
            if not connections.check(connection):
                return "wanted a database of times, got an empty one"
            found = [str(line) for (line,) in connection.execute("PRAGMA integrity_check(5)")]
            return "" if found == ["ok"] else "; ".join(found)
    except (sqlite3.Error, ForeignError, OtherVersionError, UnicodeError) as error:
        return str(error)


def registered(row: Row) -> bool:
    """Whether this process knows a row's kernel; of another one it cannot tell whether its time still holds."""
    return any(kernel.id == row.kernel for kernel in REGISTRY.kernels())


def here() -> Callable[[Row], bool]:
    """A test whether a row's environment is one that this machine has now."""
    unlike = unlike_here(*devices_here())
    return lambda row: not unlike(row)


def unlike_here(*devices: Device) -> Callable[[Row], str]:
    """A question in what a row's environment differs from those of devices; the answer is empty where it counts."""

    @functools.cache
    def unlike(kernel_id: str, there: Environment) -> str:
        kernel = next((each for each in REGISTRY.kernels() if each.id == kernel_id), None)
        if kernel is None:
            return f"{kernel_id} is not registered here"
        if probe.this_machine().state(kernel.backend, devices[0]).version is None:
            return f"{kernel.source} is not installed here"
        mine = [surroundings(each).environment(kernel)[0] for each in devices]
        return differs(next((each for each in mine if each.device == there.device), mine[-1]), there)

    return lambda row: unlike(row.kernel, row.environment)


def matching(
    found: Iterable[Row], *, kernel: str = "*", operation: str = "*", before: str = "", imported: bool = False
) -> Iterator[Row]:
    """Rows by glob of kernel and name of operations, written before a date, imported ones only."""
    covers = covered(operation)
    for row in found:
        if (
            fnmatch.fnmatchcase(row.kernel, kernel)
            and covers(row.facts.get("operation", ""))
            and (not before or row.written_at < before)
            and (not imported or row.source)
        ):
            yield row


def forget(database: Database, gone: Iterable[Row]) -> int:
    """Remove rows; return how many. Raises: ValueError where the database cannot be written."""
    gone = list(gone)
    try:
        done = not gone or journal_merge.forget(database, gone)
    except OSError as error:
        raise ValueError(f"{database.path}: wanted a database that can be written now: {error}") from error
    if not done:
        raise ValueError(f"{database.path}: wanted a database that can be written now: {'; '.join(database.notes())}")
    return len(gone)


def prediction_error(file: Path) -> HeldOut:
    """How far predictions are from the times in a file that they were not made from."""
    with contextlib.closing(sqlite3.connect(connections.uri(file, "ro"), uri=True)) as connection:
        return held_out_error(learning.groups(connection))


def refused(operations: Collection[str], device: torch.device) -> Counter[str]:
    """Why times of operations do not count on a device, and how many."""
    ledger: Any = ENGINE.ledger
    if not isinstance(ledger, StoreLedger):
        return Counter()
    here = Device.detect(str(device))
    asked = [
        row
        for row in itertools.islice(rows(ledger.times.database), MOST_REFUSED)
        if row.facts.get("operation") in operations and row.environment.platform == here.platform and registered(row)
    ]
    return unlike(asked, here)


def unlike(found: Iterable[Row], *devices: Device) -> Counter[str]:
    """In what environments of rows differ from those of devices, or of all here, and how many; the same are left."""
    told = Counter(map(unlike_here(*(devices or devices_here())), found))
    del told[""]
    return told


def differs(here: Environment, there: Environment) -> str:
    """The first thing in which two environments differ; empty where they do not."""
    for name in ("device", "capability", "driver", "runtime", "torch", "library", "version", "threads"):
        wanted, got = getattr(here, name), getattr(there, name)
        if wanted != got:
            what = f"{here.library}'s version" if name == "version" else name
            return f"{what}: wanted {wanted or 'none'}, got {got or 'none'}"
    return ""
