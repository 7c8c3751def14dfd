"""Rows into the database, and what is learnt from them: marked as stale in the rows' transaction, learnt after it.

Fitting takes up to a tenth of a second, and nothing may wait for a lock so long. A mark outlives its process, so
models agree with their rows sooner or later, whatever ends a process: the next write or question learns.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from layerzero.tuning.prediction import fitting
from layerzero.tuning.prediction.predict import Model, Point, meaning_of
from layerzero.tuning.storage import rows as keeping
from layerzero.tuning.storage import sql_schema
from layerzero.tuning.storage.rows import Row, Work
from layerzero.tuning.storage.sql_schema import in_transaction

MODEL_FORMAT = 6
"""Changes with the meaning of a stored model; older ones are learnt anew, newer ones are as if there were none."""

MAX_READ = 512
"""Times of a family that are looked at; works lie in the order of their hashes, so these are a fair sample."""

MAX_NOISE = 0.5
"""A median whose halves differ by more says nothing about its neighbours, unless the device's time is known apart."""

_WORK = """INSERT INTO works (key, family, operation, dtype, facts) VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE
    SET family = excluded.family, operation = excluded.operation, dtype = excluded.dtype, facts = excluded.facts
    WHERE family <> excluded.family OR facts <> excluded.facts"""
_ENVIRONMENT = """INSERT INTO environments (key, device, torch, library, facts) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (key) DO UPDATE SET facts = excluded.facts WHERE facts <> excluded.facts"""
_IDENTITY = "work = ? AND graph = ? AND kernel = ? AND environment = ? AND condition = ? AND source = ? AND origin = ?"
_SELECTED = ", ".join(f"times.{name}" for name in (*sql_schema.DECIDING, "crc"))
_KNOWN = f"SELECT {sql_schema.SELECTED} FROM times WHERE {_IDENTITY}"  # noqa: S608  # names of ours
_TIME = f"""INSERT OR REPLACE INTO times (work, graph, {", ".join(sql_schema.COLUMNS)}, crc)
    VALUES ({", ".join("?" * (len(sql_schema.COLUMNS) + 3))})"""  # noqa: S608  # names of ours
_FOUND = "SELECT 1 FROM times WHERE work = ? AND graph = ? AND crc = ?"
_FORGET = f"DELETE FROM times WHERE {_IDENTITY}"  # noqa: S608  # names of ours
_POINTS = f"""SELECT works.key, works.facts, {_SELECTED} FROM works CROSS JOIN times ON times.work = works.key
    WHERE works.family = ? AND graph = ? AND kernel = ? AND environment = ? AND adapts = ?
    AND (noise <= ? OR device_us IS NOT NULL) LIMIT ?"""  # noqa: S608  # names of ours
_MODEL = f"INSERT OR REPLACE INTO models ({sql_schema.MODEL_COLUMNS}, crc) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
_SUBJECT = "family = ? AND graph = ? AND kernel = ? AND environment = ? AND adapts = ?"
_AS_BYTES = """CAST(family AS BLOB) IS ? AND graph IS ? AND CAST(kernel AS BLOB) IS ?
    AND CAST(environment AS BLOB) IS ? AND CAST(adapts AS BLOB) IS ?"""
_UNLEARN = f"DELETE FROM models WHERE {_SUBJECT}"  # noqa: S608  # names of ours
_MARK = "INSERT OR REPLACE INTO stale (family, graph, kernel, environment, adapts, serial) VALUES (?, ?, ?, ?, ?, ?)"
_UNMARK = f"DELETE FROM stale WHERE {_SUBJECT} AND serial = ?"  # noqa: S608  # names of ours
_SERIAL = f"SELECT serial FROM stale WHERE {_SUBJECT}"  # noqa: S608  # names of ours
_STALE = "SELECT family, graph, kernel, environment, adapts FROM stale LIMIT ?"
_STALE_OF = """SELECT family, graph, kernel, environment, adapts FROM stale WHERE family = ? UNION
    SELECT family, graph, kernel, environment, adapts FROM models WHERE family = ? AND format < ?"""
_FAMILIES = """SELECT DISTINCT works.family, graph, kernel, environment, adapts FROM times
    JOIN works ON works.key = times.work"""

_MEDIAN, _NOISE, _DEVICE, _HOST, _ADAPTS, _WRITTEN = (
    sql_schema.DECIDING.index(name) for name in ("median_us", "noise", "device_us", "host_us", "adapts", "written_at")
)

Subject = tuple[bytes, bool, str, bytes, str]
"""What one model is about: family, whether graphs, kernel, environment, adaptations."""


