"""Rows into the database, and what is learnt from them beside them: in one transaction, so that both always agree.

Whoever writes a time pays for learning from it; whoever asks reads what was learnt.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from layerzero.tuning.keeping.rows import Row, Work
from layerzero.tuning.predicting import fitting
from layerzero.tuning.predicting.prediction import Model, Point

MODEL_FORMAT = 3
"""Changes with the meaning of a stored model; older ones are learnt anew, newer ones are as if there were none."""

MAX_READ = 512
"""Times of a family that are looked at; works lie in the order of their hashes, so these are a fair sample."""

MAX_NOISE = 0.5
"""A median whose halves differ by more says nothing about its neighbours, unless the device's time is known apart."""

_WORK = "INSERT OR IGNORE INTO works (key, family, operation, dtype, facts) VALUES (?, ?, ?, ?, ?)"
_ENVIRONMENT = "INSERT OR IGNORE INTO environments (key, device, torch, library, facts) VALUES (?, ?, ?, ?, ?)"
_KNOWN = """SELECT median_us, adapts, written_at, noise, device_us, host_us FROM times
    WHERE work = ? AND graph = ? AND kernel = ? AND environment = ? AND condition = ? AND origin = ? AND source = ?"""
_TIME = """INSERT OR REPLACE INTO times (work, graph, kernel, environment, condition, origin, source, median_us,
    p95_us, variance_us2, samples, noise, first_call_us, device_us, host_us, adapts, device_uuid, layerzero, written_at)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_FORGET = """DELETE FROM times WHERE work = ? AND graph = ? AND kernel = ? AND environment = ? AND condition = ?
    AND origin = ? AND source = ?"""
_POINTS = """SELECT works.key, works.facts, median_us, device_us, host_us, written_at
    FROM works CROSS JOIN times ON times.work = works.key
    WHERE works.family = ? AND graph = ? AND kernel = ? AND environment = ? AND adapts = ?
    AND (noise <= ? OR device_us IS NOT NULL) LIMIT ?"""
_MODEL = """INSERT OR REPLACE INTO models (family, graph, kernel, environment, adapts, format, model)
    VALUES (?, ?, ?, ?, ?, ?, ?)"""
_UNLEARN = "DELETE FROM models WHERE family = ? AND graph = ? AND kernel = ? AND environment = ? AND adapts = ?"
_OLD = "SELECT family, graph, kernel, environment, adapts FROM models WHERE family = ? AND format < ?"
_FAMILIES = """SELECT DISTINCT works.family, graph, kernel, environment, adapts FROM times
    JOIN works ON works.key = times.work"""

Subject = tuple[bytes, bool, str, bytes, str]
"""What one model is about: family, whether graphs, kernel, environment, adaptations."""


def _identity(row: Row) -> tuple[object, ...]:
    return row.work.key, row.graph, row.kernel, row.environment.key, row.condition, row.origin, row.source


def subject_of(row: Row) -> Subject:
    """The model that a row belongs to."""
    return row.work.family, row.graph, row.kernel, row.environment.key, row.adapts


def write(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Insert rows, unless the same thing was measured later, and learn from what is new about them."""
    touched: dict[Subject, list[Row]] = {}
    for row in rows:
        identity = _identity(row)
        known = connection.execute(_KNOWN, identity).fetchone()
        if known is not None and known[2] > row.written_at:
            continue
        _insert(connection, row, identity)
        learnt = known is not None and known[1] == row.adapts and _teaches(known[3], known[4])
        if learnt and _teaches(row.noise, row.device_us) and _says_the_same(row, known[0], *known[4:]):
            continue
        touched.setdefault(subject_of(row), []).append(row)
        if known is not None and known[1] != row.adapts:
            touched.setdefault((*subject_of(row)[:4], known[1]), [])
    for subject, new in touched.items():
        learn(connection, subject, new)


def _teaches(noise: float, device_us: float | None) -> bool:
    """Whether a time is looked at when models are fitted."""
    return noise <= MAX_NOISE or device_us is not None


