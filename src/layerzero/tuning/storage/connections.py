"""Connections to the database of times: what a file must be before it is believed, and transactions on it.

Also where it lies: what file system that is, how processes take turns there, and how a file leaves its name.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from layerzero.core.system import disk, forking
from layerzero.tuning.storage import sql_schema

Result = TypeVar("Result")

WRITE_WAIT_S = 0.25
"""How long a write waits for other programs; this library's own writers take turns before they come here."""

READ_WAIT_S = 0.25
"""How long a read waits; it waits at all only where there is no write-ahead log."""


PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""SQLite's codes for what another process does just now."""


def code_of(error: Exception) -> int:
    """SQLite's code for an error, 0 for any other."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


class ForeignError(Exception):
    """The file is no database of times, or none that can be one any more."""


class OtherVersionError(Exception):
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
        identity = plain_identity(self.path)
        if self._connection is not None and identity is not None and identity == self._identity:
            return self._connection
        self.close()
        self._connection = self._connect(self.path)
        self._identity = plain_identity(self.path)
        return self._connection

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()


def plain_identity(path: Path) -> tuple[int, int] | None:
    """Device and number of a plain file; None where there is none. Raises: ForeignError for a link, pipe or folder."""
    try:
        found = os.lstat(path)  # on every miss: a third of the time of Path.lstat
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ForeignError("wanted a plain file, got a link, a pipe, a device or a folder")
    return found.st_dev, found.st_ino


def uri(path: Path, mode: str) -> str:
    """The name of a database with SQLite's words for how it is opened; a path need be no Unicode."""
    return f"file:{quote(os.fsencode(path))}?mode={mode}"


def open_file(path: Path, mode: str, wait_s: float) -> sqlite3.Connection:
    """Open a database by SQLite's words for how. Raises: sqlite3.Error."""
    name = uri(path, mode)
    connection = sqlite3.connect(name, uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA trusted_schema = 0")  # a file from elsewhere runs no functions of ours
    except BaseException:
        connection.close()
        raise
    return connection


def check(connection: sqlite3.Connection) -> bool:
    """Whether a file is a database of times; an empty one is not yet. Raises: ForeignError, OtherVersionError."""
    found = connection.execute("PRAGMA application_id").fetchone()[0]
    if found == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        return False
    if found != sql_schema.APPLICATION_ID:
        raise ForeignError(f"it is another program's database (application_id {found:#x})")
    version = sql_schema.version(connection)
    if version < 1:
        raise ForeignError(f"wanted schema {sql_schema.VERSION}, got {version}")
    if version != sql_schema.VERSION:
        problem = f"wanted schema {sql_schema.VERSION}, got {version} of another version"
        raise OtherVersionError(f"{problem}; `layerzero tune` measures again")
    difference = sql_schema.difference(connection)
    if difference:
        raise ForeignError(difference)
    return True


def writing(path: Path) -> tuple[sqlite3.Connection, str, str]:
    """Open a file to write, and make it where there is none.

    Returns: the connection, the journal that it keeps, and the type of the network file system that it lies on.
    Raises: ForeignError, OtherVersionError, OSError, sqlite3.Error.
    """
    disk.make_private(path.parent)
    check_folder(path.parent)
    network = network_type(path.parent)
    with turn(path):
        if plain_identity(path) is None:  # SQLite would let others read it
            os.close(disk.open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        connection = open_file(path, "rw", WRITE_WAIT_S)
        try:
            check(connection)
            sql_schema.make(connection)
            wanted = "delete" if network else "wal"
            mode = connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0]
        except BaseException:
            connection.close()
            raise
    connection.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
    return connection, mode, network


def reading(path: Path) -> sqlite3.Connection:
    """Open a file to read.

    Raises: FileNotFoundError while there is none, ForeignError, OtherVersionError, OSError, sqlite3.Error.
    """
    check_folder(path.parent)
    if plain_identity(path) is None:
        raise FileNotFoundError(path)
    failures: list[sqlite3.OperationalError] = []
    for mode in ("rw", "ro", "ro&immutable=1"):  # first so that the log of a process that died can be recovered
        connection = open_file(path, mode, READ_WAIT_S)
        try:
            if not check(connection):
                raise FileNotFoundError(path)  # noqa: TRY301  # a process is making it
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


NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ncpfs", "9p", "lustre", "gpfs", "beegfs", "ceph", "wekafs"),
        *("fuse.sshfs", "fuse.glusterfs", "fuse.juicefs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"),
    }
)
"""File systems whose machines share no memory, which a write-ahead log needs."""

_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")


def network_type(folder: Path) -> str:
    """The type of the network file system that a folder lies on; empty for a local one, or where nothing tells."""
    try:
        text = _MOUNTS.read_text()
        place = folder.resolve()
    except OSError:  # not Linux, or a path that cannot be followed: opening it will tell
        return ""
    best, kind = -1, ""
    for line in text.splitlines():
        mount, _, rest = line.partition(" - ")
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), mount.split(" ")[4]))
        if place.is_relative_to(point) and len(point.parts) >= best:  # of two mounts on one point, the later counts
            best, kind = len(point.parts), rest.split(" ", 1)[0]
    return kind if kind in NETWORK else ""


def check_folder(folder: Path) -> None:
    """Raises: PermissionError for a folder that others may write to."""
    why = disk.distrust(folder)
    if why:
        raise PermissionError(errno.EPERM, f"{why}: name a folder of your own")


TURN_WAIT_S = 1.0
"""How long a process waits for another one's turn; one that is paused amid its turn must hold up no other."""

_PAUSE_S = 0.005

_HELD: set[int] = set()
"""Locks that threads of this process hold; a forked child lets go of what it inherits of them."""


@contextmanager
def turn(path: Path, *, of: str = "lock", wait_s: float = TURN_WAIT_S) -> Iterator[None]:
    """Hold the lock under which a file is made or replaced, or another one by which processes take turns.

    Raises: TimeoutError where another process keeps it, OSError where there can be no lock file.
    """
    name = path.with_name(f"{path.name}.{of}")
    check_folder(path.parent)
    lock = disk.open_plain(name, os.O_RDWR | os.O_CREAT)
    _HELD.add(lock)
    try:
        _take(lock, name, wait_s)
        yield
    finally:
        _HELD.discard(lock)
        os.close(lock)


def _take(lock: int, name: Path, wait_s: float) -> None:
    until = time.monotonic() + wait_s
    while not disk.lock(lock):
        if time.monotonic() >= until:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held {name} for {wait_s:g} s")
        time.sleep(_PAUSE_S)


def _let_go() -> None:
    """In a forked child: the lock hangs on the open file, which it shares with its parent."""
    while _HELD:
        os.close(_HELD.pop())


forking.in_child(_let_go)


def move_aside(path: Path) -> Path:
    """Rename a database and its journals, which must not meet the file that takes its place; return the new name."""
    date = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    target = path.with_name(f"{path.name}{_ASIDE}{date}-{os.getpid()}")
    for suffix in ("-wal", "-shm", "-journal", ""):
        journal = path.with_name(path.name + suffix)
        if os.path.lexists(journal):
            journal.replace(target.with_name(target.name + suffix))
    return target


def set_aside(path: Path) -> list[str]:
    """Names of the files that once had this path and were moved aside."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.name.startswith(f"{path.name}{_ASIDE}")]
    except OSError:
        return []
    return sorted(name for name in names if not name.endswith(("-wal", "-shm", "-journal")))


_ASIDE = ".set-aside-"
