"""A folder of records that many processes read and write at once.

A record is written beside its place and moved into it, so that nobody reads half of one. What cannot be read is set
aside; what cannot be written is said once, and the folder is left alone from then on.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec

from layerzero.core import forking
from layerzero.core.errors import LayerZeroWarning
from layerzero.engine import ending
from layerzero.tuning.keeping import records
from layerzero.tuning.keeping.records import RUNNING, Name, Record

_ASIDE = "set-aside"
_UNSETTLED_NS = 100_000_000
"""A folder that changed so shortly before it was listed may change again under the same time stamp."""

_MAX_SCANS = 8
"""How often a folder is listed whose markers keep going; the last list is then good enough."""


class RecordFolder:
    """The records in a folder; it is listed at the first question and made at the first record.

    Attributes:
        path: the folder.
        writable: whether writing has worked so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writable = True
        self._lock = forking.rlock()
        self._names: dict[str, dict[str, set[Name]]] = {}  # by kind, then by the slug of the kernel
        self._read: dict[Name, Record] = {}
        self._seen_ns = -1

    def has(self, slug: str, kind: str) -> bool:
        """Whether a kernel has any record of a kind: the quick answer, since most have none."""
        return bool(self._of(kind).get(slug))

    def slugs(self, *kinds: str) -> set[str]:
        """Kernels that may have a record of one of these kinds."""
        with self._lock:
            return {slug for kind in kinds for slug in self._of(kind)}

    def _of(self, kind: str) -> dict[str, set[Name]]:
        return self._names.get(kind, {})

    def load(self, name: Name) -> Record | None:
        """Read a record once; None if there is none, or none that can be trusted."""
        with self._lock:
            names = self._of(name.kind).get(name.slug, set())
            if name not in self._read and name in names:
                try:
                    record = self._trusted(self.path / name.file(), name)
                except FileNotFoundError:  # another process settled it
                    record = None
                if record is None:
                    names.discard(name)
                else:
                    self._read[name] = record
            return self._read.get(name)

    def all(self, *kinds: str) -> Iterator[tuple[Name, Record]]:
        """Every record of these kinds."""
        with self._lock:
            names = sorted((name for kind in kinds for each in self._of(kind).values() for name in each), key=Name.file)
        for name in names:
            record = self.load(name)
            if record is not None:
                yield name, record

    def changed(self) -> bool:
        """Whether anybody, this process included, may have written since the folder was listed."""
        try:
            return self.path.stat().st_mtime_ns != self._seen_ns
        except OSError:  # not there yet, or no more
            return self._seen_ns != -1

    def of(self, slug: str, kind: str) -> list[Record]:
        """Every record of a kernel and kind."""
        with self._lock:
            names = sorted(self._of(kind).get(slug, ()), key=Name.file)
        return [record for name in names if (record := self.load(name)) is not None]

    def names(self, *kinds: str) -> frozenset[Name]:
        """What is known to be there of these kinds."""
        with self._lock:
            return frozenset(name for kind in kinds for each in self._of(kind).values() for name in each)

    def scan(self) -> list[tuple[Path, Record]]:
        """List the folder anew; return the markers that dead processes left, and what they say.

        A marker that goes while it is looked at was proved, or became another process's suspect: the folder is listed
        once more, since what took its place may not have been in the list.
        """
        with self._lock:
            self._seen_ns = self._stamp_ns()
            for _ in range(_MAX_SCANS):
                left, complete = self._scan()
                if complete:
                    break
            return left

    def _stamp_ns(self) -> int:
        """When the folder last changed, -1 if that is too fresh to tell later changes from it."""
        try:
            stamp = self.path.stat().st_mtime_ns
        except OSError:
            return -1
        return stamp if time.time_ns() - stamp > _UNSETTLED_NS else -1

    def _scan(self) -> tuple[list[tuple[Path, Record]], bool]:
        """List the folder; also tell whether every marker was still there when it was looked at."""
        self._names, self._read = {}, {}
        left, complete = [], True
        for entry in self._entries():
            name = records.name_of(entry.name)
            if name is not None and name.kind != RUNNING:
                self._names.setdefault(name.kind, {}).setdefault(name.slug, set()).add(name)
            elif name is not None:
                try:
                    record = self._left_behind(entry, name)
                except FileNotFoundError:
                    record, complete = None, False
                left += [(entry, record)] if record is not None else []
            elif entry.suffix == ".tmp":
                self._sweep(entry)
            elif entry.name != _ASIDE:
                self._set_aside(entry)
        return left, complete

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            self._give_up(error)
            return []

    def _left_behind(self, path: Path, name: Name) -> Record | None:
        """The record of a marker that no process holds. Raises: FileNotFoundError if it is there no more.

        The lock that looks is shared: those that look at once do not take each other for its owner.
        """
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:  # another user's: theirs to judge
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if ending.from_outside(path):  # a signal ended it, which is no kernel's doing
                path.unlink(missing_ok=True)
                return None
            return self._trusted(path, name)
        except BlockingIOError:  # held: that process lives
            return None
        finally:
            os.close(file)

    def _trusted(self, path: Path, name: Name) -> Record | None:
        """Read a record; set it aside if it is damaged. Raises: FileNotFoundError."""
        try:
            return records.read(path, name)
        except FileNotFoundError:
            raise
        except PermissionError:  # another user's, not a damaged one
            return None
        except (OSError, ValueError):
            self._set_aside(path)
            return None

    def _set_aside(self, path: Path) -> None:
        try:
            aside = self.path / _ASIDE
            aside.mkdir(exist_ok=True)
            path.replace(aside / path.name)
        except FileNotFoundError:  # another process was faster
            return
        except OSError as error:
            self._give_up(error)

    def _sweep(self, path: Path) -> None:
        """Remove a file that was being written when its writer died: one that lives holds its lock."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):  # renamed or swept meanwhile; another user's
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:  # its writer lives
            return
        finally:
            os.close(file)

    def aside(self) -> list[str]:
        """What was set aside, by this process or another."""
        try:
            return sorted(entry.name for entry in (self.path / _ASIDE).iterdir())
        except OSError:
            return []

    def put(self, record: Record, kind: str) -> None:
        """Write a record in place of what it was before; where nothing can be written, this process still knows."""
        name = Name(records.slug_of(record.kernel), record.key, kind)
        with self._lock:
            file = self.write(self.path / name.file(), record)
            if file is not None:
                os.close(file)
            self.known(name, record)

    def known(self, name: Name, record: Record | None = None) -> None:
        """Take note of a record that was written."""
        with self._lock:
            self._names.setdefault(name.kind, {}).setdefault(name.slug, set()).add(name)
            self._read.pop(name, None)
            if record is not None:
                self._read[name] = record

    def remove(self, name: Name) -> None:
        """Remove a record."""
        with self._lock:
            self._of(name.kind).get(name.slug, set()).discard(name)
            self._read.pop(name, None)
            self.move(self.path / name.file(), None)

    def write(self, path: Path, record: Record) -> int | None:
        """Commit a record to disk; return its open file, locked, or None where nothing can be written.

        The lock is held from before the file has its name until the file is closed, by whatever end of the process.
        """
        if not self.writable:
            return None
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary, file = self._locked()
            try:
                os.write(file, msgspec.json.encode(record))
                os.fsync(file)
                temporary.replace(path)
                _sync_folder(self.path)
            except OSError:
                os.close(file)
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            self._give_up(error)
            return None
        return file

    def _locked(self) -> tuple[Path, int]:
        """A new file to write, locked, and still in the folder: one swept before it was locked is made again."""
        while True:
            temporary = self.path / f"{uuid.uuid4().hex}.tmp"
            file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return temporary, file
            os.close(file)

    def move(self, path: Path, target: Path | None) -> None:
        """Rename a file, or remove it."""
        try:
            if target is None:
                path.unlink(missing_ok=True)
            else:
                path.replace(target)
        except FileNotFoundError:  # somebody emptied the folder: nothing is left to rename
            return
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Say once that nothing will be kept."""
        if self.writable:
            self.writable = False
            warnings.warn(
                f"{self.path}: {error.strerror or error}; what is learnt about kernels ends with this process. Set "
                "LAYERZERO_CACHE_DIR to a folder that can be written, or to nothing to keep no files.",
                LayerZeroWarning,
                stacklevel=2,
            )


def _sync_folder(path: Path) -> None:
    """Make a rename survive a power cut as well."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
