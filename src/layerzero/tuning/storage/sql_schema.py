"""The tables of the database of times, and checksums of what they hold: what a disk or a hand has changed shows.

A checksum is written next to values that passed :func:`layerzero.tuning.storage.rows.check` only, so what holds on
reading is what was allowed on writing. CRC-32 finds every single bit, and misses one in four billion of other damage. A
time has two in one number, since a call reads only what decides: the lower 32 bits are of that, the others of all.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

import msgspec

Result = TypeVar("Result")

APPLICATION_ID = 0x4C5A5044
"""``LZPD``: tells this database from any other one."""

VERSION = 5
"""Counts up with each change of a table: a file of another version is left alone."""

_STATEMENTS = (
    """CREATE TABLE works (
        key BLOB PRIMARY KEY, family BLOB NOT NULL, operation TEXT NOT NULL, dtype TEXT NOT NULL,
        facts TEXT NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX works_by_family ON works (family)",
    """CREATE TABLE environments (
        key BLOB PRIMARY KEY, device TEXT NOT NULL, torch TEXT NOT NULL, library TEXT NOT NULL,
        facts TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE times (
        work BLOB NOT NULL, graph INTEGER NOT NULL, kernel TEXT NOT NULL, environment BLOB NOT NULL,
        condition TEXT NOT NULL, origin TEXT NOT NULL, source TEXT NOT NULL,
        median_us REAL NOT NULL, p95_us REAL NOT NULL, variance_us2 REAL NOT NULL, samples INTEGER NOT NULL,
        noise REAL NOT NULL, first_call_us REAL, adapts TEXT NOT NULL, device_uuid TEXT NOT NULL,
        layerzero TEXT NOT NULL, written_at TEXT NOT NULL,
        device_us REAL CHECK (device_us IS NULL OR device_us > 0),
        host_us REAL CHECK (host_us IS NULL OR host_us > 0), error REAL CHECK (error IS NULL OR error >= 0),
        crc INTEGER,
        CHECK (typeof(median_us) = 'real' AND median_us > 0 AND typeof(noise) = 'real' AND noise >= 0),
        CHECK (typeof(variance_us2) = 'real' AND variance_us2 >= 0),
        CHECK (typeof(samples) = 'integer' AND samples > 0),
        PRIMARY KEY (work, graph, kernel, environment, condition, origin, source)) WITHOUT ROWID""",
    """CREATE TABLE models (
        family BLOB NOT NULL, graph INTEGER NOT NULL, kernel TEXT NOT NULL, environment BLOB NOT NULL,
        adapts TEXT NOT NULL, format INTEGER NOT NULL, model BLOB NOT NULL, crc INTEGER,
        PRIMARY KEY (family, graph, kernel, environment, adapts)) WITHOUT ROWID""",
    """CREATE TABLE stale (
        family BLOB NOT NULL, graph INTEGER NOT NULL, kernel TEXT NOT NULL, environment BLOB NOT NULL,
        adapts TEXT NOT NULL, serial INTEGER NOT NULL,
        PRIMARY KEY (family, graph, kernel, environment, adapts)) WITHOUT ROWID""",
)


def version(connection: sqlite3.Connection) -> int:
    """The schema of a database; 0 for an empty file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def in_transaction(connection: sqlite3.Connection, change: Callable[[sqlite3.Connection], Result]) -> Result:
    """Commit a change, all of it or nothing, whatever interrupts it."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        done = change(connection)
        connection.execute("COMMIT")
    except BaseException:  # an interrupt too, which may come as BEGIN returns
        if connection.in_transaction:  # an error of the disk has rolled back already
            connection.execute("ROLLBACK")
        raise
    return done


def make(connection: sqlite3.Connection) -> None:
    """Give an empty database its tables, all or none; other processes wait."""
    if not version(connection):
        in_transaction(connection, _make)


def _make(connection: sqlite3.Connection) -> None:
    if not version(connection):  # read again: another process may have been here first
        for statement in _STATEMENTS:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


