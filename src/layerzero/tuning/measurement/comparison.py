"""Many calls side by side until the time is over: what :func:`layerzero.tuning.measurement.bench.bench` does of one.

What can run is measured first. What would have to compile is built by children, on a GPU during the measuring and on a
CPU after half of the time, and the calls that waited for it are measured again as a whole: times of one table were
taken in turn.

New times start a new epoch only if they make another kernel the best one.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch

from layerzero.core.errors import LayerZeroError
from layerzero.core.evidence import Evidence, Measurement
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.system import forking
from layerzero.engine import probe
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.failures import out_of_memory
from layerzero.engine.order import replaces
from layerzero.engine.pick import ranked
from layerzero.tuning.measurement.bench import Benched, TimedBy, bench
from layerzero.tuning.measurement.clocks import Clock, CpuClock
from layerzero.tuning.measurement.jobs import Job, long_last
from layerzero.tuning.measurement.loop import NO_TIME, Children, Pairs, TensorParty, run_loop
from layerzero.tuning.measurement.timing import Deadline, Effort, Pace, TimeOverError
from layerzero.tuning.storage.environment import needed_bytes, too_large
from layerzero.tuning.storage.rows import work_of

BEFORE_BUILDS = 0.5
"""The share of the time after which a CPU stops measuring to build what compiles."""

LONG = 1 / 20
"""A call that is likely to take more than this share of the time comes after all others."""

MOST = 1 / 8
"""The samples of a call may take this share of what time is left."""

ONE_BURST_US = 10_000.0
"""Calls that take longer are sampled one by one on a CPU."""

FIRST = 8
"""Calls ahead of which children build: to ask what all of hundreds wait for takes seconds."""

LEAST_S = 0.02
"""Seconds of samples that each kernel gets at least: a hundred bursts of a short call."""

TIME_OVER = "the time was over"


@dataclass(frozen=True, slots=True)
class Compared:
    """What became of calls.

    Attributes:
        found: what was measured, in the order of the calls.
        left: calls that time did not suffice for.
        skipped: calls that cannot be measured here, and why.
        needs_bytes: what those of them need that memory does not hold.
        not_built: kernels that had to compile and were left out of some call, and why.
        seconds: how long it took.
    """

    found: tuple[Benched, ...]
    left: tuple[str, ...]
    skipped: Mapping[str, str]
    needs_bytes: Mapping[str, int]
    not_built: Mapping[str, str]
    seconds: float

    @property
    def cut(self) -> bool:
        """Whether there was more to measure than time sufficed for."""
        return bool(self.left or self.not_built)

    def to_dict(self) -> dict[str, object]:
        others = {name: getattr(self, name) for name in Compared.__slots__ if name != "found"}
        return {"calls": [each.to_dict() for each in self.found], "cut": self.cut, **msgspec.to_builtins(others)}


@dataclass(slots=True, kw_only=True)
class _Comparison(TensorParty):
    time_to_build: Callable[[], bool]
    timed: TimedBy = TimedBy.CALL
    is_long: Callable[[Job], bool] = lambda _: False
    found: dict[int, Benched] = field(default_factory=dict)
    waits: dict[int, set[str]] = field(default_factory=dict)

    def order(self) -> Iterator[Job]:
        """The calls in their order, those that would take much of the time behind all others."""
        return long_last(self.jobs, self.is_long)

    def to_build(self, jobs: Sequence[Job]) -> Pairs:
        """What children can build for these calls. What must be vetted is refused, and the table says so."""
        reports = [self.report(job) for job in jobs if not too_large(job.facts(self.device))]
        return [(kernel, report.facts) for report in reports for kernel in self.unbuilt(report) if kernel.builds_apart]

    def asks(self, asked: int, children: Children) -> bool:
        """On a GPU always; on a CPU once, when half of the time is over."""
        return children.parallel or (not asked and self.time_to_build())

    def pauses(self, number: int, job: Job, children: Children) -> bool:
        """On a CPU the measuring waits for builds."""
        if children.parallel:
            return False
        self.tell(number, job, builds=children.open)
        return True

    def look(self, number: int, job: Job, todo: int, *, again: bool = False) -> str:
        """Measure a call, and tell of it before and after."""
        self.tell(number, job, again=again)
        why = self._measure(number, job, todo)
        self.tell(number, job, None if why else self.found[number], why, again=again)
        if why not in ("", NO_TIME) and not again:
            self.skipped[job.name] = why
        self.rest()
        return why

    def revisits(self, seen: Mapping[int, Job]) -> list[int]:
        """Calls that were measured without something that is built now."""
        return [number for number in sorted(seen) if self._waited(number, seen[number])]

    def _measure(self, number: int, job: Job, todo: int) -> str:
        """Measure a call, one of so many that are still to do; why not, if not."""
        report = self.report(job)
        if why := too_large(report.facts):
            self.needs_bytes[job.name] = needed_bytes(report.facts)
            return why
        if self.pace.seconds(report.facts) > self.deadline.left_s:
            return NO_TIME
        unbuilt = {kernel.id for kernel in self.unbuilt(report)}
        began = time.monotonic()
        try:
            found = bench(
                job,
                self.device,
                effort=self._effort(len(self.entrants(report)) + 1, todo),
                clock=self.clock,
                leave_out=[*self.leave_out, *unbuilt],
                only=self.only,
                timed=self.timed,
                passed=self.deadline.passed,
            )
        except TimeOverError:
            return NO_TIME
        except Exception as error:
            if isinstance(error, LayerZeroError) and not out_of_memory(error):  # the comparison makes no sense
                raise
            return self.trouble(error, job, report)
        self.pace.took(report.facts, time.monotonic() - began)
        self.found[number], self.waits[number] = found, unbuilt
        return ""

    def _effort(self, count: int, todo: int) -> Effort:
        """Of its part of the time a call samples for half; the rest is for making it, its truth and the comparisons."""
        left = self.deadline.left_s
        if left == math.inf:
            return self.effort
        part_s = max(left, 0.0) / max(todo, 1) / 2
        each_s = min(self.effort.budget_s, max(part_s / 3 / max(count, 1), LEAST_S))
        return dataclasses.replace(self.effort, budget_s=each_s, steady_s=part_s, most_s=MOST * left)

    def _waited(self, number: int, job: Job) -> bool:
        """Whether something was built that a call was measured without."""
        missing = self.waits.get(number, set())
        return bool(missing) and bool(missing - {kernel.id for kernel in self.unbuilt(self.report(job))})

    def missing(self) -> dict[str, str]:
        """Kernels that some call was measured without, and why."""
        names = dict.fromkeys(name for number in sorted(self.waits) for name in sorted(self.waits[number]))
        return {name: self.not_built.get(name, TIME_OVER) for name in names}


def compare(jobs: Sequence[Job], device: torch.device, *, clock: Clock, deadline: Deadline, **fields: Any) -> Compared:
    """Measure calls in their order until the time is over; the arguments are those of ``bench``.

    Args:
        deadline: when that is. Without one, whatever compiles does so in this process.
        fields: ``effort``, ``leave_out``, ``only`` and ``timed`` of ``bench``; ``modules`` that register kernels, for
            children that build; ``progress``, called before and after each call; and ``is_long``, whether a call comes
            after all others, called when its turn comes.
    """
    if deadline.left_s < math.inf and type(clock) is CpuClock:
        clock = CpuClock(clock.bursts, ONE_BURST_US)
    to_build = deadline.part(BEFORE_BUILDS)
    party = _Comparison(
        jobs=jobs, device=device, clock=clock, deadline=deadline, batch=FIRST, time_to_build=to_build, **fields
    )
    left = tuple(job.name for job in run_loop(party))
    found = tuple(party.found[number] for number in sorted(party.found))
    return Compared(found, left, party.skipped, party.needs_bytes, party.missing(), deadline.spent_s)


def long_calls(device: torch.device, deadline: Deadline) -> Callable[[Job], bool]:
    """Whether a call is likely to take much of what time is left now; later it may be over."""
    most_s = LONG * deadline.left_s
    return lambda job: not deadline.passed() and Pace().seconds(job.facts(device)) > most_s


def record_times(facts: Facts, times: Mapping[Kernel, Measurement]) -> bool:
    """Remember the times of a tuning window; start a new epoch if they changed the winner, and tell whether they did.

    The winner is what selection would take; :func:`layerzero.engine.order.replaces` says when another one replaces it.
    """
    kinds = sorted({measurement.graph for measurement in times.values()})
    asked = [facts.on(facts.device, capturing=graph) for graph in kinds]
    with _LOCK:
        epoch, held = ENGINE.epoch, _HELD.setdefault(ENGINE.ledger, {})
        before = [_held(held, each, epoch) or _winner(each)[0] for each in asked]
        for kernel, measurement in times.items():
            ENGINE.ledger.record_time(kernel, facts, measurement)
        after = [_next(each, old) for each, old in zip(asked, before, strict=True)]
        held.update(
            (_identity(each), (epoch, winner)) for each, winner in zip(asked, after, strict=True) if winner is not None
        )
    changed = after != before
    if changed:
        ENGINE.new_winner()
    return changed


def _identity(facts: Facts) -> tuple[bytes, bool]:
    return work_of(facts).key, bool(facts["capturing"])


def _held(held: Mapping[tuple[bytes, bool], tuple[int, str]], facts: Facts, epoch: int) -> str | None:
    """The winner that plans were chosen by; None if they were chosen anew since, by what selection takes now."""
    then, winner = held.get(_identity(facts), (epoch, None))
    return winner if then == epoch else None


def _winner(facts: Facts) -> tuple[str | None, Mapping[str, Evidence]]:
    """What selection takes for a call under the process-wide settings, and the evidence of the kernels it may take."""
    policy, ledger = CONFIGURATION.policy, ENGINE.ledger
    kernels = ENGINE.registry.candidates(str(facts["operation"]))
    # what is not legal wins nothing, however fast it was in a tuning run that may compile
    machine = probe.this_machine()
    judged, _ = ENGINE.standings.judge(kernels, facts, policy, machine, ENGINE.health, ledger, by_priority=False)
    legal = [each for each in ranked(judged, facts, policy, ledger) if each.legal]
    evidence = {each.kernel.id: each.evidence for each in legal if each.evidence is not None}
    return (legal[0].kernel.id if legal else None), evidence


def _next(facts: Facts, before: str | None) -> str | None:
    best, evidence = _winner(facts)
    if best is None or before is None or best not in evidence or before not in evidence:
        return best
    return best if replaces(evidence[best], evidence[before]) else before


_HELD: WeakKeyDictionary[Ledger, dict[tuple[bytes, bool], tuple[int, str]]] = WeakKeyDictionary()
"""By ledger, for each work and kind of time: the winner that this process's plans were chosen by, and the epoch."""

_LOCK = forking.lock()
