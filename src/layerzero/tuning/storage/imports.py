"""Plugins that are being imported, as files: one that ends its process is known by name to the next one.

A marker is locked for as long as its process lives, as those of first runs are; one that no process holds was left by
the dead. It stays where it is and keeps its plugin out, until :func:`forgive` takes it away.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from layerzero.core.system import disk
from layerzero.engine import first_run

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
