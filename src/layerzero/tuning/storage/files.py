"""A ledger in files: markers, suspects, verdicts and failures, shared by many processes and kept between them.

What lies on disk and what this process could not write hold alike, and reading asks for no permission to write.

A marker is locked for as long as its process lives. The operating system gives the lock back however the process ends,
so a marker that no process holds was left behind by the dead, in whatever container and after whatever restart.
Records hold for one version of the library and of torch, and one kind of device. Times are kept in memory only.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch

from layerzero.core.device import Device
from layerzero.core.errors import LayerZeroWarning
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Judgement, Ledger, Suspect, Verdict, call_class, class_text, deciding, home_of
from layerzero.core.recipe import CallRecipe, Workspace, elements_of
from layerzero.core.system import disk, forking, warn
from layerzero.engine import first_run, probe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import records
from layerzero.tuning.storage.folder import RecordFolder
from layerzero.tuning.storage.records import (
    CAPTURE,
    FAILURES,
    ONLY_BANS,
    PROVED,
    RUNNING,
    SUSPECT,
    VERDICT,
    WORKSPACE,
    Name,
    Record,
    Versions,
)

LOOK_EVERY_S = 1.0
"""How often a process that chooses looks whether another one wrote."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where files go: ``LAYERZERO_CACHE_DIR``, else the user's cache folder; None if it is empty, and without locks."""
    named = environment.get("LAYERZERO_CACHE_DIR") if disk.HAS_LOCKS else ""
    try:
        if named is None:
            import platformdirs

            return platformdirs.user_cache_path("layerzero", appauthor=False).expanduser().absolute()
        return Path(named).expanduser().absolute() if named else None
    except RuntimeError as error:  # a user without a home
        warn(
            f"what is learnt about kernels ends with the process: {error}; set LAYERZERO_CACHE_DIR to a folder",
            LayerZeroWarning,  # from this line, so that Python tells it once
        )
        return None


def _date(at_unix_s: float) -> str:
    try:
        return f"{datetime.fromtimestamp(at_unix_s, UTC):%Y-%m-%d %H:%M UTC}"
    except (OverflowError, OSError, ValueError):
        return f"at {at_unix_s} s, which is no date"


_Identity = tuple[str, str, tuple[object, ...]]
"""A kernel, the kind of device, and the class of calls: what is proved."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A committed marker: its file, the open file that its lock hangs on, and the class that it is about."""

    path: Path
    file: int
    name: Name
    identity: _Identity


