"""One SQLite file that many processes read and write at once, or memory where there can be none.

The file is opened anew after it was replaced and after a fork. A damaged or foreign file is moved aside under a lock;
one that a newer version wrote is left alone, and this version works in a file beside it.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from layerzero.core import forking
from layerzero.core.errors import LayerZeroWarning
from layerzero.tuning.keeping import migrations, places

Result = TypeVar("Result")

WRITE_WAIT_S = 20.0
"""How long a write waits for those of other processes."""

READ_WAIT_S = 0.25
"""How long a read waits; it waits at all only where there is no write-ahead log."""

_ATTEMPTS = 3
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class ForeignError(Exception):
    """The file is a database, but none of times."""


class NewerError(Exception):
    """The file has a schema that this version does not know."""


class Link:
    """One connection to a file that others may replace, and the lock of the threads that share it."""

    def __init__(self, path: Path, connect: Callable[[Path], sqlite3.Connection]) -> None:
        self.path = path
        self.lock = forking.rlock()
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None

    def get(self) -> sqlite3.Connection:
        """The connection to what now has this name. Raises: FileNotFoundError, sqlite3.Error, and what opening does."""
        try:
            found = os.stat(self.path)  # noqa: PTH116  # on every miss: a third of the time of Path.stat
            identity: tuple[int, int] | None = (found.st_dev, found.st_ino)
        except (FileNotFoundError, NotADirectoryError):
            identity = None
        if self._connection is not None and identity == self._identity and identity is not None:
            return self._connection
        self.close()
        self._connection = self._connect(self.path)
        opened = os.stat(self.path)  # noqa: PTH116
        self._identity = (opened.st_dev, opened.st_ino)
        return self._connection

    def close(self) -> None:
        """Let go of the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Database:
    """Reads and writes; nothing here raises because of the file.

    Attributes:
        path: the file, None for memory only.
        named: the file that was asked for.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = self.named = path
        self._reader: Link | None = None
        self._writer: Link | None = None
        self._memory: sqlite3.Connection | None = None
        self._memory_lock = forking.rlock()
        self._notes: dict[str, None] = {}
        self._writable = path is not None
        self._readable = path is not None
        if path is not None:
            self._use(path)
        _DATABASES.add(self)

    def _use(self, path: Path) -> None:
        self.path = path
        self._reader = Link(path, self._connect_reader)
        self._writer = Link(path, self._connect_writer)

    # reading and writing

    def is_absent(self) -> bool:
        """Whether nobody has written yet, here or anywhere."""
        if self._memory is not None:
            return False
        return not (self._readable and self.path is not None and os.access(self.path, os.F_OK))

    def read(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows that a question finds on disk and in memory; none where the file cannot be read."""
        found: list[tuple[Any, ...]] = []
        if self._readable:
            found = self._try(lambda link: link.get().execute(statement, parameters).fetchall(), writing=False) or []
        if self._memory is not None:
            with self._memory_lock:
                found = found + self._memory.execute(statement, parameters).fetchall()
        return found

    def write(self, change: Callable[[sqlite3.Connection], None]) -> None:
        """Commit a change, all of it or nothing; in memory where the file cannot be written."""

        def commit(link: Link) -> bool:
            _transaction(link.get(), change)
            return True

        if self._writable and self._try(commit, writing=True):
            return
        with self._memory_lock:
            if self._memory is None:
                self._memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
                migrations.migrate(self._memory)
            _transaction(self._memory, change)

    def _try(self, act: Callable[[Link], Result], *, writing: bool) -> Result | None:
        """Do something with the file, again where it had to be replaced first; None where that does not help."""
        for _ in range(_ATTEMPTS):
            link = self._writer if writing else self._reader
            assert link is not None
            with link.lock:
                try:
                    return act(link)
                except (FileNotFoundError, NotADirectoryError) as error:
                    if writing:
                        self._give_up(error, writing=True)
                    return None  # to read: nobody has written yet
                except (sqlite3.Error, OSError, ForeignError, NewerError) as error:
                    link.close()
                    if not self._recovered(error, writing=writing):
                        return None
        return None

    # what goes wrong

    def _recovered(self, error: Exception, *, writing: bool) -> bool:
        """Whether there is something to try again after an error: a fresh file, or another one."""
        assert self.path is not None
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if isinstance(error, NewerError):
            path = self.path.with_name(f"{self.path.stem}.schema-{migrations.LATEST}{self.path.suffix}")
            self._tell(f"{self.path}: {error}; it is left alone, and this version keeps its times in {path}")
            self._use(path)
            return True
        if (isinstance(error, ForeignError) or code in _DAMAGED) and self._set_aside(error):
            return True
        if code in _PASSING:
            self._tell(f"{self.path}: other processes kept it busy for too long; a {'write' if writing else 'read'} "
                       "went on without it")  # fmt: skip
        else:
            self._give_up(error, writing=writing)
        return False

    def _set_aside(self, error: Exception) -> bool:
        """Move a file aside that is no database of times; whether a fresh one may take its place."""
        assert self.path is not None
        try:
            with places.turn(self.path):
                if self._sound():  # another process has moved it already
                    return True
                moved = places.move_aside(self.path)
        except OSError:  # a folder that cannot be written: the caller gives up
            return False
        self._tell(f"{self.path}: {error}; it counts for nothing and was set aside as {moved.name}")
        return True

    def _sound(self) -> bool:
        """Whether the file that now has the name is one of ours and whole, or absent."""
        assert self.path is not None
        if not self.path.exists():
            return True
        connection = None
        try:
            connection = _open(self.path, "rw", READ_WAIT_S)
            _check(connection)
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        except (sqlite3.Error, ForeignError):
            return False
        except NewerError:
            return True
        finally:
            if connection is not None:
                connection.close()

    def _give_up(self, error: Exception, *, writing: bool) -> None:
        """Go on without the file, and say so once."""
        if writing:
            self._writable = False
        else:
            self._readable = False
        done = "written: measured times end with this process" if writing else "read: its times do not count"
        text = f"{self.path} cannot be {done} ({error})"
        if text not in self._notes:
            self._tell(text)
            warnings.warn(
                f"{text}. Set LAYERZERO_CACHE_DIR or perfdb.path to a place that can be written",
                LayerZeroWarning,
                stacklevel=2,
            )

    def _tell(self, note: str) -> None:
        self._notes[note] = None

    def notes(self) -> tuple[str, ...]:
        """What is wrong with the file, and what was set aside by this process or another."""
        if self.path is None:
            return ()
        self.read("SELECT 1")  # opens it
        told = " ".join(self._notes)
        untold = [name for name in places.set_aside(self.path) if name not in told]
        named = [f"{self.path}: files were set aside and count for nothing: {', '.join(untold)}"] if untold else []
        return (*self._notes, *named)

    # connections

    def _connect_writer(self, path: Path) -> sqlite3.Connection:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        network = places.network_type(path.parent)
        with places.turn(path):
            connection = _open(path, "rwc", WRITE_WAIT_S)
            try:
                _check(connection)
                migrations.migrate(connection)
                wanted = "delete" if network else "wal"
                mode = connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0]
            except BaseException:
                connection.close()
                raise
        connection.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
        if network:
            self._tell(
                f"{path} lies on a network file system ({network}), which cannot share a write-ahead log: writes are "
                "slower, and safe only as far as its locks are; LAYERZERO_CACHE_DIR names a local folder"
            )
        elif mode != "wal":
            self._tell(f"{path}: this file system keeps no write-ahead log (journal: {mode}); writes are slower")
        return connection

    def _connect_reader(self, path: Path) -> sqlite3.Connection:
        if not path.exists():
            raise FileNotFoundError(path)
        failures: list[sqlite3.OperationalError] = []
        for mode in ("rw", "ro", "ro&immutable=1"):  # first as one who may recover the log of a process that died
            connection = _open(path, mode, READ_WAIT_S)
            try:
                _ready(connection)
                if migrations.version(connection) < migrations.LATEST:
                    self._upgrade()
                connection.execute("PRAGMA query_only = 1")
            except sqlite3.OperationalError as error:
                connection.close()
                failures.append(error)
            except BaseException:
                connection.close()
                raise
            else:
                return connection
        raise failures[0]

    def _upgrade(self) -> None:
        """Migrate a file that an older version wrote."""
        assert self._writer is not None
        with self._writer.lock:
            self._writer.close()
            self._writer.get()

    def close(self) -> None:
        """Let go of the file; the next question opens it again."""
        for link in (self._reader, self._writer):
            if link is not None:
                with link.lock:
                    link.close()

    def __del__(self) -> None:
        self.end()

    def end(self) -> None:
        """Let go of the file, and of what only this process knows."""
        self.close()
        with self._memory_lock:
            if self._memory is not None:
                self._memory.close()
                self._memory = None

    def locks(self) -> list[Any]:
        """What a fork has to hold, so that no thread is amid a question; in the order in which they are taken."""
        return [*(link.lock for link in (self._reader, self._writer) if link is not None), self._memory_lock]


