"""What is remembered about kernels: the protocol that the engine asks, and an in-memory keeper of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel


class Provenance(StrEnum):
    """Where a time comes from, best first."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    PRIOR = "prior"


@dataclass(frozen=True, slots=True)
class Evidence:
    """A time for one kernel and one call.

    Attributes:
        time_us: median time of a call.
        provenance: where it comes from.
        confidence: 0 to 1, how much it may decide.
        noise: relative spread between repeated measurements; differences below it do not count.
    """

    time_us: float
    provenance: Provenance = Provenance.MEASURED
    confidence: float = 1.0
    noise: float = 0.03


class Verdict(StrEnum):
    """What vetting found out about a kernel and a class of calls on this machine."""

    PASSED = "passed"
    WRONG = "wrong"
    CRASHED = "crashed"


def call_class(facts: Facts) -> tuple[object, ...]:
    """The class of a call: operation, dtype, layout and the power-of-two bucket of each size."""
    buckets = tuple(sorted((name, max(size, 1).bit_length()) for name, size in facts.sizes().items()))
    return (facts["operation"], dtype_name(facts["dtype"]), facts.layout, buckets)  # type: ignore[arg-type]


def call_work(facts: Facts) -> tuple[object, ...]:
    """Everything that changes how long a call takes; the identity under which times are kept."""
    values = facts.to_dict()
    ignored = {"sdpa_disabled", "capturing", "deterministic", "scale"}
    return tuple(sorted((name, str(value)) for name, value in values.items() if name not in ignored))


class Ledger(Protocol):
    """Times, verdicts and failures, as the engine asks for them and reports them."""

    def evidence(self, kernel: Kernel, facts: Facts) -> Evidence | None:
        """A time for this kernel and call, None where nothing is known."""

    def verdict(self, kernel: Kernel, facts: Facts) -> Verdict | None:
        """What vetting said about this kernel and class of calls, None where it was not vetted."""

    def record_time(self, kernel: Kernel, facts: Facts, evidence: Evidence) -> None:
        """Remember a measured time."""

    def record_verdict(self, kernel: Kernel, facts: Facts, verdict: Verdict) -> None:
        """Remember what vetting found."""

    def record_failure(self, kernel: Kernel, facts: Facts, error: str) -> None:
        """Remember that a kernel raised."""

    def failures(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """Errors by (kernel id, operation), oldest first."""


class MemoryLedger:
    """A ledger for the life of the process."""

    MAX_FAILURES_PER_KERNEL = 32

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[tuple[str, tuple[object, ...]], Evidence] = {}
        self._verdicts: dict[tuple[str, tuple[object, ...]], Verdict] = {}
        self._failures: dict[tuple[str, str], list[str]] = {}

    def evidence(self, kernel: Kernel, facts: Facts) -> Evidence | None:
        """A time recorded for exactly this work."""
        return self._times.get((kernel.id, call_work(facts))) if self._times else None

    def verdict(self, kernel: Kernel, facts: Facts) -> Verdict | None:
        """What was recorded for this class of calls."""
        return self._verdicts.get((kernel.id, call_class(facts))) if self._verdicts else None

    def record_time(self, kernel: Kernel, facts: Facts, evidence: Evidence) -> None:
        """Remember a time; the latest wins."""
        with self._lock:
            self._times[kernel.id, call_work(facts)] = evidence

    def record_verdict(self, kernel: Kernel, facts: Facts, verdict: Verdict) -> None:
        """Remember a verdict; the latest wins."""
        with self._lock:
            self._verdicts[kernel.id, call_class(facts)] = verdict

    def record_failure(self, kernel: Kernel, facts: Facts, error: str) -> None:
        """Remember an error, the last 32 of each kernel and operation."""
        with self._lock:
            errors = self._failures.setdefault((kernel.id, str(facts["operation"])), [])
            errors.append(error)
            del errors[: -self.MAX_FAILURES_PER_KERNEL]

    def failures(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """A copy of what failed."""
        with self._lock:
            return {key: tuple(errors) for key, errors in self._failures.items()}
