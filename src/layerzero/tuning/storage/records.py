"""What lies on disk about one kernel and one class of calls: a JSON document whose name follows from what it says.

Many processes read and write such files at once. One is written next to its place and moved into it, so that nothing
reads half of it. Nothing here waits: not for a pipe, not for a lock that a paused process holds.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
import sys
import time
from pathlib import Path
from urllib.parse import quote, unquote
from zlib import crc32

import msgspec

from layerzero.core.device import Device
from layerzero.core.errors import LayerZeroWarning, printable
from layerzero.core.facts import Facts
from layerzero.core.ledger import Verdict, capture_text, work_text
from layerzero.core.recipe import CallRecipe
from layerzero.core.system import disk, warn
from layerzero.engine import first_run

FORMAT = 1

MAX_BYTES = 1 << 20
"""No record is larger."""

PROVED, SUSPECT, VERDICT, FAILURES, RUNNING = "proved", "suspect", "verdict", "failures", "running"
CAPTURE, WORKSPACE = "capture", "workspace"

_KINDS = frozenset({PROVED, SUSPECT, VERDICT, FAILURES, RUNNING, CAPTURE, WORKSPACE})

_NAME = re.compile(r"^(?P<slug>[^@/]{1,120})@(?P<key>[0-9a-f]{24})\.(?P<kind>[a-z]+)(?:-[0-9a-f]{32})?\.json$")


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a record holds for; where any of it differs, the record says nothing."""

    library: str
    torch: str
    device: str
    capability: str


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that is remembered.

    Attributes:
        format: version of this document.
        kernel, what: the kernel, and the class of calls, or (of failures) the operation, or the very work.
        versions: what it holds for.
        at_unix_s, process: when and by which process it was written, for people.
        call, module: how a child makes the call again.
        text: why it is a suspect, what a child said, why a capture may not have it, or what a kernel took: bytes, and
            the elements of the call.
        verdict: what a child found.
        errors: what the kernel raised, oldest first.
        check: checksum of the rest.
    """

    format: int
    kernel: str
    what: str
    versions: Versions
    at_unix_s: float
    process: int
    call: CallRecipe | None = None
    module: str = ""
    text: str = ""
    verdict: Verdict | None = None
    errors: list[str] = []
    check: str = ""

    def sealed(self) -> bytes:
        """What is written: the record as JSON, its checksum last."""
        said = {"text": printable(self.text), "errors": list(map(printable, self.errors))}
        data = msgspec.json.encode(msgspec.structs.replace(self, check="", **said))
        return data[:-2] + b'%08x"}' % crc32(data)

    @property
    def key(self) -> str:
        """What its file is named after."""
        return key_of(self.kernel, self.what, self.versions)


class Name(msgspec.Struct, frozen=True):
    """The parts of a file's name: the kernel, the record's key, and what it is about."""

    slug: str
    key: str
    kind: str

    def file(self, nonce: str = "") -> str:
        """Write the name; markers have a nonce, since several processes may run a class for the first time."""
        return f"{self.slug}@{self.key}.{self.kind}{f'-{nonce}' if nonce else ''}.json"


def name_of(file: str) -> Name | None:
    """Read a file's name; None if no record is called that."""
    match = _NAME.match(file)
    if match is None or match["kind"] not in _KINDS:
        return None
    return Name(match["slug"], match["key"], match["kind"])


@functools.lru_cache(maxsize=4096)
def slug_of(kernel_id: str) -> str:
    """A kernel's id as a part of a file's name."""
    return quote(kernel_id, safe="")[:120]


def kernel_of(name: Name) -> str:
    """The id of the kernel that a file is about, as far as its name holds it."""
    return unquote(name.slug)


def key_of(kernel_id: str, what: str, versions: Versions) -> str:
    """The identity of a record."""
    return hashlib.sha256(msgspec.json.encode([kernel_id, what, versions])).hexdigest()[:24]


def may_ban(name: Name, key: str) -> bool:
    """Whether a record that cannot be read may be why a kernel must not run a class, which ``key`` is of.

    A verdict may have been a wrong result, which counts for every class; a suspicion is about its own.
    """
    return name.kind == VERDICT or name.key == key


def lifting(name: Name, why: str) -> str:
    """What a record that cannot be read means, and what lifts it."""
    kernel, graph = kernel_of(name), "--graph " if name.kind == CAPTURE else ""
    calls = "every call" if name.kind == VERDICT else "captures of its class" if graph else "calls of its class"
    out = f"`layerzero vet {graph}--kernel {kernel} --again` for the same class, or removing that file"
    return f"{why}; {kernel} is refused for {calls} until {out}"


@functools.lru_cache(maxsize=256)
def source_of(module: str) -> str:
    """A hash of a module's file, as it was when first needed; empty for a module that has none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return f"source-{hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]}" if file else ""
    except OSError:  # it was imported from an archive, or is there no more
        return ""


def read(path: Path, name: Name) -> Record:
    """Read a record. Raises: ValueError if it is damaged, of another format, or not what its name says; OSError."""
    try:
        data = disk.read_plain(path, MAX_BYTES)
        record = msgspec.json.decode(data, type=Record)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if record.check != f"{crc32(data[:-10] + data[-2:]):08x}":
        raise ValueError("its content is not what was written")
    if record.format != FORMAT or slug_of(record.kernel) != name.slug or record.key != name.key:
        raise ValueError("its content is not what its name says")
    return record


def captures_of(facts: Facts) -> tuple[str, str]:
    """What records of captures are about: a call's very work, and its class; and whose adapter ran in the capture.

    Another LayerZero may well capture what this one could not.
    """
    from layerzero import __version__

    return f"{work_text(facts)} by {__version__}", f"{capture_text(facts)} by {__version__}"


def capability_of(device: Device) -> str:
    """The part of a device's identity that decides which code runs on it."""
    return str(device.sm_number or device.architecture or device.platform)


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
    name = name_of(file)
    return name is not None and name.kind in (SUSPECT, VERDICT)


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
        """When the folder last changed, or what was set aside in it; -1 where there is none."""
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
            return read(path, name)
        except FileNotFoundError:
            raise
        except (disk.NotPlainError, ValueError, RecursionError) as error:
            raise DamagedError(str(error)) from error
        except OSError as error:
            if error.errno in _DAMAGE:
                raise DamagedError(str(error)) from error
            raise

    def is_held(self, path: Path) -> bool:
        """Whether the process that wrote a file lives: it holds its lock. Raises: FileNotFoundError, DamagedError."""
        try:
            held = disk.is_locked(path)
        except FileNotFoundError:
            raise
        except disk.NotPlainError as error:
            raise DamagedError(str(error)) from error
        except OSError:  # another user's: theirs to judge
            return True
        if not held and first_run.from_outside(path):  # a signal ended it, which is no kernel's doing
            path.unlink(missing_ok=True)
            return True
        return held

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
            file = disk.write_locked(path, record.sealed())
        except OSError as error:
            self._cannot(error)
            return None
        self.problem = ""
        return file

    def move(self, path: Path, target: Path | None) -> bool:
        """Rename a file, or remove it; whether that worked."""
        if self.refused:
            return False
        try:
            if target is None:
                path.unlink(missing_ok=True)
            else:
                path.replace(target)
        except FileNotFoundError:  # another process emptied the folder: nothing is left to rename
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
            with disk.opened(path) as found:
                if disk.lock(found):  # else its writer lives
                    path.unlink(missing_ok=True)
        except disk.NotPlainError:
            self.set_aside(file)
        except OSError:  # renamed or swept meanwhile; another user's
            return

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
            warn(text, LayerZeroWarning, stacklevel=2)
