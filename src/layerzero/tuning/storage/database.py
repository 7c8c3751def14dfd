"""One SQLite file that many processes read and write at once, or memory where there can be none.

The file is opened anew after it was replaced and after a fork. A damaged or foreign file is moved aside under a lock;
one that another version wrote is left alone, and this version works in a file next to it. What cannot be read or
written just now is tried again a few seconds later.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from layerzero.core.errors import LayerZeroWarning
from layerzero.core.system import disk, forking, warn
from layerzero.tuning.storage import connections, sql_schema
from layerzero.tuning.storage.connections import PASSING, ForeignError, Link, OtherVersionError, code_of
from layerzero.tuning.storage.sql_schema import in_transaction

Result = TypeVar("Result")

RETRY_S = 5.0
"""How long a file that could not be read or written is left alone."""

_ATTEMPTS = 3
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_ELSEWHERE = (
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT),
)
"""SQLite's codes for what is wrong with the place, not with the file."""


class Database:
    """Reads and writes; nothing here raises because of the file.

    Attributes:
        path: the file, None for memory only.
        named: the file that was wanted.
        aside: files that this process moved aside, until a repair has looked what can be saved of them.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = self.named = path
        self.aside: list[Path] = []
        self._name = ""
        self._reader: Link | None = None
        self._writer: Link | None = None
        self._memory: sqlite3.Connection | None = None
        self._memory_lock = forking.rlock()
        self._notes: dict[str, None] = {}
        self._rests: dict[bool, tuple[float, str]] = {}  # writing or reading: until when, and why
        self._warned: set[str] = set()
        if path is not None:
            self._use(path)
        _DATABASES.add(self)

    def _use(self, path: Path) -> None:
        self.path, self._name = path, os.fspath(path)
        self._reader = Link(path, connections.reading)
        self._writer = Link(path, self._connect_writer)

    # reading and writing

    def is_absent(self) -> bool:
        """Whether nothing was written yet, here or anywhere."""
        return self._memory is None and (self.path is None or not os.access(self._name, os.F_OK))

    def is_open(self) -> bool:
        """Whether any process has written, as far as the last question saw."""
        return self._reader is not None and self._reader.is_open

    def read(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows that a question finds on disk and in memory; none where the file cannot be read."""
        found: list[tuple[Any, ...]] = []
        if self.path is not None and not (self._rests and self._resting(writing=False)):
            found = self._ask(statement, parameters)
        if self._memory is not None:
            with self._memory_lock:
                if self._memory is not None:
                    found = found + self._memory.execute(statement, parameters).fetchall()
        return found

    def _ask(self, statement: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        link = self._reader
        assert link is not None
        if not self._rests:
            with link.lock:
                try:  # almost always: the rest is for what goes wrong
                    return link.get().execute(statement, parameters).fetchall()
                except Exception:  # noqa: BLE001, S110  # it is raised again below
                    pass
        return self._try(lambda link: _ask(link.get(), statement, parameters), writing=False) or []

    def change(self, act: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """Do something with a connection that can write; None, with a warning, where the file cannot be written."""
        if self.path is None or (self._rests and self._resting(writing=True)):
            return None
        return self._try(lambda link: act(link.get()), writing=True)

    def remember(self, act: Callable[[sqlite3.Connection], Result]) -> Result:
        """Do something with what only this process knows."""
        with self._memory_lock:
            if self._memory is None:
                memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
                sql_schema.make(memory)
                self._memory = memory
            return act(self._memory)

    def write(self, change: Callable[[sqlite3.Connection], None]) -> bool:
        """Commit a change to the file and to what only this process knows; whether that was all there is."""

        def commit(connection: sqlite3.Connection) -> bool:
            in_transaction(connection, change)
            return True

        done = self.path is None or bool(self.change(commit))
        if self.path is None or self._memory is not None:
            self.remember(commit)
        return done

    def has_memory(self) -> bool:
        """Whether there is anything that only this process knows."""
        return self._memory is not None

    def forget(self) -> None:
        """Let go of what only this process knows: the file has it."""
        with self._memory_lock:
            if self._memory is not None:
                memory, self._memory = self._memory, None
                memory.close()

    def _try(self, act: Callable[[Link], Result], *, writing: bool) -> Result | None:
        """Do something with the file, again where it had to be replaced first; None where that does not help."""
        failed = Exception()
        for _ in range(_ATTEMPTS):
            link = self._writer if writing else self._reader
            assert link is not None
            with link.lock:
                try:
                    done = act(link)
                except (FileNotFoundError, NotADirectoryError) as error:
                    if writing:
                        self._rest(error, writing=True)
                    return None  # to read: nothing was written yet
                except Exception as error:  # noqa: BLE001  # a damaged file makes SQLite's driver raise anything
                    link.close()
                    if not self._recovered(link, error, writing=writing):
                        return None
                    failed = error
                except BaseException:  # an interrupt, maybe amid a transaction
                    link.close()
                    raise
                else:
                    if self._rests:
                        self._rests.pop(writing, None)
                    return done
        self._rest(failed, writing=writing)  # a fresh file was no better
        return None

    # what goes wrong

    def doubt(self, error: Exception) -> None:
        """Take note that what was read made no sense; a file that is not sound is set aside."""
        link = self._reader
        if link is None:
            self.tell(f"times in memory: {type(error).__name__}: {error}")
            return
        with link.lock:
            link.close()
            self._look_into(error, writing=False)

    def _recovered(self, link: Link, error: Exception, *, writing: bool) -> bool:
        """Whether there is something to try again after an error: a fresh file, or another one."""
        assert self.path is not None
        code = code_of(error)
        if isinstance(error, OtherVersionError):
            self._leave(link.path, error)
            return True
        if isinstance(error, ForeignError) or code in _DAMAGED:
            if self._set_aside(error):
                return True
        elif code in PASSING or isinstance(error, TimeoutError):
            self.tell(f"{self.path}: other processes kept it busy for too long; a {'write' if writing else 'read'} "
                      "went on without it")  # fmt: skip
            return False
        elif code not in _ELSEWHERE and not isinstance(error, OSError):
            return self._look_into(error, writing=writing)
        self._rest(error, writing=writing)
        return False

    def _leave(self, left: Path, error: OtherVersionError) -> None:
        """Work in a file next to one that another version wrote, and say so; of two threads that meet it, once."""
        with self._memory_lock:  # reader and writer have a lock each
            if self.path != left:  # the other thread was here first
                return
            path = left.with_name(f"{left.stem}.schema-{sql_schema.VERSION}{left.suffix}")
            self._use(path)
        note = f"{left}: {error}. The file is left alone, and times are kept in {path.name} next to it"
        self.tell(note)
        warn(note, LayerZeroWarning, stacklevel=2)

    def _look_into(self, error: Exception, *, writing: bool) -> bool:
        """After what no sound file makes happen: whether this one was replaced, or can be used all the same."""
        if not self._sound() and self._set_aside(error):
            return True
        self._rest(error, writing=writing)
        return False

    def _set_aside(self, error: Exception) -> bool:
        """Move a file aside that is no database of times; whether a fresh one may take its place."""
        assert self.path is not None
        try:
            with connections.turn(self.path):
                if self._sound():  # another process has moved it already
                    return True
                moved = connections.move_aside(self.path)
        except OSError:  # a folder that cannot be written, or a process that is paused: the caller gives up
            return False
        self.aside.append(moved)
        self.tell(f"{self.path}: {what_of(error)}; it was set aside as {moved.name}", aloud=True)
        return True

    def _sound(self) -> bool:
        """Whether the file that now has the name is one of ours and whole, or absent."""
        assert self.path is not None
        connection = None
        try:
            if connections.plain_identity(self.path) is None:
                return True
            connection = connections.open_file(self.path, "rw", connections.READ_WAIT_S)
            connections.check(connection)
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        except OtherVersionError:
            return True
        except Exception as error:  # noqa: BLE001  # whatever reading it raises
            return code_of(error) in (*PASSING, *_ELSEWHERE)
        finally:
            if connection is not None:
                connection.close()

    def _resting(self, *, writing: bool) -> bool:
        """Whether it is too early to try again."""
        return writing in self._rests and time.monotonic() < self._rests[writing][0]

    def _rest(self, error: Exception, *, writing: bool) -> None:
        """Go on without the file for a while, and say so; what was measured waits in journals meanwhile."""
        self._rests[writing] = (time.monotonic() + RETRY_S, what_of(error))
        if not writing:
            self.tell_once("read", self._cannot(writing=False))

    def _cannot(self, *, writing: bool) -> str:
        done = "written now: measured times wait" if writing else "read: its times do not count"
        return f"{self.path} cannot be {done} ({self._rests[writing][1]})"

    def tell_once(self, kind: str, text: str) -> None:
        """Warn of a place that does not serve, once for each kind of it."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(
                f"{text}. Set LAYERZERO_CACHE_DIR or perfdb.path to a place that can be written",
                LayerZeroWarning,
                stacklevel=2,
            )

    def tell(self, note: str, *, aloud: bool = False) -> None:
        """Take a note for doctor; the first that is a warning is one, too."""
        known = note in self._notes
        self._notes[note] = None
        if aloud and not known and "damage" not in self._warned:
            self._warned.add("damage")
            more = "`layerzero doctor` and `layerzero perfdb check` tell more"
            warn(f"{note}. {more}", LayerZeroWarning, stacklevel=2)

    def notes(self) -> tuple[str, ...]:
        """What is wrong with the file, and what was set aside by this process or another."""
        if self.path is None:
            return tuple(self._notes)
        self.read("SELECT 1")  # opens it
        resting = [self._cannot(writing=writing) for writing in sorted(self._rests)]
        if True not in self._rests and (why := _unwritable(self.path)):  # not tried yet, as in a command that looks
            resting.append(f"{self.path} cannot be written: {why}; mend that, or set perfdb.path to another place")
        told = " ".join(self._notes)
        untold = [name for name in connections.set_aside(self.path) if name not in told]
        named = [f"{self.path}: files were set aside and count for nothing: {', '.join(untold)}"] if untold else []
        return (*self._notes, *resting, *named)

    # connections

    def _connect_writer(self, path: Path) -> sqlite3.Connection:
        connection, mode, network = connections.writing(path)
        connection.text_factory = _text
        if network:
            self.tell(
                f"{path} lies on a network file system ({network}), which cannot share a write-ahead log: writes are "
                "slower, and safe only as far as its locks are; LAYERZERO_CACHE_DIR names a local folder"
            )
        elif mode != "wal":
            self.tell(f"{path}: this file system keeps no write-ahead log (journal: {mode}); writes are slower")
        return connection

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
        self.forget()

    def locks(self) -> list[Any]:
        """What a fork has to hold, so that no thread is amid a question; in the order in which they are taken."""
        return [*(link.lock for link in (self._reader, self._writer) if link is not None), self._memory_lock]


def _unwritable(path: Path) -> str:
    """Why a file cannot be written or made, as far as that is known without trying; else empty."""
    found = disk.no_place(path.parent)
    return found or ("it may not be written" if path.exists() and not os.access(path, os.W_OK) else "")


def what_of(error: Exception) -> str:
    """An error's words, without the name of a file that is another one each time."""
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _ask(connection: sqlite3.Connection, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """All that a question finds; damaged text is read as far as it can be, and its checksum tells."""
    try:
        return connection.execute(statement, parameters).fetchall()
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
    connection.text_factory = _text
    try:
        return connection.execute(statement, parameters).fetchall()
    finally:
        connection.text_factory = str


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
forking.around(_before_fork, _after_fork)
