"""Times of kernels, kept for every later process: what was measured on this device, with these versions, for this work.

Markers, suspects, verdicts and failures stay in files that processes lock; see ``docs/decisions/0030``.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from layerzero.core.device import Device
from layerzero.core.evidence import Evidence, Measurement, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger, Libraries
from layerzero.core.limits import LAUNCH_CODES
from layerzero.core.recipe import CallRecipe
from layerzero.core.system import forking
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.legality import limit_findings
from layerzero.engine.policy import Policy
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.prediction.fitting import OTHER_LAYOUT, Time, weighed
from layerzero.tuning.prediction.predict import MAX_DISTANCE, predict
from layerzero.tuning.storage import environment as conditions
from layerzero.tuning.storage import journal_merge, learning, sql_schema
from layerzero.tuning.storage import rows as rows_of_times
from layerzero.tuning.storage.database import Database
from layerzero.tuning.storage.environment import surroundings
from layerzero.tuning.storage.files import FileLedger, cache_folder
from layerzero.tuning.storage.prior import priors_of, problems
from layerzero.tuning.storage.row_exchange import WATCH, Spool
from layerzero.tuning.storage.rows import (
    CallsMade,
    Row,
    Work,
    alike,
    check,
    in_other_layout,
    is_to_come,
    row_of,
    work_of,
)

NOTES: list[Callable[[], Iterable[str]]] = []
"""What else has notes for the ledger: the sampling of production's calls, where it was imported."""

_ASK = f"SELECT {sql_schema.SELECTED} FROM times WHERE work = ? AND graph = ?"  # noqa: S608  # names of ours


_FIELDS = len(Time.__struct_fields__) - 1  # what stands for a replay is not kept
assert Time.__struct_fields__[:_FIELDS] == sql_schema.DECIDING[:_FIELDS]


def times_path(policy: Policy) -> Path | None:
    """The file of the measured times; None where they are kept in memory only."""
    if not policy["perfdb.enabled"]:
        return None
    if policy["perfdb.path"]:  # where a link leads that the user names, but none in the folder that is ours
        return Path(os.path.realpath(Path(policy["perfdb.path"]).expanduser()))
    folder = cache_folder()
    return None if folder is None else folder / "perfdb.sqlite"


