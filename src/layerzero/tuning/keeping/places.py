"""Where a database lies: what file system it is on, how processes take turns there, how a file leaves its name."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

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


@contextmanager
def turn(path: Path) -> Iterator[None]:
    """Hold the lock of those who make, upgrade or replace a file. Raises: OSError where there can be no lock file."""
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def move_aside(path: Path) -> Path:
    """Rename a database and its journals, which must not meet the file that takes its place; return the new name."""
    date = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    target = path.with_name(f"{path.name}{_ASIDE}{date}-{os.getpid()}")
    for suffix in ("-wal", "-shm", "-journal", ""):
        journal = path.with_name(path.name + suffix)
        if journal.exists():
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
