"""What processes measured and the database does not hold yet: a journal for each process, next to the database.

A row is safe as soon as it is in the journal, whatever is locked: adding is one append and one fsync. Each line is one
addition, whole or not at all, with a checksum. The process whose turn it is merges all journals; a file next to each
says how far. A journal is locked for as long as its process lives; one whose writer is gone, and that is merged, is
removed.
"""

from __future__ import annotations

import bisect
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import msgspec

from layerzero.core.system import disk
from layerzero.tuning.storage.connections import check_folder
from layerzero.tuning.storage.rows import Row, check

FORMAT = 1
"""A part of the folder's name: processes of versions that write rows in another way have journals of their own."""

MAX_PIECE = 8 << 20
"""Bytes of one journal that are merged at once, unless one addition is larger."""

MAX_OWN = 16 << 20
"""Bytes after which a process begins another journal, so that a merged one can go."""

_ROWS, _AT = ".rows", ".at"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Row]).decode


def folder_of(database: Path) -> Path:
    """Where the journals of a database lie."""
    return database.with_name(f"{database.name}.rows-{FORMAT}")


def line_of(rows: Sequence[Row]) -> bytes:
    """One addition as a line of a journal. Raises: ValueError for what cannot be written down."""
    data = _encode(rows)
    return b"%08x %s\n" % (crc32(data), data)


class Journal:
    """The journal of this process: made at the first row, another one after a fork."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder
        self._file: int | None = None
        self._torn = False

    def append(self, line: bytes) -> Place:
        """Add a line, on disk when this returns; where it ends. Raises: OSError."""
        file = self._opened()
        if self._torn:
            line = b"\n" + line
        self._torn = True
        disk.write_all(file, line)
        os.fdatasync(file)
        self._torn = False
        return Place(self._path, os.fstat(file).st_size)

    def _opened(self) -> int:
        if self._file is not None:
            found = os.fstat(self._file)
            if found.st_size > MAX_OWN or not found.st_nlink:  # it was removed: what is added would not be read
                self.close()
        while self._file is None:
            check_folder(self.folder.parent)
            disk.make_private(self.folder)
            check_folder(self.folder)
            path = self.folder / f"{os.getpid()}-{uuid.uuid4().hex}{_ROWS}"
            file = disk.open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
            if disk.lock(file, shared=True) and os.fstat(file).st_nlink:
                self._file, self._path, self._torn = file, path, False
                disk.sync_folder(self.folder)
            else:  # it was swept before it was locked
                os.close(file)
        return self._file

    def close(self) -> None:
        """Let go of the journal; another process merges what is in it."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


@dataclass(frozen=True, slots=True)
class Place:
    """A journal, and a number of its bytes."""

    path: Path
    end: int

    def settle(self) -> None:
        """Say so, once it does. Raises: OSError."""
        text = b"%d" % self.end
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        with disk.opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            disk.write_all(file, b"%08x %s" % (crc32(text), text))  # unsynced: merging twice does no harm
        temporary.replace(self.path.with_suffix(_AT))


def merged_until(path: Path) -> int:
    """How many bytes of a journal are merged; 0 where nothing tells: merging twice does no harm."""
    try:
        told, _, text = disk.read_plain(path.with_suffix(_AT), 64).partition(b" ")
        return int(text) if int(told, 16) == crc32(text) else 0
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Additions of one journal that are not merged: rows, where they end, and lines that cannot be read."""

    rows: list[Row]
    place: Place
    damaged: int


def waiting(folder: Path, *, first: Path | None = None, most: int = MAX_PIECE) -> Iterator[Piece]:
    """What is not merged, a piece of each journal. A line that is being written waits.

    Args:
        first: the journal to begin with; the others follow in turn, so that none always comes last.
        most: bytes of a piece, unless one addition is larger.
    """
    journals = _journals(folder)
    start = bisect.bisect_left(journals, first) if first is not None else 0
    for path in (*journals[start:], *journals[:start]):
        piece = _piece(path, most)
        if piece is not None:
            yield piece


def _journals(folder: Path) -> list[Path]:
    if disk.distrust(folder.parent) or disk.distrust(folder):
        return []
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(_ROWS))  # noqa: PTH208
    except OSError:  # nothing was written yet, or nothing may be read
        return []


def _piece(path: Path, most: int) -> Piece | None:
    try:
        file = disk.open_plain(path)
    except OSError:  # removed meanwhile; another user's; no journal
        return None
    try:
        at, size = merged_until(path), os.fstat(file).st_size
        data = _whole_lines(file, at, size, most)
    finally:
        os.close(file)
    if not data:
        return None
    rows: list[Row] = []
    damaged = 0
    for line in data.splitlines():
        found = _read(line)
        rows += found or []
        damaged += found is None
    return Piece(rows, Place(path, at + len(data)), damaged)


def _whole_lines(file: int, at: int, size: int, most: int = MAX_PIECE) -> bytes:
    """Lines from a place on, at least one of them if there is any."""
    data = b""
    while at + len(data) < size:
        part = os.pread(file, most, at + len(data))
        data += part
        end = data.rfind(b"\n") + 1
        if end or not part:
            return data[:end]
    return b""


def _read(line: bytes) -> list[Row] | None:
    """The rows of a line; None for one that is torn or damaged."""
    if not line:  # where a torn one ended
        return []
    told, _, data = line.partition(b" ")
    try:
        if int(told, 16) != crc32(data):
            return None
        rows = _decode(data)
        for row in rows:
            check(row)
    except ValueError:  # msgspec's errors too
        return None
    return rows


def forget_places(folder: Path) -> None:
    """Have everything merged anew that journals still hold: the database that had it is gone."""
    for path in _journals(folder):
        path.with_suffix(_AT).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove journals that are merged and whose writers are gone; only in a turn to merge."""
    for path in _journals(folder):
        try:
            file = disk.open_plain(path)
        except OSError:
            continue
        try:
            if not disk.lock(file):  # its writer lives
                continue
            at, size = merged_until(path), os.fstat(file).st_size
            if at >= size or not _whole_lines(file, at, size):  # a last half line was never acknowledged
                path.unlink(missing_ok=True)
                path.with_suffix(_AT).unlink(missing_ok=True)
        except OSError:
            continue
        finally:
            os.close(file)


def count(folder: Path) -> int:
    """How many rows are not merged, as far as one piece of each journal tells."""
    return sum(len(piece.rows) for piece in waiting(folder))
