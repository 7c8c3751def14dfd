"""Files that outlive a process: opened only where they are plain files, private, written whole or not at all.

What lies in a folder may be a pipe without a writer, a link to an endless device, or another user's file. None of it
may hang or mislead the process that opens it. Windows has neither POSIX's locks nor its owners: there files are read
and written by name alone, and nothing is kept between processes.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700

HAS_LOCKS = fcntl is not None
"""Whether a file can be locked until its process ends; without, processes cannot share one."""

_PLAINLY = 0
for _flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"):
    _PLAINLY |= getattr(os, _flag, 0)


class NotPlainError(OSError):
    """A link, pipe, device or folder where a plain file was wanted."""


def open_plain(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a plain file, following no link at its end and never waiting; a new one is private.

    Raises: NotPlainError for anything else, OSError.
    """
    try:
        file = os.open(path, flags | _PLAINLY, PRIVATE_FILE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NotPlainError(error.errno, _wanted(error.strerror), str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotPlainError(errno.EINVAL, _wanted("a pipe, a device or a folder"), str(path))
    return file


@contextmanager
def opened(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> Iterator[int]:
    """The same, closed in the end."""
    file = open_plain(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def _wanted(got: str | None) -> str:
    return f"wanted a plain file, got: {got}"


def read_plain(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """All that a plain file holds. Raises: OSError, also for one that is larger than ``most_bytes``."""
    with opened(path) as file:
        return read_open(file, most_bytes)


def read_open(file: int, most_bytes: int) -> bytes:
    """All that an open file holds. Raises: OSError, also if that is more than ``most_bytes``."""
    size = os.fstat(file).st_size
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"wanted at most {most_bytes} bytes, got {size}")
    parts = []
    at = 0
    while part := _piece(file, most_bytes + 1 - at, at):
        parts.append(part)
        at += len(part)
        if at > most_bytes:
            raise OSError(errno.EFBIG, f"wanted at most {most_bytes} bytes, got more")
    return b"".join(parts)


def _piece(file: int, most_bytes: int, at: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(file, most_bytes, at)
    os.lseek(file, at, os.SEEK_SET)
    return os.read(file, most_bytes)


def read_json(path: str | os.PathLike[str], most_bytes: int, kind: type[T]) -> T | None:
    """What a plain file holds as JSON; None where there is none, or one that is damaged, too large or no such thing."""
    try:
        return msgspec.json.decode(read_plain(path, most_bytes), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def lock(file: int, *, shared: bool = False) -> bool:
    """Take the lock of an open file unless another process has it; the system gives it back however a process ends.

    Returns: whether it is this process's. Raises: OSError where there are no locks.
    """
    _check_locks()
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_locks() -> None:
    if not HAS_LOCKS:
        raise OSError(errno.ENOTSUP, "wanted locks of files as POSIX has them, this system has none")


def unlock(file: int) -> None:
    """Give a lock back; closing is not enough where a forked child has the file, too. Raises: OSError."""
    _check_locks()
    fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether a living process holds a file's lock; those that look at once do not take each other for it.

    Raises: NotPlainError, OSError.
    """
    with opened(path) as file:
        return not lock(file, shared=True)


def write_locked(path: Path, data: bytes) -> int:
    """Put a file in its place, on disk, and locked from before it has its name until what is returned is closed.

    Raises: OSError.
    """
    _check_locks()  # before there is a file to remove
    while True:
        temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
        file = open_plain(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if lock(file) and os.fstat(file).st_nlink:
            break
        os.close(file)  # it was swept before it was locked
    try:
        write_all(file, data)
        os.fsync(file)
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        os.close(file)
        temporary.unlink(missing_ok=True)
        raise
    return file


@contextmanager
def alone(path: str | os.PathLike[str]) -> Iterator[None]:
    """Work on a file as the only process, by a lock in its folder; nothing keeps others away where there are no locks.

    Raises: BlockingIOError where another process works on it, OSError.
    """
    name = f"{os.path.realpath(path)}.lock"
    file = _only_lock(name) if HAS_LOCKS else None
    try:
        yield
    finally:
        if file is not None:
            Path(name).unlink(missing_ok=True)
            os.close(file)


def _only_lock(name: str) -> int:
    while True:
        file = open_plain(name, os.O_RDWR | os.O_CREAT)
        held = lock(file)
        if held and os.fstat(file).st_nlink:
            return file
        os.close(file)
        if not held:  # else another process removed it before it was locked
            raise BlockingIOError(f"{name}: wanted no other process at work, got one; wait until it ends")


def write_all(file: int, data: bytes) -> None:
    """Write every byte: one call may take a part only. Raises: OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def write_whole(path: str | os.PathLike[str], data: bytes, *, private: bool = False) -> None:
    """Put data in place of what a file held: all of it, also after a power cut, or nothing.

    A new file gets the mode that the umask leaves, an old one keeps its own; a ``private`` one is this user's alone.
    The last file of a chain of links is replaced. What is no plain file (``/dev/stdout``, a pipe) is written to.
    Raises: OSError that names this file.
    """
    with _named(path):
        _write_whole(path, data, private=private)


def check_place(path: str | os.PathLike[str]) -> None:
    """Try whether :func:`write_whole` could write here, before there is anything to write.

    Raises: OSError that names this file, and is none of a disk that fills up meanwhile.
    """
    with _named(path):
        target, plain, _ = _target(path)
        if plain:
            file, temporary = _temporary(target)
            os.close(file)
            temporary.unlink()
        elif target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an error name the requested file, not the temporary one that is written."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error


def _target(path: str | os.PathLike[str]) -> tuple[Path, bool, int | None]:
    """The file that a path leads to, whether it is plain or does not exist, and its mode."""
    target = Path(os.path.realpath(path))
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  # links are followed, as they are by open
    except FileNotFoundError:
        return target, True, None
    return target, stat.S_ISREG(mode), stat.S_IMODE(mode)


def _temporary(target: Path) -> tuple[int, Path]:
    temporary = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}.tmp")
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAINLY, 0o666), temporary


def _write_whole(path: str | os.PathLike[str], data: bytes, *, private: bool) -> None:
    target, plain, mode = _target(path)
    if not plain:
        Path(path).write_bytes(data)
        return
    file, temporary = _temporary(target)
    try:
        try:
            if (private or mode is not None) and hasattr(os, "fchmod"):
                os.fchmod(file, PRIVATE_FILE if private or mode is None else mode)
            write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Make a rename in a folder survive a power cut as well, where a folder can be opened. Raises: OSError."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone. Raises: OSError."""
    if not folder.is_dir():
        if not folder.parent.is_dir():
            make_private(folder.parent)
        folder.mkdir(PRIVATE_FOLDER, exist_ok=True)


def no_place(folder: Path) -> str:
    """Why a folder cannot be written or made, as far as that is known without trying; else empty."""
    for place in (folder, *folder.parents):
        try:
            if place.is_dir():
                if not os.access(place, os.W_OK | os.X_OK):
                    return f"{'it' if place == folder else place} may not be written"
                return _full(place)
            if os.path.lexists(place):  # a link that leads nowhere is in the way, too
                return f"{place} is no folder"
        except OSError as error:
            return f"{place}: {error.strerror}"
    return ""


LITTLE_BYTES = 1 << 20
"""A disk with less room than this counts as full: a first table of times takes a tenth of it."""


def _full(folder: Path) -> str:
    """How little room the disk of a folder has, if that is next to nothing."""
    with suppress(AttributeError, OSError):  # another system, or a disk that does not tell
        found = os.statvfs(folder)
        left = found.f_bavail * found.f_frsize
        if found.f_blocks and left < LITTLE_BYTES:
            return f"its disk is full ({left / 1024:.0f} KiB left)"
    return ""


def distrust(folder: Path) -> str:
    """Why a folder is not to be trusted with what this process believes; empty if it is, or where there is none.

    It must belong to this user or to root, which may do anything anyway, and be writable by no other user: one could
    lift a ban there, or name a module that is imported. A group may write that is this user's own (of the user's
    number) or root's. Links to the folder itself are followed: their owner chose.
    """
    if not hasattr(os, "geteuid"):  # Windows: a mode says nothing of other users
        return ""
    try:
        found = os.stat(folder)  # noqa: PTH116  # read on each look: half the time of Path.stat
    except OSError:  # opening it tells
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to user {found.st_uid}, not to user {os.geteuid()} of this process"
    if found.st_mode & stat.S_IWOTH:
        return f"{folder} can be written by every user (mode {stat.S_IMODE(found.st_mode):o})"
    if found.st_mode & stat.S_IWGRP and found.st_gid and not found.st_gid == os.getegid() == os.geteuid():
        return f"{folder} can be written by group {found.st_gid} (mode {stat.S_IMODE(found.st_mode):o})"
    return ""
