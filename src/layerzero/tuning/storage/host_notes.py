"""What builds and plugins leave for every process of the host: failed builds, the one that runs, plugins that end one.

All are files in the cache folder.

A build that failed is not tried again until its library or torch has another version, or another compiler lies here,
as where it lacked one: the file's name says which. One process of a host builds at a time; it holds the lock of a file,
and writes into it how far it is.

Plugins that are imported have files, too: one that ends its process is known by name to the next one.

A marker is locked for as long as its process lives, as those of first runs are; one that no process holds was left by
the dead. It stays where it is and keeps its plugin out, until :func:`forgive` takes it away.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import msgspec

from layerzero.core.errors import printable
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import class_text
from layerzero.core.system import disk
from layerzero.engine import first_run
from layerzero.engine.jit import name_of
from layerzero.tuning.storage.files import cache_folder

FOLDER, LOCK = "builds-1", "building.lock"

MOST_BYTES = 1 << 20

MOST_COLUMNS = 300
"""Of a line that a compiler says."""

_COMPILERS = (
    ("CC", ("cc", "gcc", "clang")),
    ("CXX", ("c++", "g++", "clang++")),
    ("CUDACXX", ("nvcc",)),
    ("", ("ninja",)),
)
"""Variables that name a compiler, and all that libraries look for without them; ninja has none."""

_TOOLKITS = "CUDA_HOME", "CUDA_PATH"
"""Variables that name the folder of nvcc, which need not be on the path."""

KNOWN_S = 5.0
"""How long compilers count as those that were found: each search takes 0.2 ms, and each call that waits asks."""


class FailedBuild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A build that failed: its kernel, the class of calls it was for, when, and the telling lines of what was said.

    ``compilers`` are those that lay here; among others it is tried again.
    """

    kernel: str
    call_class: str
    at_unix_s: float
    log: str
    compilers: str = ""

    @property
    def gist(self) -> str:
        """The last line that speaks of an error, or else the last one: compilers end with other things."""
        lines = [line.strip() for line in self.log.strip().splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        return shortened((errors or lines or ["no message"])[-1])

    def __str__(self) -> str:
        return f"{self.kernel} did not build for {self.call_class}: {self.log}"


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far the process is that builds on this host."""

    process: int
    since_unix_s: float
    building: list[str]
    waiting: int

    def __str__(self) -> str:
        names = ", ".join(self.building) or "nothing at this moment"
        seconds = max(0.0, time.time() - self.since_unix_s)
        return f"process {self.process} builds {names} since {seconds:.0f} s; {self.waiting} calls wait"


def shortened(line: str) -> str:
    """A line that says it is cut: compilers print their whole input in one."""
    return line if len(line) <= MOST_COLUMNS else f"{line[: MOST_COLUMNS - 1]}…"


def compilers() -> str:
    """What would compile here: where it lies, and when it was changed; where this failed, another may succeed.

    A process that runs for weeks sees what is installed meanwhile.
    """
    return _compilers(int(time.monotonic() / KNOWN_S))


@functools.lru_cache(1)
def _compilers(_while: int) -> str:
    names: list[str] = []
    for variable, usual in _COMPILERS:
        named = os.environ.get(variable)
        names += [named] if named else usual
    names += [str(Path(home, "bin", "nvcc")) for each in _TOOLKITS if (home := os.environ.get(each))]
    found = []
    for name in names:
        path = shutil.which(name)
        found.append(f"{path} {os.stat(path).st_mtime_ns}" if path else f"no {name}")  # noqa: PTH116  # links are followed
    return "; ".join(found)


class Failures:
    """What did not build, in this process and, where there is a cache folder, in every other one."""

    def __init__(self) -> None:
        self._here: dict[str, FailedBuild] = {}

    def of(self, kernel: Kernel, facts: Facts) -> FailedBuild | None:
        """Why a kernel does not build for calls like these, if it failed before."""
        name, folder = _name(kernel, facts), _folder()
        if name in self._here or folder is None:
            return self._here.get(name)
        return disk.read_json(folder / name, MOST_BYTES, FailedBuild)  # a damaged one is tried again

    def add(self, kernel: Kernel, facts: Facts, log: str, *, lasting: bool) -> FailedBuild:
        """Remember a failure: in this process, and where it lasts for later ones."""
        found = FailedBuild(kernel.id, class_text(facts), time.time(), printable(log), compilers())
        name, folder = _name(kernel, facts), _folder()
        self._here[name] = found
        if lasting and folder is not None:
            try:
                disk.make_private(folder)
                disk.write_whole(folder / name, msgspec.json.encode(found), private=True)
            except OSError:  # it is known in this process; the ledger tells of a folder that cannot be written
                return found
        return found

    def forget(self, kernel: Kernel, facts: Facts) -> None:
        """It was built after all."""
        name, folder = _name(kernel, facts), _folder()
        self._here.pop(name, None)
        if folder is not None:
            try:
                (folder / name).unlink(missing_ok=True)
            except OSError:
                return

    def all(self) -> tuple[FailedBuild, ...]:
        """Every one that is known, for whatever versions; not what failed for want of a compiler that is here now."""
        folder = _folder()
        found = dict(self._here)
        if folder is not None and os.path.isdir(folder):  # noqa: PTH112  # Path's raises where nothing may be read
            for path in sorted(folder.glob("*.json")):
                read = disk.read_json(path, MOST_BYTES, FailedBuild)
                if read is not None:
                    found.setdefault(path.name, read)
        return tuple(found[name] for name in sorted(found) if found[name].compilers == compilers())

    def clear(self) -> None:
        self._here.clear()


def _name(kernel: Kernel, facts: Facts) -> str:
    return f"{name_of(kernel, facts, compilers())}.json"


def _folder() -> Path | None:
    folder = cache_folder()
    return None if folder is None or disk.distrust(folder) else folder / FOLDER


class HostLock:
    """The right to build on this host."""

    def __init__(self) -> None:
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def take(self) -> bool:
        """Take it unless another process has it; where no file can be opened or locked, none can have it."""
        if self._file is not None or not disk.HAS_LOCKS:
            return True
        try:
            file = disk.open_plain(_lock_path(), os.O_RDWR | os.O_CREAT)
        except OSError:
            return True
        with contextlib.suppress(OSError):
            if disk.lock(file):
                self._file = file
                return True
        os.close(file)
        return False

    def tell(self, building: list[str], waiting: int) -> None:
        """Write down how far this process is, for others to read."""
        if self._file is not None:
            text = msgspec.json.encode(Progress(os.getpid(), time.time(), building, waiting))
            try:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, text, 0)
            except OSError:  # a full disk: how far it is stays unknown
                return

    def leave(self) -> None:
        """Let others build."""
        if self._file is not None:
            disk.unlock(self._file)
        self.close()

    def close(self) -> None:
        """Have nothing to do with it, as in a forked child: the lock is its parent's."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


def progress_of_others() -> Progress | None:
    """How far another process is that builds on this host; None where none does."""
    lock = HostLock()
    if lock.take():
        lock.leave()
        return None
    return disk.read_json(_lock_path(), MOST_BYTES, Progress)  # None as well where it has just begun, or ended


def _lock_path() -> Path:
    """In the cache folder, or among temporary files where there is none that can be written."""
    folder = cache_folder()
    if folder is not None and not disk.distrust(folder):
        try:
            disk.make_private(folder)
        except OSError:
            folder = None
        if folder is not None and os.access(folder, os.W_OK):
            return folder / LOCK
    return Path(tempfile.gettempdir()) / f"layerzero-{os.getuid()}-{LOCK}"


_FOLDER = "plugins"


def _stem(plugin: str, version: str) -> str:
    return f"{quote(plugin, safe='')[:120]}@{hashlib.sha256(version.encode()).hexdigest()[:24]}"


@contextmanager
def importing(folder: Path, plugin: str, version: str) -> Iterator[str]:
    """Mark an import; gives how an earlier process ended in one of the same version, empty where none did.

    Where nothing can be written, nothing is remembered, and the import goes on.
    """
    place = folder / _FOLDER
    if disk.distrust(folder) or disk.distrust(place):  # the keeper of records says so
        yield ""
        return
    before = _left(place, _stem(plugin, version))
    marker = None if before else _marked(place, _stem(plugin, version))
    if marker is None:
        yield f"it ended {'; '.join(text for _, text in before)}; `layerzero doctor` tries it again" if before else ""
        return
    path, file = marker
    first_run.begin(file)
    try:
        yield ""
    finally:
        path.unlink(missing_ok=True)
        first_run.end(file)
        os.close(file)


def forgive(folder: Path, plugin: str, version: str) -> None:
    """Forget what a plugin did: it was seen to survive its import."""
    for path, _ in _left(folder / _FOLDER, _stem(plugin, version)):
        path.unlink(missing_ok=True)


def _marked(place: Path, stem: str) -> tuple[Path, int] | None:
    """A new marker with its open file, locked before it has its name."""
    path = place / f"{stem}.{uuid.uuid4().hex}"
    said = f"process {os.getpid()} ({datetime.now(UTC):%Y-%m-%d %H:%M UTC})\n{first_run.so_far()}\n"
    try:
        disk.make_private(place)
        return path, disk.write_locked(path, said.encode())
    except OSError:  # the keeper of records says once that nothing can be written
        return None


def _left(place: Path, stem: str) -> list[tuple[Path, str]]:
    """The markers that dead processes left, with what they say; those that a signal from outside ended go."""
    found = []
    for path in sorted(place.glob(f"{stem}.*")) if place.is_dir() else ():
        with suppress(OSError):  # gone meanwhile, another user's, or no plain file
            if not disk.is_locked(path):
                if first_run.from_outside(path):
                    path.unlink(missing_ok=True)
                else:
                    said = disk.read_plain(path, first_run.MOST_BYTES).decode(errors="replace")
                    found.append((path, said.partition("\n")[0]))
    return found