class Kept(NamedTuple):
    """What became of rows: what they teach, by subject, and how many were odd.

    Attributes:
        lessons: the new rows of each model that has to be learnt anew.
        dated: rows written under a clock that was ahead, theirs or those that they replaced.
        damaged: rows in the database that were not as they had been written, and were replaced.
    """

    lessons: Mapping[Subject, list[Row]]
    dated: int = 0
    damaged: int = 0


def _identity(row: Row) -> tuple[object, ...]:
    return row.work.key, row.graph, row.kernel, row.environment.key, row.condition, row.source, row.origin


def insert(connection: sqlite3.Connection, rows: Iterable[Row]) -> Kept:
    """Insert rows, unless the same thing was measured later, and mark what they teach; inside a transaction."""
    lessons: dict[Subject, list[Row]] = {}
    dated = damaged = 0
    for row in rows:
        if keeping.is_to_come(row.written_at):
            row = msgspec.structs.replace(row, written_at=keeping.now())  # noqa: PLW2901  # the same, dated
            dated += 1
        work, values = row.work, row.values
        key, graph = work.key, int(row.graph)
        start = sql_schema.start_of(key, graph)
        known = connection.execute(_KNOWN, (key, graph, *values[:4], row.origin)).fetchone()
        if known is not None and not sql_schema.holds(start, known):
            known, damaged = None, damaged + 1
        if known is not None and known[_WRITTEN] > row.written_at:
            if not keeping.is_to_come(known[_WRITTEN]):
                continue
            dated += 1
        _insert(connection, row, work, (key, graph, *values, sql_schema.crc_of(start, values)))
        subject = work.family, row.graph, row.kernel, values[1], row.adapts
        learnt = known is not None and known[_ADAPTS] == row.adapts and _teaches(known[_NOISE], known[_DEVICE])
        if learnt and _teaches(row.noise, row.device_us) and _says_the_same(row, known):
            continue
        lessons.setdefault(subject, []).append(row)
        if known is not None and known[_ADAPTS] != row.adapts:
            lessons.setdefault((*subject[:4], known[_ADAPTS]), [])
    _mark(connection, lessons)
    return Kept(lessons, dated, damaged)


def _mark(connection: sqlite3.Connection, subjects: Iterable[Subject]) -> None:
    serial = time.time_ns()
    connection.executemany(_MARK, [(*subject, serial) for subject in subjects])


def _teaches(noise: float, device_us: float | None) -> bool:
    """Whether a time is looked at when models are fitted."""
    return noise <= MAX_NOISE or device_us is not None


def _says_the_same(row: Row, known: Sequence[Any]) -> bool:
    """Whether median, device's and host's time are within the noise of what was learnt."""
    old = (known[_MEDIAN], known[_DEVICE], known[_HOST])
    pairs = zip((row.median_us, row.device_us, row.host_us), old, strict=True)
    return all(new == was if new is None or was is None else abs(new / was - 1) <= row.noise for new, was in pairs)


def _insert(connection: sqlite3.Connection, row: Row, work: Work, values: Sequence[Any]) -> None:
    facts, environment = row.facts, row.environment
    text = msgspec.json.encode(facts).decode()
    connection.execute(_WORK, (values[0], work.family, facts.get("operation", ""), facts.get("dtype", ""), text))
    about = (values[3], environment.device, environment.torch, environment.library)
    connection.execute(_ENVIRONMENT, (*about, msgspec.json.encode(environment).decode()))
    connection.execute(_TIME, values)
    if connection.execute(_FOUND, (*values[:2], values[-1])).fetchone() is None:
        # A flipped bit in one key puts what is searched for elsewhere than what is inserted, and no statement fails.
        raise sqlite3.DatabaseError("a time that was just written is not found: its keys are out of order")


def remove(connection: sqlite3.Connection, rows: Sequence[Row]) -> Kept:
    """Delete rows, what was learnt from them, and works and environments that no row speaks of any more."""
    connection.executemany(_FORGET, [_identity(row) for row in rows])
    subjects = {(row.work.family, row.graph, row.kernel, row.environment.key, row.adapts) for row in rows}
    connection.executemany(_UNLEARN, list(subjects))
    _mark(connection, subjects)
    connection.execute("DELETE FROM works WHERE key NOT IN (SELECT work FROM times)")
    connection.execute("DELETE FROM environments WHERE key NOT IN (SELECT environment FROM times)")
    return Kept({subject: [] for subject in subjects})


def stale(connection: sqlite3.Connection, most: int) -> list[Subject]:
    """Models whose rows have changed since they were learnt."""
    return connection.execute(_STALE, (most,)).fetchall()


