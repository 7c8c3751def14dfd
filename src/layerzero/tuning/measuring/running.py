"""A tuning run: calls in their order until its time is over; what compiles or has to be vetted comes to them later.

What can run here is measured at once. What only vetting or a build keeps from a call is handed to child processes: on a
GPU they work beside the measuring, on a CPU between two batches of calls, since they would disturb it. What came out of
them is then measured beside the best of its call. Nothing that takes an unknown time happens in this process while
there is a deadline: children are killed when it passes.
"""

from __future__ import annotations

import dataclasses
import operator
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from layerzero.asking.answers import explain
from layerzero.core.device import Device
from layerzero.core.errors import LayerZeroWarning
from layerzero.core.evidence import Evidence, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import class_text
from layerzero.core.plan import Report
from layerzero.engine import legality
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.jit import BUILT, is_kept
from layerzero.engine.order import costs
from layerzero.engine.policy import names_kernel
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measuring.admission import hopeless, outdone
from layerzero.tuning.measuring.beside import BETWEEN, Beside, Pairs, times_the_chosen
from layerzero.tuning.measuring.clocks import clock_of
from layerzero.tuning.measuring.contest import Contest, Status, contest
from layerzero.tuning.measuring.in_turn import InTurn
from layerzero.tuning.measuring.jobs import Job
from layerzero.tuning.measuring.machine_state import needed_bytes, too_large
from layerzero.tuning.measuring.timing import Deadline, Effort, TimeOverError
from layerzero.tuning.measuring.tuned import Choice, Progress, Step, Tuned
from layerzero.tuning.predicting.weighing import FULL_SAMPLES
from layerzero.tuning.predicting.winner import record_times
from layerzero.tuning.proving.rehearsal import is_new, rehearse
from layerzero.tuning.proving.vetting import Vetted

AT_ONCE, GROWTH = 16, 4
"""Calls whose new kernels child processes run before the first is timed, and how many times more the next time: each
round costs seconds, most of them for importing torch and compiling anew, but the first times should not wait long."""

USABLE = 0.5
"""Confidence from which on times decide more than priority does; below it they are measured again."""


NO_TIME = "no time left for a call of its size"

MOST_SHARE = 3
"""A call that is likely to take more than a third of the time left is left to another run where others wait for theirs:
of three runs of 90 s two ended after 100 and 104, and one after 92 with it (AMD EPYC, two cores, 2026-11-23)."""