class TimeStore:
    """Times as the settings say where to keep them; a change of the settings moves it."""

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._policy: Policy | None = None
        self._spool = Spool(Database(None))
        self._past = ""

    @property
    def spool(self) -> Spool:
        """The way into the database that the process-wide settings name."""
        policy = CONFIGURATION.policy
        if policy is not self._policy:
            with self._lock:
                path = times_path(policy)
                if path != self._spool.database.named:
                    self._spool.close()
                    self._spool = Spool(Database(path))
                    self._spool.adopt()
                self._policy = policy
        return self._spool

    @property
    def database(self) -> Database:
        """The database that the process-wide settings name."""
        return self.spool.database

    def evidence(
        self, kernels: Sequence[Kernel], facts: Facts, libraries: Libraries | None = None
    ) -> dict[str, Evidence]:
        """What is known of these kernels: measured for this work and environment, predicted, or shipped.

        ``libraries`` stand for those here in a question about others.
        """
        spool = self.spool
        try:
            spool.refresh()
            found = self._own(spool.database, kernels, facts, libraries) or self._shipped(kernels, facts, libraries)
            found = found or self._own(spool.database, kernels, facts, libraries, of_alike=True)
        except Exception as error:  # noqa: BLE001  # no call fails because of what lies on a disk
            spool.database.doubt(error)
            found = self._shipped(kernels, facts, libraries)
        return found

    def _shipped(self, kernels: Sequence[Kernel], facts: Facts, libraries: Libraries | None) -> dict[str, Evidence]:
        """What a table says that ships for this device."""
        priors = priors_of(facts.device)
        return priors.evidence(kernels, facts, libraries) if priors else {}

    def _own(
        self,
        database: Database,
        kernels: Sequence[Kernel],
        facts: Facts,
        libraries: Libraries | None,
        *,
        of_alike: bool = False,
    ) -> dict[str, Evidence]:
        """What this user's database says of the work; or else of works that are almost alike, where nothing ships."""
        if not database.is_open() and database.is_absent():
            return {}
        work, graph = work_of(facts), bool(facts["capturing"])
        times = self._times(database, work.key, graph)
        known: list[tuple[Any, ...]] = []
        worth = 1.0
        if graph and not times:
            known = self._models(database, work.family, graph)
        of_device = graph and not times and not known
        if of_device:  # a replay waits for no host: what the device needed for eager calls stands for it
            graph, times = False, _of_device(self._times(database, work.key, graph=False))
        waits = bool([time for time in times if time.host_us is not None and time.waits])
        if not known and (waits or len({time.kernel for time in times}) < len(kernels)):
            known = self._models(database, work.family, graph)
        if not times and not known:
            other = in_other_layout(work)
            others = alike(work) if of_alike else () if other is None else (other,)
            known = next(filter(None, (self._models(database, each.family, graph) for each in others)), [])
            worth = OTHER_LAYOUT
        if not times and not known:
            return {}
        here = surroundings(facts.device)
        wanted = {kernel.id: here.environment(kernel, libraries)[1] for kernel in kernels}
        hosts = {
            (kernel_id, adapted_then): learning.decode_host(model).host_us
            for kernel_id, environment, adapted_then, model in (known if waits else ())
            if wanted.get(kernel_id) == environment
        }
        present = functools.partial(conditions.lately, facts.device.torch_type, facts.device.index)
        found = weighed([time for time in times if wanted.get(time.kernel) == time.environment], hosts, present)
        by_id = {kernel.id: kernel for kernel in kernels if kernel.id not in found}
        adapts: dict[str, str] = {}
        for kernel_id, environment, adapted_then, model in known:
            if kernel_id not in by_id or wanted[kernel_id] != environment:
                continue
            if kernel_id not in adapts:
                adapts[kernel_id] = adapted(by_id[kernel_id], facts)
            if adapts[kernel_id] == adapted_then:
                # any kernel of an operation without tensors takes any size, and which is quickest hardly changes
                farthest = MAX_DISTANCE if facts.operation.plain is None else math.inf
                estimate = predict(learning.decode(model), work.sizes, farthest)
                cost_us = None if estimate is None else estimate.device_us if of_device else estimate.time_us
                if estimate is not None and cost_us is not None:
                    confidence = worth * estimate.confidence
                    found[kernel_id] = Evidence(
                        estimate.time_us,
                        Provenance.PREDICTED,
                        confidence,
                        estimate.noise,
                        device_us=estimate.device_us,
                        cost_us=cost_us,
                    )
        if of_device:
            return {name: msgspec.structs.replace(each, stands_in=True) for name, each in found.items()}
        return found

    def _times(self, database: Database, key: bytes, graph: bool) -> list[Time]:
        """What was measured of a work; what is not as it was written counts for nothing, and is reported."""
        found = database.read(_ASK, (key, graph))
        if not found:
            return []
        start = sql_schema.start_of(key, int(graph))
        sound = sql_schema.sound(start, found)
        if len(sound) < len(found):
            database.tell(f"{database.path}: damaged times count for nothing", aloud=True)
        times = [Time(*row[:_FIELDS]) for row in sound]
        newest = max([time.written_at for time in times], default="")
        if newest <= self._past:
            return times
        self._past = rows_of_times.now()
        if is_to_come(newest):
            times = [
                msgspec.structs.replace(time, written_at="") if is_to_come(time.written_at) else time for time in times
            ]
        return times

    def _models(self, database: Database, family: bytes, graph: bool) -> list[tuple[Any, ...]]:
        """What is known about a family; what is stale, damaged, or learnt by an earlier version is learnt first."""
        found = database.read(learning.MODELS, (family, graph) * 2)
        damaged = [row[:5] for row in found if row[5] == learning.MODEL_FORMAT and not sql_schema.model_holds(row)]
        if damaged:
            database.tell(f"{database.path}: damaged models count for nothing, and are learnt anew", aloud=True)
        if damaged or any(type(row[5]) is int and row[5] < learning.MODEL_FORMAT for row in found):
            journal_merge.learn_family(database, family, damaged)
            found = database.read(learning.MODELS, (family, graph) * 2)
        return [row[2:5] + row[6:7] for row in found if row[5] == learning.MODEL_FORMAT and sql_schema.model_holds(row)]

    def record(self, kernel: Kernel, facts: Facts, measurement: Measurement) -> None:
        """Keep a time. Raises: ValueError if it is none."""
        self.record_work(kernel, work_of(facts), facts.device, measurement, adapted(kernel, facts))

    def record_work(
        self, kernel: Kernel, work: Work, device: Device, measurement: Measurement, adapts: str = ""
    ) -> None:
        """The same of a work that need not be a call's."""
        environment, _ = surroundings(device).environment(kernel)
        self.add([row_of(kernel.id, work, device.uuid, environment, measurement, adapts)])

    def errors(self, work: Work, device: Device) -> dict[str, float]:
        """The errors that were measured of a work, by kernel, in this process's environment."""
        self.spool.refresh()
        here, kernels = surroundings(device), {each.id: each for each in REGISTRY.kernels()}
        return {
            time.kernel: time.error
            for time in self._times(self.database, work.key, graph=False)
            if time.error is not None
            and time.kernel in kernels
            and here.environment(kernels[time.kernel])[1] == time.environment
        }

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows, all or none; what was written later about the same thing stays. Raises: ValueError."""
        rows = list(rows)
        for row in rows:
            check(row)
        self.spool.add(rows)

    def is_absent(self) -> bool:
        """Whether no time was written yet, here or anywhere."""
        return self.spool.database.is_absent()

    def written_at_unix_s(self) -> float | None:
        """When the file of times was last written, in seconds since 1970; None where there is none."""
        path = self.database.path
        found = [] if path is None else [path, path.with_name(f"{path.name}-wal")]
        stats = []
        for each in found:
            with suppress(OSError):
                stats.append(each.stat())
        return max((each.st_mtime for each in stats if each.st_size), default=None)

    def look(self) -> None:
        """Write and merge what waits; for a thread that looks once in a while."""
        self._spool.refresh()

    def settle(self) -> None:
        """Merge what any process measured, and learn from all of it; for commands, however long it takes."""
        self.spool.settle()

    def notes(self) -> tuple[str, ...]:
        """What is wrong with the file, what is not in it yet, and what is wrong with tables that ship."""
        spool = self.spool
        return (*spool.notes(), *spool.database.notes(), *problems())


def adapted(kernel: Kernel, facts: Facts) -> str:
    """What a plan has to adapt for this kernel: other adaptations are other work."""
    findings = limit_findings(kernel, facts.seen_in(kernel.layout))
    repairs = {f"{each.repair.kind} {each.repair.argument}" for each in findings if each.repair is not None}
    return ", ".join(sorted(repairs | {"split" for each in findings if each.reason.code in LAUNCH_CODES}))


def _of_device(times: Iterable[Time]) -> list[Time]:
    """Eager times as those of a queue that is never empty; what was kept without its parts says nothing of that."""
    return [
        msgspec.structs.replace(time, median_us=time.device_us, host_us=None, as_measured_us=time.median_us)
        for time in times
        if time.device_us is not None
    ]


class StoreLedger(Ledger):
    """The ledger of a process: times in the database, everything else where ``markers`` keeps it."""

    def __init__(self, markers: Ledger, times: TimeStore | None = None) -> None:
        self.markers = markers
        self.times = TimeStore() if times is None else times
        self._uncounted = 0
        self._calls = CallsMade(markers.files.path.parent) if isinstance(markers, FileLedger) else None
        for name in vars(Ledger).keys() - vars(StoreLedger).keys():
            if not name.startswith("_"):
                setattr(self, name, getattr(markers, name))
        if self._calls is not None:
            self.called = self._calls.add  # type: ignore[assignment]

    def watched(self) -> StoreLedger:
        """The same, with a thread that looks what other processes wrote: for the ledger of a process."""
        WATCH.add(self)
        if isinstance(self.markers, FileLedger):
            self.markers.watched = WATCH.running
        return self

    def look(self) -> None:
        """See what other processes decided, and write what could not be written before."""
        if isinstance(self.markers, FileLedger):
            self.markers.look()
        if self._calls is not None:
            self._calls.write()
        self.times.look()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        self._uncounted += 1
        self.called = super().called  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._uncounted -= 1
            if not self._uncounted and self._calls is not None:
                self.called = self._calls.add  # type: ignore[assignment]

    def calls(self) -> Sequence[tuple[int, CallRecipe]]:
        """What was called on this machine, the latest first."""
        return () if self._calls is None else [(each.count, each.call) for each in self._calls.made()]

    def evidence(
        self, kernels: Sequence[Kernel], facts: Facts, libraries: Libraries | None = None
    ) -> Mapping[str, Evidence]:
        """Times of these kernels for a call, by kernel id; ``libraries`` are those that a question is about."""
        return self.times.evidence(kernels, facts, libraries)

    def untimed(self, facts: Facts) -> bool:
        """Whether no time was written, and none ships for such calls on this device."""
        return self.times.is_absent() and priors_of(facts.device).lack(facts)

    def record_time(self, kernel: Kernel, facts: Facts, measurement: Measurement) -> None:
        self.times.record(kernel, facts, measurement)

    def notes(self) -> tuple[str, ...]:
        """What is wrong with the files and with the database, and which times of it have aged."""
        return (*self.markers.notes(), *self.times.notes(), *(note for notes in NOTES for note in notes()))