def difference(connection: sqlite3.Connection) -> str:
    """How a database's tables differ from what they should be, or what else changes rows; empty if nothing."""
    got = _made_by(connection)
    for name, wanted in _wanted().items():
        if name not in got:
            return f"wanted {name}, got none"
        if got[name] != wanted:
            return f"{name} is not as it was made"
    triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
    return f"wanted no trigger, got {triggers[0][0]}" if triggers else ""


def _made_by(connection: sqlite3.Connection) -> dict[str, str]:
    """What made each table and index, without spaces."""
    found = connection.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {str(name): "".join(str(sql).split()) for name, sql in found}


@functools.cache
def _wanted() -> dict[str, str]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        make(connection)
        return _made_by(connection)


_encode = msgspec.msgpack.Encoder().encode

DECIDING = (
    *("kernel", "environment", "condition", "source", "median_us", "noise", "samples", "variance_us2", "written_at"),
    *("adapts", "device_us", "host_us", "error", "origin"),
)
"""Columns of a time behind its work and graph that decide what it is worth, in the order in which they are summed.

The first are the fields of :class:`layerzero.tuning.prediction.fitting.Time`: nothing has to be sorted on a miss.
"""

COLUMNS = (*DECIDING, "p95_us", "first_call_us", "device_uuid", "layerzero")
"""All columns behind work and graph."""

NUMBERS = (
    *("median_us", "p95_us", "variance_us2", "samples", "noise", "first_call_us", "device_us", "host_us", "error"),
)  # fmt: skip
"""Those that rules bind."""

SELECTED = ", ".join((*DECIDING, "crc"))
"""What has to be selected to know that what decides is as it was written."""

WHOLE = ", ".join(f"times.{name}" for name in (*COLUMNS, "crc"))
"""What has to be selected to know that of all."""

MODEL_COLUMNS = "family, graph, kernel, environment, adapts, format, model"

_COUNT = len(DECIDING)
_LOW = 0xFFFFFFFF


def start_of(work: bytes, graph: int) -> int:
    """Where the checksums of all times of one work begin."""
    return crc32(_encode((work, graph)))


def sound(start: int, found: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Those :data:`SELECTED` columns of one work's times that are as they were written."""
    try:
        return [row for row in found if crc32(_encode(row[:-1]), start) == row[-1] & _LOW]
    except (TypeError, ValueError, OverflowError):
        return [row for row in found if holds(start, row)]


def holds(start: int, found: Sequence[Any]) -> bool:
    """Whether :data:`SELECTED` columns are as they were written."""
    try:
        return bool(crc32(_encode(found[:-1]), start) == found[-1] & _LOW)
    except (TypeError, ValueError, OverflowError):  # text that is none, numbers that no file of ours has
        return False


def holds_whole(start: int, found: Sequence[Any]) -> bool:
    """Whether :data:`WHOLE` columns are as they were written."""
    try:
        return bool(crc_of(start, found[:-1]) == found[-1])
    except (TypeError, ValueError, OverflowError):
        return False


def crc_of(start: int, values: Sequence[Any]) -> int:
    """The checksum of a time's :data:`COLUMNS`."""
    deciding = crc32(_encode(tuple(values[:_COUNT])), start)
    return deciding | (crc32(_encode(tuple(values[_COUNT:])), deciding) >> 1) << 32  # positive in SQLite's 64 bits


def model_crc(*values: Any) -> int:
    """The checksum of a model's :data:`MODEL_COLUMNS`."""
    *subject, model = values
    return crc32(model, crc32(_encode(subject)))


def model_holds(found: Sequence[Any]) -> bool:
    """Whether :data:`MODEL_COLUMNS`, with the checksum behind them, are as they were written."""
    try:
        return bool(model_crc(*found[:-1]) == found[-1])
    except (TypeError, ValueError, OverflowError):
        return False
