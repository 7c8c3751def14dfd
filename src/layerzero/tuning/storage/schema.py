"""The tables of the database of times."""

from __future__ import annotations

import functools
import sqlite3

APPLICATION_ID = 0x4C5A5044
"""``LZPD``: tells this database from any other one."""

VERSION = 4
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
        host_us REAL CHECK (host_us IS NULL OR host_us > 0), crc INTEGER,
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


def make(connection: sqlite3.Connection) -> None:
    """Give an empty database its tables, all or none; other processes wait."""
    if version(connection):
        return
    try:
        connection.execute("BEGIN IMMEDIATE")
        if not version(connection):  # read again: another process may have been here first
            for statement in _STATEMENTS:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


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
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        make(connection)
        return _made_by(connection)
    finally:
        connection.close()
