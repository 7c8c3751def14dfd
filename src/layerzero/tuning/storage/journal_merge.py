"""Rows of journals and of damaged files into the database, and models from them.

The process that has the turn merges the journals of all. Of a damaged file each row is taken that its checksum vouches
for, and whose work and environment are whole: a damaged page ends a walk through a table, and what lies behind it is
reached from the other end.
"""

from __future__ import annotations

import functools
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from layerzero.tuning.storage import connections, journal, learning, sql_schema
from layerzero.tuning.storage.connections import READ_WAIT_S, open_file
from layerzero.tuning.storage.database import Database
from layerzero.tuning.storage.environment import Environment
from layerzero.tuning.storage.journal import Piece
from layerzero.tuning.storage.learning import Kept, Subject
from layerzero.tuning.storage.rows import Row, Work, stored_row
from layerzero.tuning.storage.sql_schema import in_transaction

MERGE_S = 0.1
"""How long a write merges and learns, for others too; what is left is done by the next write or question."""

LEARN_S = 0.2
"""How long a question learns, at least one model; what was learnt before serves for the rest."""

MAX_ROWS = 1000
"""Rows of one transaction, unless one addition has more."""

OWN_ROWS, OWN_BYTES = 100, 32 << 10
"""Rows of one transaction, and bytes of one journal, where a process merges by the way.

32 writers and 4 busy processes on 2 cores (2026-11-22): 1000 rows took 0.1 s of computing, which were 3.4 s.
"""

_MAX_STALE = 256

Lessons = Mapping[Subject, Sequence[Row]]


def merge(database: Database, *, own: Path | None = None, for_s: float = MERGE_S, wait_s: float = 0.0) -> bool:
    """Merge journals and learn from them; False where the file cannot be written now.

    Args:
        own: the journal of a process that does this by the way, as it writes: it learns only where it writes alone.
        for_s: how long; some rows are merged in any case, and the rest is left to the next write.
        wait_s: how long to wait for the turn.
    Raises: TimeoutError where another process has the turn, OSError where there can be none.
    """
    if database.path is None:
        return True
    until = time.monotonic() + for_s
    folder = journal.folder_of(database.path)
    with connections.turn(database.path, of="turn", wait_s=wait_s):
        lessons: dict[Subject, list[Row]] = {}
        others = _merge(database, folder, until, lessons, own)
        if others is None:
            return False
        if own is None or others <= {own}:
            _learn(database, lessons, until)
        journal.sweep(folder)
    return True


def _merge(
    database: Database, folder: Path, until: float, lessons: dict[Subject, list[Row]], own: Path | None
) -> set[Path] | None:
    """Merge piece after piece, while there is time and journals have more; whose it was, None where it did not work."""
    whose: set[Path] = set()
    while pieces := _some(folder, own):
        rows = [row for piece in pieces for row in piece.rows]
        kept = database.change(functools.partial(_keep, rows=rows, database=database))
        if kept is None:
            return None
        for piece in pieces:
            piece.place.settle()
        _tell(database, kept, sum(piece.damaged for piece in pieces))
        for subject, new in kept.lessons.items():
            lessons.setdefault(subject, []).extend(new)
        whose |= {piece.place.path for piece in pieces}
        if time.monotonic() >= until:
            break
    return whose


def _some(folder: Path, own: Path | None) -> list[Piece]:
    most, bytes_each = (MAX_ROWS, journal.MAX_PIECE) if own is None else (OWN_ROWS, OWN_BYTES)
    pieces, count = [], 0
    for piece in journal.waiting(folder, first=own, most=bytes_each):
        pieces.append(piece)
        count += len(piece.rows)
        if count >= most:
            break
    return pieces


def _keep(connection: sqlite3.Connection, rows: Sequence[Row], database: Database) -> Kept:
    """Insert rows so that a power cut does not undo it, since their journals go; one that is refused is reported."""
    connection.execute("PRAGMA synchronous = FULL")
    try:
        return in_transaction(connection, lambda inside: learning.insert(inside, rows))
    except (sqlite3.IntegrityError, OverflowError, UnicodeError, TypeError, ValueError) as error:
        if len(rows) == 1:
            database.tell(f"{database.path}: a time of {rows[0].kernel} was refused: {error}", aloud=True)
            return Kept({})
    finally:
        connection.execute("PRAGMA synchronous = NORMAL")
    each = [_keep(connection, [row], database) for row in rows]
    lessons: dict[Subject, list[Row]] = {}
    for kept in each:
        for subject, new in kept.lessons.items():
            lessons.setdefault(subject, []).extend(new)
    return Kept(lessons, sum(kept.dated for kept in each), sum(kept.damaged for kept in each))