def _says_the_same(row: Row, *known: float | None) -> bool:
    """Whether median, device's and host's time are within the noise of what was learnt."""
    pairs = zip((row.median_us, row.device_us, row.host_us), known, strict=True)
    return all(new == old if new is None or old is None else abs(new / old - 1) <= row.noise for new, old in pairs)


def _insert(connection: sqlite3.Connection, row: Row, identity: tuple[object, ...]) -> None:
    work, environment = row.work, row.environment
    facts = row.facts
    text = msgspec.json.encode(facts).decode()
    connection.execute(_WORK, (work.key, work.family, facts.get("operation", ""), facts.get("dtype", ""), text))
    about = (environment.key, environment.device, environment.torch, environment.library)
    connection.execute(_ENVIRONMENT, (*about, msgspec.json.encode(environment).decode()))
    numbers = (row.median_us, row.p95_us, row.variance_us2, row.samples, row.noise, row.first_call_us)
    parts = (row.device_us, row.host_us)
    connection.execute(_TIME, (*identity, *numbers, *parts, row.adapts, row.device_uuid, row.layerzero, row.written_at))


def remove(connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """Delete rows, what was learnt from them, and works and environments that no row speaks of any more."""
    connection.executemany(_FORGET, [_identity(row) for row in rows])
    for subject in {subject_of(row) for row in rows}:
        learn(connection, subject)
    connection.execute("DELETE FROM works WHERE key NOT IN (SELECT work FROM times)")
    connection.execute("DELETE FROM environments WHERE key NOT IN (SELECT environment FROM times)")


def learn(connection: sqlite3.Connection, subject: Subject, new: Sequence[Row] = ()) -> None:
    """Fit one model anew; ``new`` are rows that count even where a family has more than are looked at."""
    model = fitting.fit(list(_points(connection, subject, new)))
    if model is None:
        connection.execute(_UNLEARN, subject)
    else:
        connection.execute(_MODEL, (*subject, MODEL_FORMAT, msgspec.json.encode(model)))


def relearn(connection: sqlite3.Connection, family: bytes) -> None:
    """Learn anew what an earlier version learnt about a family in its own way."""
    for subject in connection.execute(_OLD, (family, MODEL_FORMAT)).fetchall():
        learn(connection, subject)


def _points(connection: sqlite3.Connection, subject: Subject, new: Sequence[Row]) -> Iterator[Point]:
    """One point for each work, the latest that tells device and host apart, or the latest; first those that are new."""
    latest: dict[bytes, tuple[tuple[bool, str], Point]] = {}
    told = [row for row in new if _teaches(row.noise, row.device_us)]
    for row in told[-fitting.MAX_POINTS // 2 :]:
        point = Point(row.work.sizes, row.median_us, row.device_us, row.host_us)
        latest[row.work.key] = (row.device_us is not None, row.written_at), point
    for key, facts, *times, written_at in connection.execute(_POINTS, (*subject, MAX_NOISE, MAX_READ)):
        rank = (times[1] is not None, written_at)
        if key not in latest or latest[key][0] < rank:
            work = Work(tuple(msgspec.json.decode(facts, type=dict[str, str]).items()))
            latest[key] = rank, Point(work.sizes, *times)
    return (point for _, point in latest.values())


def groups(connection: sqlite3.Connection) -> list[list[Point]]:
    """The points of every model, to see how well they predict each other."""
    subjects = connection.execute(_FAMILIES).fetchall()
    return [list(_points(connection, subject, ())) for subject in subjects]


MODELS = "SELECT kernel, environment, adapts, model, format FROM models WHERE family = ? AND graph = ?"
"""What is known about a family."""

decode = msgspec.json.Decoder(Model).decode


class _Host(msgspec.Struct, frozen=True):
    """The part of a model that is about the host."""

    host_us: float


decode_host = msgspec.json.Decoder(_Host).decode
