"""The files of a folder of records, as many processes read and write them at once.

A record is written beside its place and moved into it, so that nobody reads half of one. Nothing here waits: not for a
pipe, not for a lock that a paused process holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
import warnings
from pathlib import Path

from layerzero.core.errors import LayerZeroWarning
from layerzero.core.system import disk
from layerzero.engine import process_end
from layerzero.tuning.keeping import records
from layerzero.tuning.keeping.records import Name, Record

ASIDE = "set-aside"

RETRY_S = 5.0
"""How long a folder that could not be written is left alone."""

_DAMAGE = frozenset({errno.EFBIG, errno.EIO})
"""Errors of reading that say something about the file, not about this process or the moment."""

_UNSETTLED_NS = 100_000_000
"""A folder that changed so shortly before it was listed may change again under the same time stamp."""


ONLY_BANS = (
    "of it bans alone count, which can only refuse kernels; nothing else is read or written there, and what is learnt "
    "about kernels ends with the process"
)
"""What is done with a folder that is not trusted."""


def _judges(file: str) -> bool:
    """Whether a file is a verdict or a suspicion by its name."""
    name = records.name_of(file)
    return name is not None and name.kind in (records.SUSPECT, records.VERDICT)


class DamagedError(Exception):
    """A file whose content is not what its name says, or that is no plain file."""


class RecordFiles:
    """Reads, writes and lists one folder; what cannot be written is said once and tried again later.

    Attributes:
        path: the folder; it is made at the first record.
        problem: why it could not be written at the last attempt; empty after one that worked.
        refused: why it is not trusted; then nothing of it counts but bans, and nothing is written there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._prefix = f"{path}{os.sep}"
        self.problem = self.refused = ""
        self._retry_at = 0.0
        self._warned: set[str] = set()

    @property
    def writable(self) -> bool:
        """Whether writing may work, as far as is known."""
        return not self.refused and (not self.problem or time.monotonic() >= self._retry_at)

    # reading

    def listed(self) -> set[str] | None:
        """Names of all files; None where they cannot be listed now."""
        self.refused = disk.distrust(self.path.parent) or disk.distrust(self.path)
        if self.refused:
            self._warn(
                "refused",
                f"{self.refused}; {ONLY_BANS}. Name a folder of your own in LAYERZERO_CACHE_DIR, which LayerZero makes "
                "for you alone",
            )
        try:
            found = set(os.listdir(self.path))  # noqa: PTH208  # names only: a third of the time for 30,000
            return {file for file in found if _judges(file)} if self.refused else found
        except (FileNotFoundError, NotADirectoryError):
            return set()
        except OSError as error:
            self._warn("list", f"{self.path} cannot be read ({error.strerror}): bans that lie there cannot be seen")
            return None

    def stamp_ns(self) -> int:
        """When the folder last changed, -1 if that is too fresh to tell later changes from it."""
        stamp = self.changed_ns()
        return stamp if time.time_ns() - stamp > _UNSETTLED_NS else -1

    def changed_ns(self) -> int:
        """When anybody last changed the folder, or what was set aside in it; -1 where there is none."""
        try:
            stamp = os.stat(self.path).st_mtime_ns  # noqa: PTH116  # once a second, and on misses
        except OSError:
            return -1
        try:
            return max(stamp, os.stat(self.path / ASIDE).st_mtime_ns)  # noqa: PTH116
        except OSError:
            return stamp

    def identity(self, name: Name) -> tuple[int, int, int] | None:
        """What changes when another process replaces a record."""
        try:
            found = os.lstat(f"{self._prefix}{name.file()}")
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self, path: Path, name: Name) -> Record:
        """Read a record. Raises: FileNotFoundError, DamagedError, OSError where it cannot be read now."""
        try:
            return records.read(path, name)
        except FileNotFoundError:
            raise
        except (disk.NotPlainError, ValueError, RecursionError) as error:
            raise DamagedError(str(error)) from error
        except OSError as error:
            if error.errno in _DAMAGE:
                raise DamagedError(str(error)) from error
            raise

    def is_held(self, path: Path) -> bool:
        """Whether the process that wrote a file lives: it holds its lock. Raises: FileNotFoundError, DamagedError.

        The lock that looks is shared: those that look at once do not take each other for its owner.
        """
        try:
            file = disk.open_plain(path)
        except FileNotFoundError:
            raise
        except disk.NotPlainError as error:
            raise DamagedError(str(error)) from error
        except OSError:  # another user's: theirs to judge
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if process_end.from_outside(path):  # a signal ended it, which is no kernel's doing
                path.unlink(missing_ok=True)
                return True
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    # writing

    def write(self, path: Path, record: Record) -> int | None:
        """Commit a record to disk; return its open file, locked, or None where nothing can be written.

        The lock is held from before the file has its name until the file is closed, by whatever end of the process.
        """
        if not self.writable:
            return None
        try:
            disk.make_private(self.path)
            self.refused = disk.distrust(self.path.parent) or disk.distrust(self.path)
            if self.refused:
                self.listed()  # says so
                return None
            temporary, file = self._locked()
            try:
                disk.write_all(file, record.sealed())
                os.fsync(file)
                temporary.replace(path)
                disk.sync_folder(self.path)
            except BaseException:
                os.close(file)
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            self._cannot(error)
            return None
        self.problem = ""
        return file

    def _locked(self) -> tuple[Path, int]:
        """A new file to write, locked, and still in the folder: one swept before it was locked is made again."""
        while True:
            temporary = self.path / f"{uuid.uuid4().hex}.tmp"
            file = disk.open_plain(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_nlink:
                    return temporary, file
            except BlockingIOError:  # somebody sweeps it just now
                pass
            os.close(file)

    def move(self, path: Path, target: Path | None) -> bool:
        """Rename a file, or remove it; whether that worked."""
        if self.refused:
            return False
        try:
            if target is None:
                path.unlink(missing_ok=True)
            else:
                path.replace(target)
        except FileNotFoundError:  # somebody emptied the folder: nothing is left to rename
            return True
        except OSError as error:
            self._cannot(error)
            return False
        return True

    def set_aside(self, file: str) -> bool:
        """Move a file out of the way; whether that worked."""
        aside = self.path / ASIDE
        if self.refused:
            return False
        try:
            aside.mkdir(disk.PRIVATE_FOLDER, exist_ok=True)
        except OSError as error:
            self._cannot(error)
            return False
        return self.move(self.path / file, aside / file)

    def aside(self) -> list[str]:
        """What was set aside, by this process or another."""
        try:
            return sorted(os.listdir(self.path / ASIDE))  # noqa: PTH208  # as above
        except OSError:
            return []

    def sweep(self, file: str) -> None:
        """Remove a file that was being written when its writer died: one that lives holds its lock."""
        path = self.path / file
        try:
            found = disk.open_plain(path)
        except disk.NotPlainError:
            self.set_aside(file)
            return
        except OSError:  # renamed or swept meanwhile; another user's
            return
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:  # its writer lives
            return
        finally:
            os.close(found)

    def _cannot(self, error: OSError) -> None:
        """Rest for a while, and say once that nothing is kept meanwhile."""
        self.problem = error.strerror or str(error)
        self._retry_at = time.monotonic() + RETRY_S
        self._warn(
            "write",
            f"{self.path}: {self.problem}; what is learnt about kernels ends with this process. Set "
            "LAYERZERO_CACHE_DIR to a folder that can be written, or to nothing to keep no files.",
        )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, LayerZeroWarning, stacklevel=2)
