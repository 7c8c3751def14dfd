"""Which compiled artefacts exist: a JIT kernel is refused until it was built for calls like this one.

Which calls are alike the kernel says (``build_key``); where it says nothing, those of one class are. What an earlier
process compiled counts where the kernel can tell (``prebuilt``), or where it was noted in the folder in which its
library keeps such things (``cache_folder``): a note lists the files that were opened there while it was built, and
counts as long as they exist. Wiping the folder wipes the notes.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import call_class
from layerzero.core.recipe import KeptFiles
from layerzero.core.system import disk, forking
from layerzero.engine import probe
from layerzero.engine.policy import Policy

NOTES = "layerzero"
"""The folder of the notes in a library's own."""

MOST_BYTES = 1 << 20
"""A file that is larger is no note."""

_LOCK = ".lock"

MOST_NOTED = 10_000
"""Notes of a folder that are remembered."""

SETTLED_NS = 2 * 10**9
"""A folder that was changed more recently may change again without showing it: file systems count up to 2 s at once."""


BuildIdentity = tuple[str, str, Hashable]
"""What is built once: a kernel, the kind of device, and what the artefact depends on."""


class BuildOutcome(msgspec.Struct, frozen=True):
    """What became of it.

    Attributes:
        log: what went wrong: the program that is missing, or the last lines of the error; empty if it was built.
        lasting: it is not tried again until a version changes.
        lacks: the program that is missing on this machine; empty if that is not why.
    """

    log: str = ""
    lasting: bool = True
    lacks: str = ""


class Built:
    """What was compiled in this process: a kernel, the kind of device, and what its artefact depends on."""

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._pairs: set[BuildIdentity] = set()

    def ready(self, kernel: Kernel, facts: Facts) -> bool:
        """Whether the kernel was built for calls like this one."""
        if self._pairs and build_of(kernel, facts) in self._pairs:
            return True
        return is_kept(kernel, facts)

    def add(self, kernel: Kernel, facts: Facts) -> None:
        with self._lock:
            self._pairs.add(build_of(kernel, facts))

    def clear(self) -> None:
        with self._lock:
            self._pairs.clear()


def compiles_in_call(kernel: Kernel, facts: Facts, policy: Policy) -> bool:
    """Whether a call compiles what it runs, where the setting says so.

    Of a collective also what takes a second and has no files to look for: all ranks compile it in the same call. By
    what each has built, ranks would run different kernels. Such kernels are for ranks of one host, and a host has the
    C compiler that Triton needs, or has none. A capture wants a call before it.
    """
    if policy.allow_jit_compile:
        return True
    alike = facts.operation.is_collective and kernel.prebuilt is None
    return alike and policy.jit == "background" and has_compiler()


@functools.cache
def has_compiler() -> bool:
    """Whether this machine has a C compiler, where Triton looks for one."""
    return any(shutil.which(each) for each in (os.environ.get("CC"), "clang", "gcc", "cc") if each)


def is_kept(kernel: Kernel, facts: Facts) -> bool:
    """Whether other processes find the artefact for calls like this one."""
    return (kernel.prebuilt is not None and kernel.prebuilt(facts)) or (
        kernel.cache_folder is not None and is_noted(kernel, facts)
    )


def build_of(kernel: Kernel, facts: Facts) -> BuildIdentity:
    """What is built once for calls like this one: kernel, kind of device, and what the artefact depends on."""
    key = kernel.build_key(facts.seen_in(kernel.layout)) if kernel.build_key else call_class(facts)
    return kernel.id, facts.device.name, key


def name_of(kernel: Kernel, facts: Facts, *more: str) -> str:
    """The name of a build in files: another one for other versions of its library and of torch, and for ``more``."""
    version = probe.this_machine().state(kernel.backend, facts.device).version or ""
    parts = (*build_of(kernel, facts), version, torch.__version__, facts.device.sm, *more)
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:40]


def _note(kernel: Kernel, facts: Facts) -> Path | None:
    folder = kernel.cache_folder() if kernel.cache_folder is not None else None
    return None if folder is None else folder / NOTES / f"{name_of(kernel, facts)}.json"