def _open(path: Path, mode: str, wait_s: float) -> sqlite3.Connection:
    name = f"file:{quote(str(path))}?mode={mode}"
    connection = sqlite3.connect(name, uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA trusted_schema = 0")  # a file from elsewhere runs no functions of ours
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> bool:
    """Whether a file is a database of times; an empty one is not yet. Raises: ForeignError, NewerError."""
    found = connection.execute("PRAGMA application_id").fetchone()[0]
    if found == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        return False
    if found != migrations.APPLICATION_ID:
        raise ForeignError(f"it is another program's database (application_id {found:#x})")
    version = migrations.version(connection)
    if version > migrations.LATEST:
        raise NewerError(f"a newer version wrote it (schema {version}, known are 1 to {migrations.LATEST})")
    return True


def _ready(connection: sqlite3.Connection) -> None:
    if not _check(connection):
        raise FileNotFoundError  # a process is making it


def _transaction(connection: sqlite3.Connection, change: Callable[[sqlite3.Connection], None]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        change(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # an error of the disk has rolled back already
            connection.execute("ROLLBACK")
        raise


_DATABASES: weakref.WeakSet[Database] = weakref.WeakSet()
_HELD: list[Any] = []
_FORKING = forking.rlock()
"""Threads that fork at once take turns."""


def _before_fork() -> None:
    """Close every file: SQLite's locks belong to a process, and a connection that is carried over breaks them."""
    _FORKING.acquire()
    for database in list(_DATABASES):
        for lock in database.locks():
            lock.acquire()
            _HELD.append(lock)
        database.close()


def _after_fork() -> None:
    while _HELD:
        _HELD.pop().release()
    _FORKING.release()


def _at_exit() -> None:
    for database in list(_DATABASES):
        database.end()


atexit.register(_at_exit)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
