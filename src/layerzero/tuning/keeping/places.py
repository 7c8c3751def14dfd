"""Where a database lies: what file system it is on, how processes take turns there, how a file leaves its name."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from layerzero.core.system import disk, forking

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
"""How long a process waits for another one's turn; one that is paused amid its turn must hold up nobody."""

_PAUSE_S = 0.005

_HELD: set[int] = set()
"""Locks that threads of this process hold; a forked child lets go of what it inherits of them."""


@contextmanager
def turn(path: Path, *, of: str = "lock", wait_s: float = TURN_WAIT_S) -> Iterator[None]:
    """Hold the lock of those who make, upgrade or replace a file, or of another group that takes turns beside it.

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