def is_noted(kernel: Kernel, facts: Facts) -> bool:
    """Whether a build is noted in its library's folder, and every file that it opened there still exists.

    What notes say is remembered while their folder stays as it is: a choice costs a look at the folder, not at a note.
    """
    note = _note(kernel, facts)
    if note is None:
        return False
    files = NOTED.files(note)
    return files is not None and all(os.path.exists(note.parent.parent / each) for each in files)  # noqa: PTH110


def folder_of(kernel: Kernel) -> Path | None:
    """Where the builds of a kernel lie whose files are known; None where none are."""
    if isinstance(kernel.prebuilt, KeptFiles):
        return kernel.prebuilt.folder()
    return None if kernel.cache_folder is None else kernel.cache_folder()


def files_of(kernel: Kernel, facts: Facts) -> list[str]:
    """The files of the build for calls like this one, in :func:`folder_of`, what names the others last.

    Empty where it is not there, or where only the library knows them.
    """
    if isinstance(kernel.prebuilt, KeptFiles):
        return list(kernel.prebuilt.names(facts))
    note = _note(kernel, facts)
    if note is None or not is_noted(kernel, facts):
        return []
    return [*(NOTED.files(note) or ()), f"{NOTES}/{note.name}"]


class Noted:
    """What notes say, by folder, as of the time at which each folder was changed."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[tuple[int, int], dict[str, list[str] | None]]] = {}

    def forget(self) -> None:
        """Look anew: files came from elsewhere."""
        self._kept.clear()

    def files(self, note: Path) -> list[str] | None:
        """The files that a note lists; None where there is none, or a damaged one: it is built again."""
        try:
            stat = os.stat(note.parent)  # noqa: PTH116  # read in choices
        except OSError:
            self._kept.pop(note.parent, None)
            return None
        state = stat.st_ino, stat.st_mtime_ns
        kept = self._kept.get(note.parent)
        if kept is None or kept[0] != state or len(kept[1]) >= MOST_NOTED:
            kept = self._kept[note.parent] = state, {}
        if note.name in kept[1]:
            return kept[1][note.name]
        found = disk.read_json(note, MOST_BYTES, list[str])
        if time.time_ns() - stat.st_mtime_ns > SETTLED_NS:
            kept[1][note.name] = found
        return found


def note(kernel: Kernel, facts: Facts, opened: Iterable[str]) -> None:
    """Write down that a build lies in its library's folder, with those of the files opened meanwhile that do.

    A file that is only locked (``NAME.lock``) stands for the others of its name: some libraries read those outside of
    Python. Where there is none, nothing was kept. Raises: OSError where nothing can be written there.
    """
    place = _note(kernel, facts)
    if place is None:
        return
    folder = place.parent.parent
    inside = {os.path.relpath(each, folder) for each in opened if Path(each).is_relative_to(folder)}
    kept = {each for each in inside if (folder / each).is_file() and not each.startswith(NOTES)}
    for lock in [each for each in kept if each.endswith(_LOCK)]:
        stem = folder / lock.removesuffix(_LOCK)
        beside = {str(each.relative_to(folder)) for each in stem.parent.glob(f"{glob.escape(stem.name)}.*")} - {lock}
        if not beside:
            return
        kept = (kept | beside) - {lock}
    place.parent.mkdir(parents=True, exist_ok=True)
    disk.write_whole(place, msgspec.json.encode(sorted(kept)), private=True)


@contextlib.contextmanager
def opened_files() -> Iterator[set[str]]:
    """Collect the files that Python opens or renames meanwhile; for processes that only build, as it lasts for good."""
    found: set[str] = set()
    on = [True]

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if on[0] and event in ("open", "os.rename"):
            path = arguments[event == "os.rename"]
            if isinstance(path, (str, bytes, os.PathLike)):
                found.add(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100  # links stay as the library names them

    sys.addaudithook(heard)
    try:
        yield found
    finally:
        on[0] = False


BUILT = Built()
"""The artefacts of this process."""

NOTED = Noted()
"""What notes said when this process looked."""
