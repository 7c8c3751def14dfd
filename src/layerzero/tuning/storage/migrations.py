"""The tables of the database of times, as ordered steps from one schema to the next."""

from __future__ import annotations

import functools
import sqlite3

from layerzero.tuning.storage import checksums

APPLICATION_ID = 0x4C5A5044
"""``LZPD``: tells this database from any other one."""

STEPS: tuple[tuple[str, ...], ...] = (
    (
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
            CHECK (typeof(median_us) = 'real' AND median_us > 0 AND typeof(noise) = 'real' AND noise >= 0),
            CHECK (typeof(variance_us2) = 'real' AND variance_us2 >= 0),
            CHECK (typeof(samples) = 'integer' AND samples > 0),
            PRIMARY KEY (work, graph, kernel, environment, condition, origin, source)) WITHOUT ROWID""",
    ),
    (
        """CREATE TABLE models (
            family BLOB NOT NULL, graph INTEGER NOT NULL, kernel TEXT NOT NULL, environment BLOB NOT NULL,
            adapts TEXT NOT NULL, format INTEGER NOT NULL, model BLOB NOT NULL,
            PRIMARY KEY (family, graph, kernel, environment, adapts)) WITHOUT ROWID""",
    ),
    (
        "ALTER TABLE times ADD COLUMN device_us REAL CHECK (device_us IS NULL OR device_us > 0)",
        "ALTER TABLE times ADD COLUMN host_us REAL CHECK (host_us IS NULL OR host_us > 0)",
    ),
    (
        "ALTER TABLE times ADD COLUMN crc INTEGER",
        "ALTER TABLE models ADD COLUMN crc INTEGER",
        """UPDATE times SET crc = time_crc(work, graph, kernel, environment, condition, source, median_us, noise,
            samples, variance_us2, written_at, adapts, device_us, host_us, origin, p95_us, first_call_us,
            device_uuid, layerzero)""",
        "UPDATE models SET crc = model_crc(family, graph, kernel, environment, adapts, format, model)",
        """CREATE TABLE stale (
            family BLOB NOT NULL, graph INTEGER NOT NULL, kernel TEXT NOT NULL, environment BLOB NOT NULL,
            adapts TEXT NOT NULL, serial INTEGER NOT NULL,
            PRIMARY KEY (family, graph, kernel, environment, adapts)) WITHOUT ROWID""",
    ),
)
"""``STEPS[n]`` leads from version n to version n + 1; version 0 is an empty file. A step that shipped never changes."""

LATEST = len(STEPS)


def version(connection: sqlite3.Connection) -> int:
    """The schema of a database."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection, to: int = LATEST) -> None:
    """Bring a database to the latest schema, all steps or none; other processes wait."""
    if version(connection) == to:
        return
    checksums.add_functions(connection)
    try:
        connection.execute("BEGIN IMMEDIATE")
        for number in range(version(connection), to):  # read again: another process may have been here first
            for statement in STEPS[number]:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {to}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def difference(connection: sqlite3.Connection) -> str:
    """How a database's tables differ from what its version says, or what else changes rows; empty if nothing."""
    got = _statements(connection)
    for name, wanted in _made_by(version(connection)).items():
        if name not in got:
            return f"wanted {name}, got none"
        if got[name] != wanted:
            return f"{name} is not as it was made"
    triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
    return f"wanted no trigger, got {triggers[0][0]}" if triggers else ""


def _statements(connection: sqlite3.Connection) -> dict[str, str]:
    """What made each table and index, without spaces."""
    found = connection.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {str(name): "".join(str(sql).split()) for name, sql in found}


@functools.cache
def _made_by(number: int) -> dict[str, str]:
    """The same of a database that was made at a version."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        migrate(connection, number)
        return _statements(connection)
    finally:
        connection.close()
