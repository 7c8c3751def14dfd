"""What this process knows of a folder of records: what lies on disk, and what it could not write or has seen go.

Reading does not depend on writing. A verdict or a suspicion that this process knows holds until another record says
otherwise: neither a disk that is full nor a folder that vanishes lifts a ban. One that is damaged leaves its kernel in
doubt, which the name of the file tells.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from layerzero.core.errors import LayerZeroWarning
from layerzero.core.ledger import Verdict
from layerzero.core.system import forking, warn
from layerzero.tuning.storage import records
from layerzero.tuning.storage.records import (
    ASIDE,
    CAPTURE,
    FAILURES,
    PROVED,
    RUNNING,
    SUSPECT,
    VERDICT,
    DamagedError,
    Name,
    Record,
    RecordFiles,
)

JUDGED = (SUSPECT, VERDICT)
"""Kinds that decide whether a kernel may run."""

_DECIDING = (*JUDGED, CAPTURE)
"""Those, and what decides whether a capture may have it."""

_DOUBTFUL = (*_DECIDING, RUNNING)
"""Kinds that may have been the reason why a kernel must not run, if they cannot be read."""

_MAX_SCANS = 8
"""How often a folder is listed whose markers keep going; the last list is then good enough."""

_MAX_FOREIGN = 64
"""Foreign files that are set aside at once: a folder full of them must not hold up a call."""

Identity = tuple[int, int, int]


class RecordFolder(RecordFiles):
    """The records in a folder; it is listed at the first question and made at the first record.

    Attributes:
        decided: changes with what decides about kernels: verdicts, suspicions, and what cannot be read of them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock = forking.rlock()
        self._names: dict[str, dict[str, set[Name]]] = {}  # by kind, then by the slug of the kernel
        self._parsed: dict[str, Name] = {}  # files of the last list, but markers
        self._read: dict[Name, Record] = {}
        self._identity: dict[Name, Identity | None] = {}
        self._unwritten: dict[Name, Record] = {}
        self._lifted: dict[Name, Identity | None] = {}  # settled here, but their files could not be removed
        self._gone: set[Name] = set()  # bans whose files vanished
        self._doubted: dict[str, dict[Name, str]] = {}  # by slug: what cannot be read, and why
        self._seen_ns = -1
        self._doubted_once = False
        self.decided = 0

    def has(self, slug: str, kind: str) -> bool:
        """Whether a kernel has any record of a kind: the quick answer, since most have none."""
        return bool(self._of(kind).get(slug))

    def slugs(self) -> set[str]:
        """Kernels that may have a verdict or a suspicion, or of which it is not known any more."""
        with self._lock:
            return {slug for kind in JUDGED for slug, names in self._of(kind).items() if names} | {*self._doubted}

    def doubts(self, slug: str) -> dict[Name, str]:
        """Records of a kernel that cannot be read, and may have been bans; with what is wrong with them."""
        return dict(self._doubted.get(slug, {}))

    def all_doubts(self) -> dict[Name, str]:
        """The same of every kernel."""
        with self._lock:
            return {name: why for doubts in self._doubted.values() for name, why in doubts.items()}

    def _of(self, kind: str) -> dict[str, set[Name]]:
        return self._names.get(kind, {})

    def load(self, name: Name) -> Record | None:
        """Read a record once; None if there is none, or none that can be trusted."""
        found = self._read.get(name)
        if found is not None:
            return found
        with self._lock:
            if name not in self._of(name.kind).get(name.slug, ()):
                return None
            try:
                record = self.read(self.path / name.file(), name)
            except FileNotFoundError:  # another process settled it
                self._forget(name)
                return None
            except DamagedError as error:
                self._damaged(name, name.file(), str(error))
                return None
            except OSError as error:  # no more files may be opened, say: it is read again
                self._doubt(name, f"it cannot be read: {error.strerror}")
                return None
            if self.refused and record.verdict is Verdict.PASSED:  # it would let a kernel run
                self._forget(name)
                return None
            self._read[name] = record
            self._trust(name)
            return record

    def _damaged(self, name: Name, file: str, why: str) -> None:
        place = self.path / file
        if self.set_aside(file):
            self._forget(name)
            self._parsed.pop(file, None)
            place = self.path / ASIDE / file
        self._doubt(name, f"it is damaged ({why}), and lies in {place}")

    def _doubt(self, name: Name, why: str) -> None:
        if name.kind not in _DOUBTFUL:
            return
        doubts = self._doubted.setdefault(name.slug, {})
        self.decided += name not in doubts
        doubts[name] = why
        if not self._doubted_once:
            self._doubted_once = True
            text = f"{self.path / name.file()}: {why}; it may have been a ban, so {records.kernel_of(name)} is refused"
            warn(f"{text}. `layerzero doctor` tells what lifts it", LayerZeroWarning, stacklevel=2)

    def _trust(self, name: Name) -> None:
        doubts = self._doubted.get(name.slug)
        if doubts and doubts.pop(name, None) is not None:
            self.decided += 1
            if not doubts:
                del self._doubted[name.slug]

    def _forget(self, name: Name) -> None:
        known = self._of(name.kind)
        self.decided += name.kind in _DECIDING and name in known.get(name.slug, ())
        known.get(name.slug, set()).discard(name)
        if not known.get(name.slug, True):
            del known[name.slug]
        self._read.pop(name, None)
        self._identity.pop(name, None)
        self._gone.discard(name)

    def all(self, *kinds: str) -> Iterator[tuple[Name, Record]]:
        """Every record of these kinds."""
        with self._lock:
            names = sorted((name for kind in kinds for each in self._of(kind).values() for name in each), key=Name.file)
        for name in names:
            record = self.load(name)
            if record is not None:
                yield name, record

    def of(self, slug: str, kind: str) -> list[Record]:
        """Every record of a kernel and kind."""
        with self._lock:
            names = list(self._of(kind).get(slug, ()))
        return [record for name in names if (record := self.load(name)) is not None]

    # listing

    def changed(self) -> bool:
        """Whether any process, this one included, may have written since the folder was listed."""
        return self.changed_ns() != self._seen_ns

    def scan(self) -> list[tuple[Path, Record]]:
        """List the folder anew; return the markers that dead processes left, and what they say.

        A marker that goes while it is looked at was proved, or became another process's suspect: the folder is listed
        once more, since what took its place may not have been in the list.
        """
        with self._lock:
            left: list[tuple[Path, Record]] = []
            self._seen_ns = self.stamp_ns()
            for _ in range(_MAX_SCANS):
                refused = self.refused
                files = self.listed()
                if refused and not self.refused:  # what did not count is looked at again
                    self._parsed.clear()
                if files is None:  # what was known stays so
                    self._seen_ns = -1
                    break
                left, complete = self._scan(files)
                if complete:
                    break
            return left

    def _scan(self, files: set[str]) -> tuple[list[tuple[Path, Record]], bool]:
        """Take in a list; also tell whether every marker was still there when it was looked at."""
        left: list[tuple[Path, Record]] = []
        complete, foreign = True, 0
        self._doubt_aside(files)
        for file in sorted(files - self._parsed.keys()):
            name = records.name_of(file)
            if name is None:
                foreign += self._foreign(file, foreign)
            elif name.kind != RUNNING:
                self._parsed[file] = name
                self._names.setdefault(name.kind, {}).setdefault(name.slug, set()).add(name)
                self._gone.discard(name)
            else:
                try:
                    record = self._left_behind(file, name)
                except FileNotFoundError:
                    record, complete = None, False
                left += [(self.path / file, record)] if record is not None else []
        vanished = [self._parsed.pop(file) for file in self._parsed.keys() - files]
        for name in {*vanished, *self._gone}:
            self._vanished(name)
        for name in [name for name in self._read if name.kind == FAILURES]:
            del self._read[name]
        for name in [name for kind in _DECIDING for each in self._of(kind).values() for name in each]:
            self._look_at(name)
        return left, complete

    def _look_at(self, name: Name) -> None:
        """Read a verdict or a suspicion again if its file is another one than it was."""
        identity = self.identity(name)
        if name in self._lifted and identity == self._lifted[name]:
            self._forget(name)
        elif identity != self._identity.get(name) and name not in self._gone and name not in self._unwritten:
            self._read.pop(name, None)
            self._identity[name] = identity
            self.decided += 1

    def _vanished(self, name: Name) -> None:
        """Forget a record whose file is there no more, unless it is a ban and nothing says that it was lifted."""
        record = self._read.get(name)
        bad = name.kind in _DECIDING and record is not None and record.verdict is not Verdict.PASSED
        if bad and name not in self._unwritten and not self._settled(name):
            self._gone.add(name)
        elif name not in self._unwritten:
            self._forget(name)

    def _settled(self, name: Name) -> bool:
        kinds = (PROVED, VERDICT) if name.kind == SUSPECT else (PROVED,)
        others = [msgspec.structs.replace(name, kind=kind) for kind in kinds]
        return any(each in self._of(each.kind).get(name.slug, ()) and each not in self._gone for each in others)

    def _doubt_aside(self, files: set[str]) -> None:
        """Doubt what was set aside because it was damaged, whichever process did that; trust what is there no more."""
        aside = {records.name_of(file): file for file in (self.aside() if ASIDE in files else [])}
        for name in [name for name in self.all_doubts() if name not in aside and name.file() not in files]:
            self._trust(name)
        for judged, file in aside.items():
            if judged is not None and judged not in self._doubted.get(judged.slug, {}):
                self._doubt(judged, f"it is damaged, and lies in {self.path / ASIDE / file}")

    def _foreign(self, file: str, before: int) -> bool:
        """Get a file out of the way that is no record; whether that took any work."""
        if file.endswith(".tmp"):
            self.sweep(file)
        elif file != ASIDE and before < _MAX_FOREIGN:
            return self.set_aside(file)
        return False

    def _left_behind(self, file: str, name: Name) -> Record | None:
        """The record of a marker that no process holds. Raises: FileNotFoundError if it is there no more."""
        try:
            if self.is_held(self.path / file):
                return None
            return self.read(self.path / file, name)
        except DamagedError as error:
            self._damaged(name, file, str(error))
        except FileNotFoundError:
            raise
        except OSError as error:
            self._doubt(name, f"it cannot be read: {error.strerror}")
        return None

    # writing

    def put(self, record: Record, kind: str) -> None:
        """Write a record in place of what it was before; where nothing can be written, this process still knows."""
        name = Name(records.slug_of(record.kernel), record.key, kind)
        with self._lock:
            self._unwritten[name] = record
            self._lifted.pop(name, None)
            self.known(name, record)
            self._write(name, record)
            if kind in (VERDICT, PROVED, CAPTURE):
                self._clear(name)

    def _write(self, name: Name, record: Record) -> None:
        file = self.write(self.path / name.file(), record)
        if file is None:
            return
        found = os.fstat(file)
        os.close(file)
        del self._unwritten[name]
        self._parsed[name.file()] = name
        self._identity[name] = (found.st_ino, found.st_mtime_ns, found.st_size)

    def _clear(self, name: Name) -> None:
        """A kernel was asked again about a class: what was damaged about it is of no interest any more."""
        for file in self.aside():
            other = records.name_of(file)
            if other is None or (other.slug, other.key) != (name.slug, name.key):
                continue
            decided = name.kind == VERDICT or other.kind != VERDICT
            if decided and self.move(self.path / ASIDE / file, None):
                self._trust(other)

    def retry(self) -> None:
        """Write what could not be written, unless another process knows better by now."""
        with self._lock:
            for name, record in list(self._unwritten.items() if self.writable else ()):
                try:
                    newer = self.read(self.path / name.file(), name).at_unix_s > record.at_unix_s
                except (OSError, DamagedError):
                    newer = False
                if newer:
                    del self._unwritten[name]
                    self._read.pop(name, None)
                else:
                    self._write(name, record)

    def known(self, name: Name, record: Record | None = None) -> None:
        """Take note of a record that was written."""
        with self._lock:
            self._names.setdefault(name.kind, {}).setdefault(name.slug, set()).add(name)
            self._gone.discard(name)
            self._read.pop(name, None)
            self.decided += name.kind in _DECIDING
            if record is not None:
                self._read[name] = record

    def remove(self, name: Name) -> None:
        """Remove a record; where that cannot be, this process still knows that it holds no more."""
        with self._lock:
            if not self.move(self.path / name.file(), None):
                self._lifted[name] = self.identity(name)
            self._parsed.pop(name.file(), None)
            self._unwritten.pop(name, None)
            self._forget(name)

    def waits(self) -> int:
        """How many records could not be written so far."""
        return len(self._unwritten)