class FileLedger(Ledger):
    """Records in ``folder`` for every process, and memory for what cannot be written there."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.files = RecordFolder(folder / f"ledger-{records.FORMAT}")
        self._proved: set[_Identity] = set()
        self._opening = forking.rlock()
        self._opened = False
        self._look_at = 0.0
        self._wrong: dict[str, list[Record]] = {}
        self._wrong_at = 0
        forking.when_torn(self._list_anew)

    def _list_anew(self) -> None:
        """A forked child may have half of a list that another thread was making: a ban could be missing in it."""
        self._opened = False

    # what the engine asks

    def judgement(self, kernel: Kernel, facts: Facts) -> Judgement | None:
        """What was found in this process or another one, at these versions."""
        self._refresh()
        slug = records.slug_of(kernel.id)
        if not self.files.has(slug, VERDICT):
            return None
        versions = versions_of(kernel, facts.device)
        own = self.files.load(Name(slug, records.key_of(kernel.id, class_text(facts), versions), VERDICT))
        if facts.operation.class_facts:
            return _judgement(own)
        found = self._wrong_of(slug)
        elsewhere = next((each for each in found if each.kernel == kernel.id and each.versions == versions), None)
        return deciding(_judgement(own), _judgement(elsewhere))

    def _wrong_of(self, slug: str) -> list[Record]:
        """Wrong results of a kernel, at whatever versions; every verdict about it was read then."""
        if self._wrong_at != self.files.decided:
            self._wrong, self._wrong_at = {}, self.files.decided
        wrong = self._wrong.get(slug)
        if wrong is None:
            known = self.files.of(slug, VERDICT)
            wrong = self._wrong[slug] = [each for each in known if each.verdict is Verdict.WRONG]
            if self._wrong_at != self.files.decided:  # one is damaged: plans of its other classes must go as well
                ENGINE.bump()
        return wrong

    def on_record(self, kernels: Sequence[Kernel]) -> Collection[str]:
        """Those that any process wrote a verdict or a suspicion about, at whatever versions."""
        self._refresh()
        slugs = self.files.slugs()
        return [each.id for each in kernels if records.slug_of(each.id) in slugs] if slugs else ()

    def suspicion(self, kernel: Kernel, facts: Facts) -> str | None:
        """Why this kernel and class are suspected, at these versions; or what was damaged that may have been a ban."""
        self._refresh()
        record = self._recorded(kernel, facts, SUSPECT)
        if record is not None:
            return record.text
        slug = records.slug_of(kernel.id)
        if self.files.has(slug, VERDICT):
            self._wrong_of(slug)
        doubts = self.files.doubts(slug)
        if not doubts:
            return None
        key = records.key_of(kernel.id, class_text(facts), versions_of(kernel, facts.device))
        return next((f"{name.file()}: {why}" for name, why in doubts.items() if records.may_ban(name, key)), None)

    def unproved(self, kernel: Kernel, facts: Facts) -> bool:
        """Whether a class is not proved here; no where nothing can be written, since it would stay so."""
        identity = (kernel.id, facts.device.name, call_class(facts))
        if identity in self._proved or not self.files.writable:
            return False
        if self._recorded(kernel, facts, PROVED) is not None:
            self._proved.add(identity)
            return False
        return True

    def begin(self, kernel: Kernel, facts: Facts) -> object | None:
        """Commit a marker; None where the class was proved here, or where nothing can be written."""
        if not self.unproved(kernel, facts):
            return None
        identity = (kernel.id, facts.device.name, call_class(facts))
        record = self._about(kernel, facts, text=first_run.so_far())
        name = Name(records.slug_of(kernel.id), record.key, RUNNING)
        path = self.files.path / name.file(uuid.uuid4().hex)
        file = self.files.write(path, record)
        if file is None:
            return None
        first_run.begin(file)
        return Marker(path, file, name, identity)

    def accept(self, marker: object) -> None:
        """The marker becomes the proof: one rename."""
        assert isinstance(marker, Marker)
        name = Name(marker.name.slug, marker.name.key, PROVED)
        self.files.move(marker.path, self.files.path / name.file())
        first_run.end(marker.file)
        os.close(marker.file)
        self.files.known(name)
        self._proved.add(marker.identity)

    def withdraw(self, marker: object) -> None:
        assert isinstance(marker, Marker)
        self.files.move(marker.path, None)
        first_run.end(marker.file)
        os.close(marker.file)

    # what is recorded

    def record_verdict(self, kernel: Kernel, facts: Facts, verdict: Verdict, detail: str = "") -> None:
        self.files.put(self._about(kernel, facts, text=detail, verdict=verdict), VERDICT)

    def record_failure(self, kernel: Kernel, facts: Facts, error: str) -> None:
        """Remember an error here and, for doctor, for later processes.

        Another process may write the same file at this moment. What it wrote may be lost, never what this one saw.
        """
        super().record_failure(kernel, facts, error)
        record = self._record(kernel, facts, str(facts["operation"]))
        before = self.files.load(Name(records.slug_of(kernel.id), record.key, FAILURES))
        mine = super().failures()[kernel.id, record.what]
        others = [each for each in (before.errors if before else []) if each not in mine]
        errors = [*others, *mine][-self.MAX_FAILURES_PER_KERNEL :]
        self.files.put(msgspec.structs.replace(record, errors=errors), FAILURES)

    def record_capture(self, kernel: Kernel, facts: Facts, why: str, *, work: bool = False) -> None:
        record, verdict = self._record(kernel, facts, records.captures_of(facts)[not work]), Verdict.PASSED
        self.files.put(msgspec.structs.replace(record, text=why, verdict=None if why else verdict), CAPTURE)

    def capture(self, kernel: Kernel, facts: Facts) -> str | None:
        """What any process saw last, at these versions; one that cannot be read may have been a refusal."""
        self._refresh()
        slug = records.slug_of(kernel.id)
        seen, doubts = [], self.files.doubts
        if not self.files.has(slug, CAPTURE) and not doubts(slug):
            return None
        for what in records.captures_of(facts):
            name = Name(slug, records.key_of(kernel.id, what, versions_of(kernel, facts.device)), CAPTURE)
            seen += [] if (record := self.files.load(name)) is None else [record]
            if record is None and name in doubts(slug):
                return f"{name.file()}: {doubts(slug)[name]}"
        return max(seen, key=lambda each: each.at_unix_s).text if seen else None  # of two at once that of the work

    def record_workspace(self, kernel: Kernel, facts: Facts, count: int) -> None:
        record = self._record(kernel, facts, class_text(facts))
        self.files.put(msgspec.structs.replace(record, text=f"{count} {elements_of(facts)}"), WORKSPACE)

    def workspace(self, kernel: Kernel, facts: Facts) -> Workspace | None:
        record = self._recorded(kernel, facts, WORKSPACE)
        if record is None or (found := re.fullmatch(r"(\d+) (\d+)", record.text)) is None:
            return None
        return Workspace(int(found[1]), int(found[2]), _date(record.at_unix_s)[:10]).of(facts)

    def suspect(self, kernel: Kernel, facts: Facts, why: str) -> None:
        self.files.put(self._about(kernel, facts, text=why), SUSPECT)

    def settle(self, suspect: Suspect, verdict: Verdict, detail: str) -> None:
        """Replace a suspect by what a child found; one that passed counts as proved."""
        passed = verdict is Verdict.PASSED
        for name, record in list(self.files.all(SUSPECT, VERDICT)):
            if (record.kernel, record.what) != (suspect.kernel_id, suspect.call_class) or not _holds_here(record):
                continue
            kind = PROVED if passed else VERDICT
            found = msgspec.structs.replace(record, verdict=None if passed else verdict, text=detail)
            self.files.put(found, kind)
            if name.kind != kind:
                self.files.remove(name)

    # what doctor asks

    def suspects(self) -> tuple[Suspect, ...]:
        """Suspects and the banned, of this process and of every other one so far: what holds, not what was meant."""
        self._open(anew=True)
        found: dict[tuple[str, str], Suspect] = {}
        for _, record in self.files.all(SUSPECT, VERDICT):
            if record.call is None or record.verdict is Verdict.PASSED or not _holds_here(record):
                continue
            each = Suspect(
                record.kernel, record.what, record.text, record.call, record.module, record.verdict, record.text
            )
            found.setdefault((each.kernel_id, each.call_class), each)
        return tuple(found[key] for key in sorted(found))

    def failures(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """What failed in this process and, at these versions, in earlier ones."""
        self._open(anew=True)
        kept = [record for _, record in self.files.all(FAILURES) if _holds_here(record)]
        return {**super().failures(), **{(each.kernel, each.what): tuple(each.errors) for each in kept}}

    def notes(self) -> tuple[str, ...]:
        """Files that were set aside, and a folder that cannot be written; every record is read for it."""
        self._open(anew=True)
        files = self.files
        for _ in files.all(SUSPECT, VERDICT, PROVED, FAILURES):
            pass
        notes = [f"{files.path / name.file()}: {records.lifting(name, why)}" for name, why in self._doubts()]
        told = {name for name, _ in self._doubts()}
        aside = [file for file in files.aside() if records.name_of(file) not in told]
        if aside:
            names = ", ".join(aside)
            notes.append(f"{files.path}: damaged or foreign files were set aside and count for nothing: {names}")
        if files.refused:
            notes.append(f"{files.refused}: {ONLY_BANS}")
        elif files.problem:
            waiting = f"; {files.waits()} records wait in memory" if files.waits() else ""
            end = f"what is learnt about kernels ends with this process ({files.problem}){waiting}"
            notes.append(f"{files.path} cannot be written: {end}")
        elif nowhere := disk.no_place(files.path):  # not tried yet, as in a command that only looks
            notes.append(
                f"{files.path} cannot be written: {nowhere}; mend that or set LAYERZERO_CACHE_DIR to another place"
            )
        return tuple(notes)

    def _doubts(self) -> list[tuple[Name, str]]:
        return sorted(self.files.all_doubts().items(), key=lambda each: each[0].file())

    # records

    def _open(self, *, anew: bool = False) -> None:
        """List the folder, and make suspects of the markers that dead processes left."""
        with self._opening:
            if self._opened and not anew:
                return
            self._opened = True
            self._look_at = time.monotonic() + LOOK_EVERY_S
            for path, record in self.files.scan():
                date = _date(record.at_unix_s)
                why = f"process {record.process} ended during its first run of it ({date})"
                self.files.put(msgspec.structs.replace(record, text=why), SUSPECT)
                self.files.move(path, None)

    def _refresh(self) -> None:
        """See what other processes wrote, unless a thread does."""
        if not self._opened:
            self._open()
        elif (self.watched is None or not self.watched()) and time.monotonic() >= self._look_at:
            self.look()

    watched: Callable[[], bool] | None = None
    """Whether a thread looks at the folder once a second."""

    def look(self) -> None:
        """See what other processes wrote; what they suspected, banned or cleared makes every plan be chosen anew."""
        self._look_at = time.monotonic() + LOOK_EVERY_S
        self.files.retry()
        if not self._opened or self.files.changed():
            before = self.files.decided
            self._open(anew=True)
            if self.files.decided != before:
                ENGINE.bump()

    def _recorded(self, kernel: Kernel, facts: Facts, kind: str) -> Record | None:
        """What is on disk about a class; quick where nothing of this kind is known about the kernel."""
        if not self._opened:
            self._open()
        slug = records.slug_of(kernel.id)
        if not self.files.has(slug, kind):
            return None
        key = records.key_of(kernel.id, class_text(facts), versions_of(kernel, facts.device))
        return self.files.load(Name(slug, key, kind))

    def _record(self, kernel: Kernel, facts: Facts, what: str) -> Record:
        return Record(records.FORMAT, kernel.id, what, versions_of(kernel, facts.device), time.time(), os.getpid())

    def _about(self, kernel: Kernel, facts: Facts, *, text: str = "", verdict: Verdict | None = None) -> Record:
        record = self._record(kernel, facts, class_text(facts))
        call, module = CallRecipe.of(facts), home_of(kernel)
        return msgspec.structs.replace(record, call=call, module=module, text=text, verdict=verdict)


def _judgement(record: Record | None) -> Judgement | None:
    if record is None or record.verdict is None:
        return None
    return Judgement(record.verdict, record.what, record.text)


def versions_of(kernel: Kernel, device: Device) -> Versions:
    """What a record of a kernel holds for that is written now."""
    return Versions(_library(kernel, device), str(torch.__version__), device.name, records.capability_of(device))


def _library(kernel: Kernel, device: Device) -> str:
    """The version of a kernel's library; where no package tells one, that of the file that registers it."""
    version = probe.this_machine().state(kernel.backend, device).version
    return version or ("" if kernel.backend.origin == "builtin" else records.source_of(home_of(kernel)))


def _holds_here(record: Record) -> bool:
    """Whether library and torch have the versions of a record; the library of a kernel that is not registered may."""
    if record.versions.torch != str(torch.__version__):
        return False
    try:
        kernel = REGISTRY.kernel(record.kernel)
    except KeyError:
        return True
    return _library(kernel, Device.detect("cpu")) == record.versions.library