@dataclass(slots=True, kw_only=True)
class _Run(InTurn):
    """One tuning run as it goes on."""

    again: bool
    isolate: bool
    banned: dict[tuple[str, str], tuple[Status, str]] = field(default_factory=dict)
    in_process: dict[str, str] = field(default_factory=dict)
    contests: dict[int, Contest] = field(default_factory=dict)
    before: dict[int, str | None] = field(default_factory=dict)
    too_large: dict[int, str] = field(default_factory=dict)
    known: int = 0
    spared: set[tuple[int, str]] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    """Calls with a kernel that was not built when they were looked at."""

    @property
    def usable(self) -> float:
        """The confidence that is enough: fewer samples, where they were asked for, cannot be worth more."""
        return USABLE * min(1.0, self.effort.samples / FULL_SAMPLES)

    def out(self, report: Report, evidence: Mapping[str, Evidence]) -> set[str]:
        """Ids of kernels that cannot win, and of those that a capture refused; with them nobody begins again."""
        facts = self.asked(report.facts)
        legal = [each for each in report.candidates if each.legal]
        kept = {each.kernel.id for each in legal if self.graph and ENGINE.ledger.uncaptured(each.kernel, facts)}
        return hopeless(evidence) | outdone(legal, evidence, facts, self.device) | kept

    def unknown(self, kernels: Iterable[Kernel], report: Report) -> list[Kernel]:
        """Those without a usable time that was measured here, and without a failure before."""
        several = list(kernels)
        if self.again:
            return several
        facts = self.asked(report.facts)
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
        parties = self.parties(report)
        evidence = costs(ENGINE.ledger.evidence(parties, self.asked(report.facts)), parties)
        return self.out(report, evidence) & {each.id for each in parties}

    def unbuilt(self, report: Report) -> list[Kernel]:
        """Those of them that would compile in this process: for children, or, with a deadline, for nobody."""
        return [
            kernel
            for kernel in self.parties(report)
            if kernel.jit
            and not BUILT.ready(kernel, report.facts)
            and ((self.isolate and kernel.builds_apart) or self.deadline.left_s < float("inf"))
        ]

    @property
    def verdicts(self) -> dict[tuple[str, str], Vetted]:
        """What came of vetting at last, by kernel and class."""
        return {(each.kernel_id, each.call_class): each for each in self.vetted}

    @property
    def not_reached(self) -> int:
        """How many classes children had no time to vet."""
        return sum(not each.reached for each in self.verdicts.values())

    def to_vet(self, jobs: Iterable[Job]) -> Pairs:
        """What only vetting keeps from these calls, and no child was asked about before."""
        here = Device.detect(str(self.device))
        if not self.isolate or not any(legality.untrusted(each, here) for each in REGISTRY.kernels()):
            return []
        asked = {name for name, each in self.verdicts.items() if each.reached}
        return [
            (kernel, report.facts)
            for report in map(self.report, jobs)
            for kernel in legality.awaiting(report.candidates, report.facts)
            if (kernel.id, class_text(report.facts)) not in asked
            and not any(names_kernel(pattern, kernel) for pattern in self.leave_out)
            and (kernel.graph_safe or not self.graph)
        ]

    def to_build(self, jobs: Iterable[Job]) -> Pairs:
        """What children can build for these calls, and has no time yet: what would be chosen, then what is near it."""
        return [pair for _, pair in sorted(self._to_build(jobs), key=operator.itemgetter(0))]

    def winners(self, jobs: Iterable[Job]) -> Pairs:
        """Those of them that these calls would choose if they were built, as far as anybody knows."""
        jobs = [each for each in jobs if not too_large(each.facts(self.device))]
        return [pair for times, pair in self._to_build(jobs) if times <= 1.0]

    def _to_build(self, jobs: Iterable[Job]) -> list[tuple[float, tuple[Kernel, Facts]]]:
        return [
            (times_the_chosen(kernel, serving), (kernel, report.facts))
            for report in map(self.report, jobs if self.isolate else ())
            for serving in (self.serving(report),)
            for kernel in self.unknown(self.unbuilt(report), report)
            if kernel.builds_apart and kernel.id not in self.not_built
        ]

    def rehearse(self, jobs: Iterable[Job]) -> None:
        """Let a child run what these calls would run for the first time."""
        if not self.isolate:
            return
        pairs = []
        for report in map(self.report, jobs):
            ready = [kernel for kernel in self.parties(report) if kernel not in self.unbuilt(report)]
            if self.unknown(ready, report):
                pairs += [(kernel, report.facts) for kernel in ready if is_new(kernel, report.facts)]
        stop = self.deadline.part(BETWEEN)
        for each in rehearse(pairs, modules=self.modules, stop=stop) if pairs else ():
            if each.guilty or each.unsafe:
                told = (
                    (Status.BANNED, f"{each.verdict}: {each.detail}") if each.guilty else (Status.UNTRIED, each.detail)
                )
                self.banned[each.kernel.id, class_text(each.facts)] = told
            elif each.verdict is None and each.kernel.id not in self.in_process:
                self.in_process[each.kernel.id] = each.detail
                what = f"{each.kernel.id} runs in this process for the first time, although isolate=True"
                repair = "modules=[...] names what registers it, leave_out leaves it out"
                text = f"{what}: no child process could be asked: {each.detail}; {repair}"
                warnings.warn(text, LayerZeroWarning, stacklevel=2)

    def measure(self, number: int, job: Job) -> str:
        """Measure what can run now; of a call that was measured before, what came to it since. Why not, if not."""
        report = self.report(job)
        unbuilt, spared = {kernel.id for kernel in self.unbuilt(report)}, self.spared_in(report)
        ready = [kernel for kernel in self.parties(report) if kernel.id not in unbuilt]
        self.waiting = self.waiting | {number} if unbuilt else self.waiting - {number}
        before = self.contests.get(number)
        new = self.unknown(ready, report)
        if before is not None:
            new = [kernel for kernel in new if kernel.id not in {each.kernel.id for each in before.entries}]
        for kernel in self.parties(report):
            if kernel.id in unbuilt and not (self.isolate and kernel.builds_apart):
                self.not_built[kernel.id] = "it compiles in this process, for an unknown time; lz.warmup builds it"
        if not new:
            return "" if before is not None else "known"
        if why := self.too_large.get(number):
            self.needs_bytes[job.name] = needed_bytes(report.facts)
            return "" if before is not None else why
        if self.pace.seconds(report.facts) > self.deadline.left_s / min(MOST_SHARE, len(self.jobs) - number + 1):
            return "" if before is not None else NO_TIME
        rivals = () if before is None else before.contenders
        only = [each.id for each in (*(entry.kernel for entry in rivals), *new)] if rivals else []
        self.before.setdefault(number, explain(self.asked(report.facts)).kernel_id)
        began = time.monotonic()
        try:
            count = len(only) or len(ready)
            found = self._contest(job, report.facts, unbuilt | spared, only, count)
        except TimeOverError:
            return "" if before is not None else NO_TIME
        except Exception as error:  # noqa: BLE001  # it is told
            return self.trouble(error, job, report)
        self.pace.took(report.facts, time.monotonic() - began)
        self.spared |= {(number, name) for name in spared}
        if found.times and record_times(found.facts, found.times):
            self.changed.add(number)
        self.contests[number] = found if before is None else before.joined(found)
        return ""

    def _contest(self, job: Job, facts: Facts, unbuilt: Collection[str], only: Sequence[str], count: int) -> Contest:
        banned = {kernel: text for (kernel, class_), text in self.banned.items() if class_ == class_text(facts)}
        left = self.deadline.left_s
        each_s = self.effort.budget_s if left == float("inf") else min(self.effort.budget_s, _share(left, count))
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

    def choices(self) -> list[Choice]:
        """What the measured calls get now that everything is recorded: what came later may have changed it.

        Plans that were kept because their kernel is about as good as another one go, so that calls get what is told.
        """
        found = [self._choice(self.contests[number], self.before[number]) for number in sorted(self.contests)]
        if any(each.kernel_id != each.before for each in found):
            ENGINE.new_winner()
        return found

    def _choice(self, found: Contest, before: str | None) -> Choice:
        facts = self.asked(found.facts)
        evidence = costs(ENGINE.ledger.evidence(list(found.times), facts), found.times)
        confidence = min((each.confidence for each in evidence.values()), default=0.0)
        chosen = explain(facts).chosen
        builds = chosen is not None and chosen.kernel.jit and not is_kept(chosen.kernel, facts)
        too_noisy = bool(found.times) and confidence < self.usable
        return Choice(None if chosen is None else chosen.kernel.id, confidence, too_noisy, builds, before)