def _tell(database: Database, kept: Kept, unreadable: int) -> None:
    path = database.path
    if kept.dated:
        database.tell(f"{path}: times dated in the future were replaced or dated anew: a clock was ahead", aloud=True)
    if kept.damaged:
        database.tell(f"{path}: damaged times were replaced by new ones")
    if unreadable:
        database.tell(f"{path}: {unreadable} lines of journals were torn or damaged, and count for nothing")


def _learn(database: Database, lessons: Lessons, until: float) -> None:
    """Learn what is stale while there is time, what was just written first."""
    done: set[Subject] = set()
    todo = list(lessons)
    while time.monotonic() < until:
        for subject in todo:
            database.change(functools.partial(learning.learn, subject=subject, new=lessons.get(subject, ())))
            done.add(subject)
            if time.monotonic() >= until:
                return
        left = database.change(functools.partial(learning.stale, most=len(done) + _MAX_STALE)) or []
        todo = [subject for subject in left if subject not in done]
        if not todo:
            return


def learn_family(database: Database, family: bytes, damaged: Sequence[Subject] = ()) -> None:
    """Learn what is stale of one family, in the file and in what only this process knows; and what is damaged."""

    def learn(connection: sqlite3.Connection) -> None:
        until = time.monotonic() + LEARN_S
        for subject in dict.fromkeys([*learning.stale_of(connection, family), *damaged]):
            learning.learn(connection, subject)
            if time.monotonic() >= until:
                return

    if database.has_memory():
        database.remember(learn)
    if database.path is None:
        return
    try:
        with connections.turn(database.path, of="turn", wait_s=0.0):
            database.change(learn)
    except OSError:  # another one learns, or nothing can be written: what was learnt before serves
        return


def forget(database: Database, rows: Sequence[Row], wait_s: float = 5.0) -> bool:
    """Remove rows and what was learnt from them; False where the file cannot be written. Raises: OSError."""
    lessons: list[Kept] = []

    def remove(connection: sqlite3.Connection) -> None:
        lessons.append(learning.remove(connection, rows))

    if database.path is None:
        return database.write(remove)
    merge(database, wait_s=wait_s)
    with connections.turn(database.path, of="turn", wait_s=wait_s):
        done = database.write(remove)
        if done:
            _learn(database, {subject: () for kept in lessons for subject in kept.lessons}, time.monotonic() + wait_s)
    return done


# damaged files

_PAGE = 1000


def sound_rows(path: Path) -> Iterator[list[Row]]:
    """Sound rows of a file that was set aside, some at a time; a copy is read, so that the file stays as it was."""
    with tempfile.TemporaryDirectory(prefix="layerzero-") as folder:
        copy = Path(folder, "copy.sqlite")
        try:
            for suffix in ("", "-wal"):
                if Path(f"{path}{suffix}").is_file():
                    shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
            connection = open_file(copy, "rw", READ_WAIT_S)
        except (OSError, sqlite3.Error):
            return
        with closing(connection):
            connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
            yield from _rows(connection)


def _rows(connection: sqlite3.Connection) -> Iterator[list[Row]]:
    works: dict[bytes, dict[str, str]] = {}
    environments: dict[bytes, Environment] = {}
    for key, facts in _walk(connection, "SELECT key, facts FROM works", "key"):
        found = _decoded(facts, dict[str, str])
        if found is not None and Work(tuple(sorted(found.items()))).key == key:
            works[key] = found
    for key, facts in _walk(connection, "SELECT key, facts FROM environments", "key"):
        environment = _decoded(facts, Environment)
        if environment is not None and environment.key == key:
            environments[key] = environment
    page: list[Row] = []
    order = "work, graph, kernel, environment, condition, origin, source"
    statement = f"SELECT work, graph, {sql_schema.WHOLE} FROM times"  # noqa: S608  # names of ours
    for work, graph, *found in _walk(connection, statement, order):
        if work not in works or found[1] not in environments:
            continue
        try:
            page.append(stored_row(work, graph, works[work], environments[found[1]], found))
        except ValueError:
            continue
        if len(page) >= _PAGE:
            yield page
            page = []
    if page:
        yield page


def _walk(connection: sqlite3.Connection, statement: str, order: str) -> Iterator[tuple[Any, ...]]:
    """Rows from the first on until one cannot be read, and then from the last on."""
    for direction in ("ASC", "DESC"):
        try:
            keys = ", ".join(f"{name} {direction}" for name in order.split(", "))
            yield from connection.execute(f"{statement} ORDER BY {keys}")
        except (sqlite3.Error, ValueError, OverflowError):
            continue
        return


def _decoded(text: object, kind: Any) -> Any:
    try:
        return msgspec.json.decode(str(text), type=kind)
    except (msgspec.MsgspecError, UnicodeError):
        return None