def stale_of(connection: sqlite3.Connection, family: bytes) -> list[Subject]:
    """The same of one family, with models that an earlier version learnt in its own way."""
    return connection.execute(_STALE_OF, (family, family, MODEL_FORMAT)).fetchall()


def _is_text(subject: Subject) -> bool:
    """Whether its names are text, as those of a damaged row may not be: no statement takes them."""
    try:
        return all(each.encode() is not None for each in subject if isinstance(each, str))
    except UnicodeEncodeError:
        return False


def _forget_bytes(connection: sqlite3.Connection, subject: Subject) -> None:
    """Remove what a damaged row says of a subject whose names are no text."""
    parts = [each.encode("utf-8", "surrogateescape") if isinstance(each, str) else each for each in subject]
    for table in ("models", "stale"):
        connection.execute(f"DELETE FROM {table} WHERE {_AS_BYTES}", parts)  # noqa: S608  # names of ours


def learn(connection: sqlite3.Connection, subject: Subject, new: Sequence[Row] = ()) -> None:
    """Fit one model anew; ``new`` are rows that count even where a family has more than are looked at.

    Outside of transactions: what is read, fitted and written holds for the mark that was there before, and a mark made
    meanwhile stays.
    """
    if not _is_text(subject):
        in_transaction(connection, lambda inside: _forget_bytes(inside, subject))
        return
    mark = connection.execute(_SERIAL, subject).fetchone()
    model = fitting.fit(list(_points(connection, subject, new)))

    def keep(connection: sqlite3.Connection) -> None:
        if model is None:
            connection.execute(_UNLEARN, subject)
        else:
            values = (*subject[:1], int(subject[1]), *subject[2:], MODEL_FORMAT, msgspec.json.encode(model))
            connection.execute(_MODEL, (*values, sql_schema.model_crc(*values)))
        if mark is not None:
            connection.execute(_UNMARK, (*subject, mark[0]))

    in_transaction(connection, keep)


def _points(connection: sqlite3.Connection, subject: Subject, new: Sequence[Row]) -> Iterator[Point]:
    """One point for each work, the latest that tells device and host apart, or the latest; first those that are new."""
    latest: dict[bytes, tuple[tuple[bool, str], Point]] = {}
    told = [row for row in new if _teaches(row.noise, row.device_us)]
    for row in told[-fitting.MAX_POINTS // 2 :]:
        latest[row.work.key] = (
            (row.device_us is not None, row.written_at),
            _point(row.work, row.median_us, row.device_us, row.host_us),
        )
    for key, facts, *found in connection.execute(_POINTS, (*subject, MAX_NOISE, MAX_READ)):
        work = _work(key, facts)
        if work is None or not sql_schema.holds(sql_schema.start_of(key, int(subject[1])), tuple(found)):
            continue  # damaged: checking the database tells
        rank = (found[_DEVICE] is not None, found[_WRITTEN])
        if key not in latest or latest[key][0] < rank:
            latest[key] = rank, _point(work, found[_MEDIAN], found[_DEVICE], found[_HOST])
    return (point for _, point in latest.values())


def _point(work: Work, median_us: float, device_us: float | None, host_us: float | None) -> Point:
    return Point(work.sizes, median_us, device_us, host_us, meaning_of(keeping.axes_of(dict(work.facts))))


def _work(key: bytes, facts: str) -> Work | None:
    """The work that a key is the hash of; None where the two do not fit any more."""
    try:
        work = Work(tuple(sorted(msgspec.json.decode(facts, type=dict[str, str]).items())))
    except (msgspec.MsgspecError, UnicodeError, TypeError):
        return None
    return work if work.key == key else None


def groups(connection: sqlite3.Connection) -> list[list[Point]]:
    """The points of every model, to see how well they predict each other."""
    subjects = connection.execute(_FAMILIES).fetchall()
    return [list(_points(connection, subject, ())) for subject in subjects]


MODELS = f"""SELECT {sql_schema.MODEL_COLUMNS}, crc FROM models WHERE family = ? AND graph = ?
    UNION ALL SELECT family, graph, kernel, environment, adapts, -1, NULL, 0 FROM stale
    WHERE family = ? AND graph = ?"""  # noqa: S608  # names of ours
"""What is known about a family, given twice; of models that are stale, one more row of format -1."""

decode = msgspec.json.Decoder(Model).decode


class _Host(msgspec.Struct, frozen=True):
    """The part of a model that is about the host."""

    host_us: float


decode_host = msgspec.json.Decoder(_Host).decode
