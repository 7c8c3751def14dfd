"""What is remembered about kernels, as the engine asks for it: in memory here, on disk in ``tuning/storage``."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.evidence import Evidence, Measurement, call_work
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.recipe import CallRecipe, Workspace, elements_of
from layerzero.core.system import forking


class Verdict(StrEnum):
    """What a run in a child process found out about a kernel and a class of calls on this machine."""

    PASSED = "passed"
    WRONG = "wrong"
    CRASHED = "crashed"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A kernel that may have killed a process or a device context, with a class of calls.

    Attributes:
        kernel_id: the kernel.
        call_class: the class, as :func:`class_text` writes it.
        why: what raised the suspicion.
        call: the call that was being made.
        module: where the kernel was registered; a child that does not know the kernel imports it.
        verdict: what a child found; None before any child ran.
        detail: what the child said.
    """

    kernel_id: str
    call_class: str
    why: str
    call: CallRecipe
    module: str
    verdict: Verdict | None = None
    detail: str = ""

    def to_dict(self) -> dict[str, object]:
        return {
            "kernel_id": self.kernel_id,
            "call_class": self.call_class,
            "why": self.why,
            "verdict": None if self.verdict is None else str(self.verdict),
            "detail": self.detail,
        }

    def __str__(self) -> str:
        found = f"found {self.verdict} in a child process" if self.verdict else self.why
        detail = f" ({self.detail})" if self.verdict and self.detail else ""
        return f"{self.kernel_id} for {self.call_class}: {found}{detail}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known of a kernel: a verdict, the class of calls that it was found on, and what was seen there."""

    verdict: Verdict
    call_class: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.verdict} for {self.call_class}" + (f": {self.detail}" if self.detail else "")


def deciding(own: Judgement | None, wrong: Judgement | None) -> Judgement | None:
    """The judgement that decides about a class: its own, unless the kernel gave a wrong result on any other.

    A kernel that was wrong once is trusted nowhere; one that died or hung may do so for its sizes only. Where facts
    tell classes apart (``Operation.class_facts``), a wrong result is about its own class alone.
    """
    if own is not None and own.verdict is not Verdict.PASSED:
        return own
    return wrong or own


def call_class(facts: Facts) -> tuple[object, ...]:
    """The class of a call: operation, dtype, layout and the power-of-two bucket of each size.

    An operation that names ``class_facts`` has those in place of the sizes.
    """
    told_by = facts.operation.class_facts
    if told_by:
        named = tuple([(name, str(facts[name])) for name in told_by])
        return (facts["operation"], dtype_name(facts["dtype"]), facts.layout, named)  # type: ignore[arg-type]
    buckets = tuple(sorted([(name, bits or 1) for name, bits in facts.size_classes()]))
    return (facts["operation"], dtype_name(facts["dtype"]), facts.layout, buckets)  # type: ignore[arg-type]


def class_text(facts: Facts) -> str:
    """The class of a call in a line; each size as the power of two that it stays below."""
    operation, dtype, layout, buckets = call_class(facts)
    sizes = " ".join(
        f"{name}={bits}" if isinstance(bits, str) else f"{name}<{2**bits}"
        for name, bits in buckets  # type: ignore[attr-defined]  # pairs, see above
    )
    return " ".join(str(part) for part in (operation, dtype, layout, sizes) if part)


def work_text(facts: Facts) -> str:
    """The class of a call in a line, and a hash of the very work: other sizes or strides have another one."""
    return f"{class_text(facts)} work {_digest(call_work(facts))}"


def capture_text(facts: Facts) -> str:
    """The class of a call in a line, and a hash of its arguments: what a graph keeps of a call depends on both."""
    left = {*facts.sizes(), "memory", "row_alignment", "device_name"}
    return f"{class_text(facts)} with {_digest([each for each in call_work(facts) if each[0] not in left])}"


def _digest(values: object) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


