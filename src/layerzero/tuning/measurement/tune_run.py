"""A tuning run: what of each call is measured, what is remembered, and what the call gets then.

What can run here is measured at once, and remembered; what vetting or a build kept from a call is measured later,
against the best of its call. What never ran on this machine runs in a child process first.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from layerzero.core.device import Device
from layerzero.core.errors import LayerZeroWarning
from layerzero.core.evidence import Evidence, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import class_text
from layerzero.core.plan import Report
from layerzero.core.system import warn
from layerzero.engine import legality
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.jit import build_of, is_kept
from layerzero.engine.order import costs
from layerzero.engine.policy import names_any
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.answers import explain
from layerzero.tuning.measurement.admission import hopeless, outdone
from layerzero.tuning.measurement.comparison import record_times
from layerzero.tuning.measurement.contest import Contest, Status, contest
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.measurement.loop import BETWEEN, NO_TIME, Children, Pairs, TensorParty
from layerzero.tuning.measurement.timing import TimeOverError
from layerzero.tuning.prediction.fitting import FULL_SAMPLES
from layerzero.tuning.storage.environment import needed_bytes, too_large
from layerzero.tuning.verification.rehearsal import is_new, rehearse

USABLE = 0.5
"""Confidence from which on times decide more than priority does; below it they are measured again."""


MOST_SHARE = 3
"""A call that is likely to take more than a third of the time left is left to another run where others wait for theirs:
of three runs of 90 s two ended after 100 and 104, and one after 92 with it (AMD EPYC, two cores, 2026-11-23)."""


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """What a call gets after it was measured.

    Attributes:
        kernel_id: what is chosen now; None if nothing is.
        confidence: how much the times may decide: that of the least certain one.
        too_noisy: whether that is too little, and priority decides; the call is measured again by the next run.
        builds: whether it was compiled in this process only: another one builds it before it runs it.
        before: what was chosen before anything of the call was measured, with what was built then.
    """

    kernel_id: str | None
    confidence: float
    too_noisy: bool
    builds: bool = False
    before: str | None = None


@dataclass(slots=True, kw_only=True)
class TuningRun(TensorParty):
    """One tuning run as it goes on."""

    again: bool = False
    isolate: bool = True
    banned: dict[tuple[str, str], tuple[Status, str]] = field(default_factory=dict)
    in_process: dict[str, str] = field(default_factory=dict)
    contests: dict[int, Contest] = field(default_factory=dict)
    before: dict[int, str | None] = field(default_factory=dict)
    too_large: dict[int, str] = field(default_factory=dict)
    prepared: int = 0
    known: int = 0
    spared: set[tuple[int, str]] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)

    @property
    def usable(self) -> float:
        """The confidence that is enough: fewer samples, where they are set, cannot be worth more."""
        return USABLE * min(1.0, self.effort.samples / FULL_SAMPLES)

    def out(self, report: Report, evidence: Mapping[str, Evidence]) -> set[str]:
        """Ids of kernels that cannot win, and of those that a capture refused; they are not measured again."""
        facts = self.served_facts(report.facts)
        legal = [each for each in report.candidates if each.legal]
        kept = {each.kernel.id for each in legal if self.graph and ENGINE.ledger.capture(each.kernel, facts)}
        return hopeless(evidence) | outdone(legal, evidence, facts, self.device) | kept

    def unknown(self, kernels: Iterable[Kernel], report: Report) -> list[Kernel]:
        """Those without a usable time that was measured here, and without a failure before."""
        several = list(kernels)
        if self.again:
            return several
        facts = self.served_facts(report.facts)
        evidence, failures = costs(ENGINE.ledger.evidence(several, facts), several), ENGINE.ledger.failures()
        out = self.out(report, evidence)
        return [
            kernel
            for kernel in several
            if (kernel.id, report.operation) not in failures
            and kernel.id not in out
            and not (
                kernel.id in evidence
                and evidence[kernel.id].provenance == Provenance.MEASURED
                and not evidence[kernel.id].stands_in
                and evidence[kernel.id].confidence >= self.usable
            )
        ]

    def spared_in(self, report: Report) -> set[str]:
        """Ids of kernels that take no part, by what this machine knows of them."""
        if self.again:
            return set()
        parties = self.entrants(report)
        evidence = costs(ENGINE.ledger.evidence(parties, self.served_facts(report.facts)), parties)
        return self.out(report, evidence) & {each.id for each in parties}

    def compiles_elsewhere(self, kernel: Kernel) -> bool:
        """Whether children build it, or, with a deadline, nothing does."""
        return (self.isolate and kernel.builds_apart) or self.deadline.left_s < math.inf

    def to_vet(self, jobs: Iterable[Job]) -> Pairs:
        """What only vetting keeps from these calls, and no child was given before."""
        here = Device.detect(str(self.device))
        if not self.isolate or not any(legality.untrusted(each, here) for each in REGISTRY.kernels()):
            return []
        asked = {name for name, each in self.verdicts.items() if each.reached}
        return [
            (kernel, report.facts)
            for report in map(self.report, jobs)
            for kernel in legality.awaiting(report.candidates, report.facts)
            if (kernel.id, class_text(report.facts)) not in asked
            and not names_any(self.leave_out, kernel)
            and (kernel.graph_safe or not self.graph)
        ]

    def to_build(self, jobs: Iterable[Job]) -> Pairs:
        """What children can build for these calls, and has no time yet: what would be chosen, then what is near it."""
        return [pair for _, pair in sorted(self._to_build(jobs), key=operator.itemgetter(0))]

    def winners(self, jobs: Iterable[Job]) -> Pairs:
        """Those of them that these calls would choose if they were built, as far as is known."""
        jobs = [each for each in jobs if not too_large(each.facts(self.device))]
        return [pair for times, pair in self._to_build(jobs) if times <= 1.0]

    def _to_build(self, jobs: Iterable[Job]) -> list[tuple[float, tuple[Kernel, Facts]]]:
        return [
            (times_the_chosen(kernel, serving), (kernel, report.facts))
            for report in map(self.report, jobs if self.isolate else ())
            for serving in (self.served(report),)
            for kernel in self.unknown(self.unbuilt(report), report)
            if kernel.builds_apart and self.may_build(kernel, report.facts)
        ]

    def prepare(self, jobs: Sequence[Job], children: Children) -> None:
        """Ask children for what these calls wait for, and rehearse what is new; the first time, winners come first."""
        for number, job in enumerate(jobs, self.prepared + 1):
            if why := too_large(job.facts(self.device)):
                self.too_large[number] = why
        here = [job for number, job in enumerate(jobs, self.prepared + 1) if number not in self.too_large]
        ahead = self.jobs[: self.batch * self.growth] if children.parallel and not self.prepared else ()
        children.ask(here, self.winners(ahead))
        self.prepared += len(jobs)
        self._rehearse(here)

    def _rehearse(self, jobs: Iterable[Job]) -> None:
        """Let a child run what these calls would run for the first time."""
        if not self.isolate:
            return
        pairs = []
        for report in map(self.report, jobs):
            ready = [kernel for kernel in self.entrants(report) if kernel not in self.unbuilt(report)]
            if self.unknown(ready, report):
                pairs += [(kernel, report.facts) for kernel in ready if is_new(kernel, report.facts)]
        stop = self.deadline.part(BETWEEN)
        for kernel, facts, reply in rehearse(pairs, modules=self.modules, stop=stop) if pairs else ():
            if reply.guilty:
                self.banned[kernel.id, class_text(facts)] = Status.BANNED, f"{reply.verdict}: {reply.detail}"
            elif reply.unsafe:
                self.banned[kernel.id, class_text(facts)] = Status.UNTRIED, reply.detail
            elif reply.verdict is None and kernel.id not in self.in_process:
                self.in_process[kernel.id] = reply.detail
                what = f"{kernel.id} runs in this process for the first time, although isolate=True"
                repair = "modules=[...] names what registers it, leave_out leaves it out"
                text = f"{what}: no child process could try it: {reply.detail}; {repair}"
                warn(text, LayerZeroWarning, stacklevel=2)

    def _measure(self, number: int, job: Job) -> str:
        """Measure what can run now; of a call that was measured before, what came to it since. Why not, if not."""
        report = self.report(job)
        unbuilt, spared = {kernel.id for kernel in self.unbuilt(report)}, self.spared_in(report)
        ready = [kernel for kernel in self.entrants(report) if kernel.id not in unbuilt]
        self.waiting = self.waiting | {number} if unbuilt else self.waiting - {number}
        before = self.contests.get(number)
        new = self.unknown(ready, report)
        if before is not None:
            new = [kernel for kernel in new if kernel.id not in {each.kernel.id for each in before.entries}]
        for kernel in self.entrants(report):
            if kernel.id in unbuilt and not (self.isolate and kernel.builds_apart):
                where = "it compiles in this process, for an unknown time; lz.warmup builds it"
                self.unbuilt_why[build_of(kernel, report.facts)] = where
        if not new:
            return "" if before is not None else "known"
        if why := self.too_large.get(number):
            self.needs_bytes[job.name] = needed_bytes(report.facts)
            return "" if before is not None else why
        if self.pace.seconds(report.facts) > self.deadline.left_s / min(MOST_SHARE, len(self.jobs) - number + 1):
            return "" if before is not None else NO_TIME
        rivals = () if before is None else before.contenders
        only = [each.id for each in (*(entry.kernel for entry in rivals), *new)] if rivals else []
        self.before.setdefault(number, explain(self.served_facts(report.facts)).kernel_id)
        began = time.monotonic()
        try:
            count = len(only) or len(ready)
            found = self._contest(job, report.facts, unbuilt | spared, only, count)
        except TimeOverError:
            return "" if before is not None else NO_TIME
        except Exception as error:  # noqa: BLE001  # it is reported
            return self.trouble(error, job, report)
        self.pace.took(report.facts, time.monotonic() - began)
        self.spared |= {(number, name) for name in spared}
        if found.times and record_times(found.facts, found.times):
            self.changed.add(number)
        self.contests[number] = found if before is None else before.joined(found)
        return ""

    def look(self, number: int, job: Job, todo: int, *, again: bool = False) -> str:  # noqa: ARG002
        """Measure a call, and tell of it before and after, the first time."""
        if again:
            why = self._measure(number, job)
            if why not in ("", "known"):
                self.skipped.setdefault(job.name, why)
            return why
        self.tell(number, job)
        why = self._measure(number, job)
        self.tell(number, job, self.contests.get(number), why)
        self.known += why == "known"
        if why not in ("", "known", NO_TIME):
            self.skipped[job.name] = why
        self.rest()
        return why

    def _contest(self, job: Job, facts: Facts, unbuilt: Collection[str], only: Sequence[str], count: int) -> Contest:
        banned = {kernel: text for (kernel, class_), text in self.banned.items() if class_ == class_text(facts)}
        left = self.deadline.left_s
        each_s = self.effort.budget_s if left == math.inf else min(self.effort.budget_s, _share(left, count))
        return contest(
            job.make(self.device),
            effort=dataclasses.replace(self.effort, budget_s=each_s, steady_s=left / 4),
            graph=self.graph,
            leave_out=[*self.leave_out, *unbuilt],
            only=only,
            banned=banned,
            clock=self.clock,
            passed=self.deadline.passed,
        )

    def choices(self) -> list[TunedChoice]:
        """What the measured calls get now that everything is recorded: what came later may have changed it.

        Plans that were kept because their kernel is about as good as another one go, so that calls get what is
        reported.
        """
        found = [
            choice_now(each, self.served_facts(each.facts), self.before[number], self.usable)
            for number, each in sorted(self.contests.items())
        ]
        if any(each.kernel_id != each.before for each in found):
            ENGINE.new_winner()
        return found


def choice_now(found: Contest, facts: Facts, before: str | None, usable: float) -> TunedChoice:
    """What a call gets after its times were recorded; ``usable`` is the confidence that is enough."""
    evidence = costs(ENGINE.ledger.evidence(list(found.times), facts), found.times)
    confidence = min((each.confidence for each in evidence.values()), default=0.0)
    chosen = explain(facts).chosen
    builds = chosen is not None and chosen.kernel.jit and not is_kept(chosen.kernel, facts)
    too_noisy = bool(found.times) and confidence < usable
    return TunedChoice(None if chosen is None else chosen.kernel.id, confidence, too_noisy, builds, before)


def times_the_chosen(kernel: Kernel, report: Report) -> float:
    """Its predicted cost over that of the kernel that would be chosen, in tenths; infinite without a prediction.

    Only the chosen one has 1: a kernel that is as good by the prediction comes right after it. Tenths let calls keep
    their order where no more than the doubts of a prediction is between them.
    """
    if kernel.id == report.kernel_id:
        return 1.0
    costs_us = {each.kernel.id: each.cost_us for each in report.candidates}
    own_us, best_us = costs_us.get(kernel.id), costs_us.get(report.kernel_id or "")
    return max(1.05, round(own_us / best_us, 1)) if own_us and best_us else math.inf


def _share(left_s: float, count: int) -> float:
    """Seconds for each of so many kernels, timed up to three times, that leave half of the time."""
    return max(left_s, 0.0) / 2 / 3 / max(count, 1)
