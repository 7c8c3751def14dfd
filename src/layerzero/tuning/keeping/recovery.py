"""Sound rows of a damaged database: each that its checksum vouches for, and whose work and environment are whole.

A damaged page ends a walk through a table; what lies behind it is reached from the other end.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from layerzero.tuning.keeping import checksums
from layerzero.tuning.keeping.connections import READ_WAIT_S, open_file
from layerzero.tuning.keeping.environment import Environment
from layerzero.tuning.keeping.rows import Row, Work, check

_PAGE = 1000


def rows_of(path: Path) -> Iterator[list[Row]]:
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
        try:
            connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
            yield from _rows(connection)
        finally:
            connection.close()


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
    statement = f"SELECT work, graph, {checksums.WHOLE} FROM times"  # noqa: S608  # names of ours
    for work, graph, *found in _walk(connection, statement, order):
        environment = environments.get(found[1])
        if (
            work not in works
            or environment is None
            or not checksums.holds_whole(checksums.start_of(work, graph), tuple(found))
        ):
            continue
        values = dict(zip(checksums.COLUMNS, found[:-1], strict=True))
        row = Row(facts=works[work], graph=bool(graph), **(values | {"environment": environment}))
        try:
            check(row)
        except ValueError:
            continue
        page.append(row)
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
