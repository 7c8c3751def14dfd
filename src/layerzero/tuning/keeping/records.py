"""What lies on disk about one kernel and one class of calls: a JSON document whose name follows from what it says."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from pathlib import Path
from urllib.parse import quote, unquote
from zlib import crc32

import msgspec

from layerzero.core.facts import Facts
from layerzero.core.ledger import Verdict
from layerzero.core.recipe import CallRecipe
from layerzero.core.system import disk

FORMAT = 1

MAX_BYTES = 1 << 20
"""No record is larger."""

PROVED, SUSPECT, VERDICT, FAILURES, RUNNING = "proved", "suspect", "verdict", "failures", "running"
UNCAPTURED = "uncaptured"

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
        at_unix_s, process: when and by whom it was written, for people.
        call, module: how a child makes the call again.
        text: why it is a suspect, what a child said, or why a capture refused it.
        verdict: what a child found.
        errors: what the kernel raised, oldest first.
        check: checksum of the rest; empty in what an earlier version wrote.
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
        data = msgspec.json.encode(msgspec.structs.replace(self, check=""))
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
    if match is None or match["kind"] not in (PROVED, SUSPECT, VERDICT, FAILURES, RUNNING, UNCAPTURED):
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


@functools.lru_cache(maxsize=256)
def source_of(module: str) -> str:
    """A hash of a module's file, as it was when first asked; empty for a module that has none."""
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
    if record.check and record.check != f"{crc32(data[:-10] + data[-2:]):08x}":
        raise ValueError("its content is not what was written")
    if record.format != FORMAT or slug_of(record.kernel) != name.slug or record.key != name.key:
        raise ValueError("its content is not what its name says")
    return record


def capability_of(facts: Facts) -> str:
    """The part of a device's identity that decides which code runs on it."""
    device = facts.device
    return str(device.sm_number or device.architecture or device.platform)
