"""Times of kernels, kept for every later process: what was measured on this device, with these versions, for this work.

Markers, suspects, verdicts and failures stay in files that processes lock; see ``docs/decisions/0030``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerzero.core import forking
from layerzero.core.evidence import Evidence, Measurement, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.limit_launch import LAUNCH_CODES
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.legality import limit_findings
from layerzero.engine.policy import Policy
from layerzero.tuning.keeping.database import Database
from layerzero.tuning.keeping.environment import surroundings
from layerzero.tuning.keeping.files import cache_folder
from layerzero.tuning.keeping.rows import Row, check, in_other_layout, row_of, work_of
from layerzero.tuning.measuring.online import SAMPLER
from layerzero.tuning.predicting import learning
from layerzero.tuning.predicting.prediction import predict
from layerzero.tuning.predicting.prior import priors_of, problems
from layerzero.tuning.predicting.weighing import OTHER_LAYOUT, Time, settled, weighed

_ASK = """SELECT kernel, environment, condition, source, median_us, noise, samples, variance_us2, written_at, adapts,
    device_us, host_us FROM times WHERE work = ? AND graph = ?"""


def times_path(policy: Policy) -> Path | None:
    """The file of the measured times; None where they are kept in memory only."""
    if not policy["perfdb.enabled"]:
        return None
    if policy["perfdb.path"]:
        return Path(policy["perfdb.path"]).expanduser().absolute()
    folder = cache_folder()
    return None if folder is None else folder / "perfdb.sqlite"


class TimeStore:
    """Times as the settings say where to keep them; a change of the settings moves it."""

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._policy: Policy | None = None
        self._database = Database(None)

    @property
    def database(self) -> Database:
        """The database that the process-wide settings name."""
        policy = CONFIGURATION.policy
        if policy is not self._policy:
            with self._lock:
                path = times_path(policy)
                if path != self._database.named:
                    self._database = Database(path)
                self._policy = policy
        return self._database

    def evidence(self, kernels: Sequence[Kernel], facts: Facts) -> dict[str, Evidence]:
        """What is known of these kernels: measured for this work and environment, predicted, or shipped."""
        found = self._own(kernels, facts)
        if not found:
            priors = priors_of(facts.device.name)
            found = priors.evidence(kernels, facts) if priors else found
        return settled(found) if found else found

    def _own(self, kernels: Sequence[Kernel], facts: Facts) -> dict[str, Evidence]:
        """What this user's database says."""
        database = self.database
        if database.is_absent():
            return {}
        work, graph = work_of(facts), bool(facts["capturing"])
        rows = database.read(_ASK, (work.key, graph))
        times = [Time(*row) for row in rows]
        known: list[tuple[Any, ...]] = []
        worth = 1.0
        waits = any(time.waits for time in times)
        if waits or len({row[0] for row in rows}) < len(kernels):
            known = self._models(work.family, graph)
        if not rows and not known:
            other = in_other_layout(work)
            known = known if other is None else self._models(other.family, graph)
            worth = OTHER_LAYOUT
        if not rows and not known:
            return {}
        here = surroundings(facts.device)
        wanted = {kernel.id: here.environment(kernel)[1] for kernel in kernels}
        hosts = {
            (kernel_id, adapted_then): learning.decode_host(model).host_us
            for kernel_id, environment, adapted_then, model in (known if waits else ())
            if wanted.get(kernel_id) == environment
        }
        found = weighed([time for time in times if wanted.get(time.kernel) == time.environment], hosts)
        by_id = {kernel.id: kernel for kernel in kernels if kernel.id not in found}
        adapts: dict[str, str] = {}
        for kernel_id, environment, adapted_then, model in known:
            if kernel_id not in by_id or wanted[kernel_id] != environment:
                continue
            if kernel_id not in adapts:
                adapts[kernel_id] = adapted(by_id[kernel_id], facts)
            if adapts[kernel_id] == adapted_then:
                estimate = predict(learning.decode(model), work.sizes)
                if estimate is not None:
                    confidence = worth * estimate.confidence
                    found[kernel_id] = Evidence(estimate.time_us, Provenance.PREDICTED, confidence, estimate.noise)
        return found

    def _models(self, family: bytes, graph: bool) -> list[tuple[Any, ...]]:
        """What is known about a family; what an earlier version learnt about it is learnt anew first."""
        database = self.database
        found = database.read(learning.MODELS, (family, graph))
        if any(row[4] < learning.MODEL_FORMAT for row in found):
            database.write(lambda connection: learning.relearn(connection, family))
            found = database.read(learning.MODELS, (family, graph))
        return [row[:4] for row in found if row[4] == learning.MODEL_FORMAT]

    def record(self, kernel: Kernel, facts: Facts, measurement: Measurement) -> None:
        """Keep a time. Raises: ValueError if it is none."""
        environment, _ = surroundings(facts.device).environment(kernel)
        self.add([row_of(kernel.id, facts, environment, measurement, adapted(kernel, facts))])

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows, all or none; what was written later about the same thing stays. Raises: ValueError."""
        rows = list(rows)
        for row in rows:
            check(row)

        self.database.write(lambda connection: learning.write(connection, rows))

    def notes(self) -> tuple[str, ...]:
        """What is wrong with the file, and with tables that ship."""
        return (*self.database.notes(), *problems())


def adapted(kernel: Kernel, facts: Facts) -> str:
    """What a plan has to adapt for this kernel: other adaptations are other work."""
    findings = limit_findings(kernel, facts.seen_in(kernel.layout))
    repairs = {f"{each.repair.kind} {each.repair.argument}" for each in findings if each.repair is not None}
    return ", ".join(sorted(repairs | {"split" for each in findings if each.reason.code in LAUNCH_CODES}))


class StoreLedger:
    """The ledger of a process: times in the database, everything else where ``markers`` keeps it."""

    def __init__(self, markers: Ledger, times: TimeStore | None = None) -> None:
        self.markers = markers
        self.times = TimeStore() if times is None else times
        self.verdict, self.judgement = markers.verdict, markers.judgement
        self.record_verdict = markers.record_verdict
        self.record_failure = markers.record_failure
        self.failures = markers.failures
        self.unproved, self.begin = markers.unproved, markers.begin
        self.accept, self.withdraw = markers.accept, markers.withdraw
        self.on_record = markers.on_record
        self.suspicion, self.suspect = markers.suspicion, markers.suspect
        self.suspects, self.settle = markers.suspects, markers.settle

    def evidence(self, kernels: Sequence[Kernel], facts: Facts) -> Mapping[str, Evidence]:
        """Times of these kernels for a call, by kernel id."""
        return self.times.evidence(kernels, facts)

    def untimed(self, facts: Facts) -> bool:
        """Whether nobody has written a time, and none ships for this device."""
        return self.times.database.is_absent() and not priors_of(facts.device.name)

    def record_time(self, kernel: Kernel, facts: Facts, measurement: Measurement) -> None:
        """Keep a time for this and every later process."""
        self.times.record(kernel, facts, measurement)

    def notes(self) -> tuple[str, ...]:
        """What is wrong with the files and with the database, and which times of it have aged."""
        return (*self.markers.notes(), *self.times.notes(), *SAMPLER.notes())