def _share(left_s: float, count: int) -> float:
    """Seconds for each of so many kernels, timed up to three times, that leave half of the time."""
    return max(left_s, 0.0) / 2 / 3 / max(count, 1)


def _batches(jobs: Sequence[Job]) -> Iterator[list[tuple[int, Job]]]:
    """Calls with their numbers, a few at first."""
    numbered, begin, size = list(enumerate(jobs, 1)), 0, AT_ONCE
    while begin < len(numbered):
        yield numbered[begin : begin + size]
        begin, size = begin + size, size * GROWTH


def run_jobs(
    jobs: Sequence[Job],
    device: torch.device,
    *,
    effort: Effort,
    budget_s: float | None = None,
    again: bool = False,
    graph: bool = False,
    isolate: bool = True,
    modules: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> Tuned:
    """Measure jobs in their order until the budget is spent; ``deadline`` stands for it where a run began before."""
    deadline, tell = deadline or Deadline(budget_s), progress or (lambda _: None)
    if graph:
        jobs = [dataclasses.replace(job, for_graph=True) for job in jobs]
    run = _Run(
        jobs=jobs,
        device=device,
        clock=clock_of(device, graph=graph),
        effort=effort,
        deadline=deadline,
        modules=modules,
        leave_out=leave_out,
        graph=graph,
        again=again,
        isolate=isolate,
    )
    beside = Beside(run)
    looked_at: dict[int, Job] = {}

    def step(number: int, job: Job, skipped: str = "", *, done: bool = True) -> None:
        left = None if deadline.left_s == float("inf") else max(deadline.left_s, 0.0)
        tell(Step(job, number, len(jobs), run.contests.get(number) if done else None, skipped, left))

    def look_again(numbers: Iterable[int]) -> None:
        for number in numbers:
            if deadline.passed():
                return
            job = looked_at[number]
            if why := run.measure(number, job):
                run.skipped.setdefault(job.name, why) if why != "known" else None

    def revisit(*, wait_for: bool = False) -> None:
        if beside.caught_up(wait_for=wait_for):
            look_again(list(looked_at))

    try:
        first = run.winners(jobs[: AT_ONCE * GROWTH]) if beside.beside else ()
        for batch in _batches(jobs):
            if deadline.passed():
                break
            run.too_large |= {number: why for number, job in batch if (why := too_large(job.facts(device)))}
            here = [job for number, job in batch if number not in run.too_large]
            beside.ask(here, first)
            first = ()
            run.rehearse(here)
            for number, job in batch:
                if deadline.passed():
                    break
                step(number, job, done=False)
                why = run.measure(number, job)
                if why == NO_TIME:
                    step(number, job, why)
                    continue
                looked_at[number] = job
                run.known += why == "known"
                if why and why != "known":
                    run.skipped[job.name] = why
                step(number, job, why)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                if beside.built_one():  # who waits for it comes before calls that nobody looked at: batches grow
                    look_again(sorted(run.waiting & looked_at.keys()))
            revisit()
        while not deadline.passed():
            left = run.not_reached
            again = left > 0 and not beside.open
            if again:  # a part of the time did not suffice for them
                beside.ask(list(looked_at.values()))
            if not beside.open:
                break
            revisit(wait_for=True)
            if again and left <= run.not_reached:  # nor would another
                break
    finally:
        beside.end()
    return _tuned(run, len(jobs) - len(looked_at))


def _tuned(run: _Run, left: int) -> Tuned:
    numbers = sorted(run.contests)
    contests = tuple(run.contests[number] for number in numbers)
    first_us = sum(each.first_call_us or 0.0 for found in contests for each in found.times.values())
    return Tuned(
        contests=contests,
        choices=tuple(run.choices()),
        known=run.known,
        skipped=run.skipped,
        needs_bytes={name: run.needs_bytes[name] for name in run.skipped if name in run.needs_bytes},
        left=left,
        vetted=tuple(run.verdicts.values()),
        in_process=run.in_process,
        not_built=run.not_built,
        winners_changed=len(run.changed),
        spared=len(run.spared),
        seconds=run.deadline.spent_s,
        compile_s=first_us / 1e6,
    )