class Libraries(Protocol):
    """The libraries that a question is about, where they are others than those of this process."""

    @property
    def torch(self) -> str:
        """The version of torch."""

    def version(self, backend: Backend, device: Device) -> str | None:
        """The version of a library; empty where nothing tells, None where it is absent."""


class Ledger:
    """Times, verdicts and failures, as the engine asks for them and reports them: here for the life of the process."""

    MAX_FAILURES_PER_KERNEL = 32

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._times: dict[tuple[object, ...], dict[str, Evidence]] = {}
        self._verdicts: dict[str, dict[str, Judgement]] = {}
        self._failures: dict[tuple[str, str], list[str]] = {}
        self._suspects: dict[tuple[str, str], Suspect] = {}
        self._captures: dict[tuple[str, str], tuple[int, str]] = {}  # in their order
        self._order = itertools.count()
        self._workspaces: dict[tuple[str, str], Workspace] = {}

    def evidence(
        self,
        kernels: Sequence[Kernel],
        facts: Facts,
        libraries: Libraries | None = None,  # noqa: ARG002  # no version is kept here
    ) -> Mapping[str, Evidence]:
        """The times that are known of these kernels for a call, by kernel id; of these libraries, or of those here."""
        times = self._times.get(call_work(facts)) if self._times else None
        return {each.id: times[each.id] for each in kernels if each.id in times} if times else {}

    def untimed(self, facts: Facts) -> bool:  # noqa: ARG002  # others keep more
        """Whether no kernel has a time for a call, as far as that is known without a search."""
        return not self._times

    def on_record(self, kernels: Sequence[Kernel]) -> Collection[str]:  # noqa: ARG002  # others keep more
        """Ids of those kernels with a verdict or a suspicion of any class; read once a miss."""
        if not self._verdicts and not self._suspects:
            return ()
        with self._lock:
            return {*self._verdicts, *(kernel_id for kernel_id, _ in self._suspects)}

    def verdict(self, kernel: Kernel, facts: Facts) -> Verdict | None:
        """What vetting said about this kernel and class of calls, None where it was not vetted."""
        found = self.judgement(kernel, facts)
        return None if found is None else found.verdict

    def judgement(self, kernel: Kernel, facts: Facts) -> Judgement | None:
        """The verdict that decides about this class of calls, with what was seen: its own, or a wrong result of any."""
        known = self._verdicts.get(kernel.id)
        if not known:
            return None
        with self._lock:
            own = known.get(class_text(facts))
            if facts.operation.class_facts:
                return own
            return deciding(own, next((each for each in known.values() if each.verdict is Verdict.WRONG), None))

    def record_time(self, kernel: Kernel, facts: Facts, measurement: Measurement) -> None:
        """Remember a measured time; the latest wins."""
        with self._lock:
            times = self._times.setdefault(call_work(facts), {})
            times[kernel.id] = Evidence(measurement.median_us, noise=measurement.noise, error=measurement.error)

    def record_verdict(self, kernel: Kernel, facts: Facts, verdict: Verdict, detail: str = "") -> None:
        """Remember what vetting found; the latest wins."""
        name = class_text(facts)
        with self._lock:
            self._verdicts.setdefault(kernel.id, {})[name] = Judgement(verdict, name, detail)

    def record_failure(self, kernel: Kernel, facts: Facts, error: str) -> None:
        """Remember that a kernel raised: the last 32 errors of each kernel and operation."""
        with self._lock:
            errors = self._failures.setdefault((kernel.id, str(facts["operation"])), [])
            errors.append(error)
            del errors[: -self.MAX_FAILURES_PER_KERNEL]

    def failures(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """Errors by (kernel id, operation), oldest first."""
        with self._lock:
            return {key: tuple(errors) for key, errors in self._failures.items()}

    def record_capture(self, kernel: Kernel, facts: Facts, why: str, *, work: bool = False) -> None:
        """Remember what came of a capture: empty if its replays were right, else why a capture may not have the kernel.

        It holds for the class of captured calls, with ``work`` for this very work, and until a version changes.
        """
        self._captures[kernel.id, work_text(facts) if work else capture_text(facts)] = next(self._order), why

    def capture(self, kernel: Kernel, facts: Facts) -> str | None:
        """What came of captures of this very work or of its class, the later one of both; None if none was tried."""
        known = self._captures
        if not known:
            return None
        seen = [known.get((kernel.id, what), (-1, None)) for what in (work_text(facts), capture_text(facts))]
        return max(seen, key=lambda each: each[0])[1]

    def record_workspace(self, kernel: Kernel, facts: Facts, count: int) -> None:
        """Remember bytes that a kernel took besides its results, for this class of calls."""
        self._workspaces[kernel.id, class_text(facts)] = Workspace(count, elements_of(facts), f"{datetime.now(UTC):%F}")

    def workspace(self, kernel: Kernel, facts: Facts) -> Workspace | None:
        """What was measured of a kernel and class, for a call of it; None where nothing was."""
        found = self._workspaces.get((kernel.id, class_text(facts))) if self._workspaces else None
        return None if found is None else found.of(facts)

    def unproved(self, kernel: Kernel, facts: Facts) -> bool:  # noqa: ARG002  # others keep more
        """Whether a class never ran here, as far as that is remembered; asks only, and writes nothing."""
        return False

    def begin(self, kernel: Kernel, facts: Facts) -> object | None:  # noqa: ARG002  # others keep more
        """Commit a marker before a class runs for the first time here; None where it ran before, and in memory."""
        return None

    def accept(self, marker: object) -> None:
        """Take a marker away: the first result was accepted, and no marker is needed for this class again."""

    def withdraw(self, marker: object) -> None:
        """Take a marker away: the first run ended in an exception, which is not what markers are for."""

    def suspicion(self, kernel: Kernel, facts: Facts) -> str | None:
        """Why this kernel may not run this class until a child process cleared it; None if it may."""
        found = self._suspects.get((kernel.id, class_text(facts))) if self._suspects else None
        return found.why if found is not None and found.verdict is None else None

    def suspect(self, kernel: Kernel, facts: Facts, why: str) -> None:
        found = Suspect(kernel.id, class_text(facts), why, CallRecipe.of(facts), home_of(kernel))
        with self._lock:
            self._suspects[found.kernel_id, found.call_class] = found

    def suspects(self) -> tuple[Suspect, ...]:
        """Every suspect, and every one that a child found guilty."""
        with self._lock:
            return tuple(self._suspects.values())

    def settle(self, suspect: Suspect, verdict: Verdict, detail: str) -> None:
        """Remember what a child found: passed clears the suspect, anything else bans it."""
        with self._lock:
            self._suspects.pop((suspect.kernel_id, suspect.call_class), None)
            known = self._verdicts.setdefault(suspect.kernel_id, {})
            known.pop(suspect.call_class, None)
            if verdict is not Verdict.PASSED:
                known[suspect.call_class] = Judgement(verdict, suspect.call_class, detail)
                settled = replace(suspect, verdict=verdict, detail=detail)
                self._suspects[suspect.kernel_id, suspect.call_class] = settled

    def called(self, facts: Facts) -> None:
        """Remember that a call was chosen for, so that tuning measures first what this machine runs; never waits."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Remember no call meanwhile, of any thread: calls of a test are invented, not what this machine runs."""
        return nullcontext()

    def calls(self) -> Sequence[tuple[int, CallRecipe]]:
        """What was called on this machine and how often it was chosen for, the latest first; bounded."""
        return ()

    def notes(self) -> tuple[str, ...]:
        """What is wrong with the place where things are remembered, for doctor."""
        return ()


def home_of(kernel: Kernel) -> str:
    """The module that registers a kernel: where its load function lives; ``python -m name`` has a name, too."""
    load = inspect.unwrap(kernel.load)
    load = load.func if isinstance(load, functools.partial) else load
    module = getattr(load, "__module__", None) or ""
    spec = getattr(sys.modules.get(module), "__spec__", None) if module == "__main__" else None
    return spec.name if spec is not None else module
