"""Times of operations without tensors: every legal kernel on the operation's cases, in turn, and remembered by tuning.

    lz.tune_tokenizer("model/tokenizer.json")

What has to prove itself first does so in a child. Each result is compared with the reference before a time counts. What
is timed is the kernel's own call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from layerzero.core.evidence import Measurement, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict, class_text
from layerzero.core.operation import Case, Operation, Routed
from layerzero.core.plan import Report
from layerzero.engine import failures
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.order import DECIDED, costs
from layerzero.engine.plain import PLAIN_CALLS, plain_facts
from layerzero.engine.policy import names_any
from layerzero.ops import plain_function_of
from layerzero.tuning.measurement.bench import Benched, benched
from layerzero.tuning.measurement.clocks import CpuClock, clock_of
from layerzero.tuning.measurement.comparison import Compared, record_times
from layerzero.tuning.measurement.contest import Contest, ContestEntry, Status
from layerzero.tuning.measurement.loop import Children, Pairs, Party, run_loop
from layerzero.tuning.measurement.timing import Deadline, Effort, measurement, race
from layerzero.tuning.measurement.tune import Tuned
from layerzero.tuning.measurement.tune_run import USABLE, choice_now
from layerzero.tuning.prediction.fitting import FULL_SAMPLES
from layerzero.tuning.verification.vetting import facts_of_case, plain_operations, plain_pairs

CPU = torch.device("cpu")

CALM, CALM_TRIES = 0.1, 3
"""Noise of those that may be the fastest above which a case is measured again, and how often."""

LONG_S = 4.0
"""Seconds that each of those that may be the fastest gets where a few samples did not tell which is."""


@dataclass(frozen=True, slots=True)
class PlainJob:
    """One case of an operation without tensors, with the parameters that name what it works with."""

    operation: Operation
    case: Case
    params: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.operation.name} {self.case.name}"

    def report(self, facts: Facts) -> Report:
        function = plain_function_of(self.operation.name)
        assert function is not None, self.operation.name
        return PLAIN_CALLS[function.name][0].explain(facts, current_policy())[0]


@dataclass(slots=True)
class _Contest:
    """One case: which kernels may run, and what they run."""

    facts: Facts
    report: Report
    runs: dict[Kernel, Callable[[], Any]] = field(default_factory=dict)
    out: list[ContestEntry] = field(default_factory=list)


def _contest(job: PlainJob, only: Sequence[str], leave: Sequence[str]) -> _Contest:
    operation = job.operation
    assert operation.plain is not None
    arguments = operation.plain.draw(job.case, job.params)
    facts = plain_facts(Routed(operation, arguments))
    report = job.report(facts)
    found = _Contest(facts, report)
    wanted = operation.reference(**arguments)
    for kernel in _legal(report, only, leave):
        try:
            run = functools.partial(kernel.load(facts), arguments["items"])
            fits = operation.plain.equal(run(), wanted)
        except Exception as error:  # whatever a library raises
            if failures.out_of_memory(error):
                raise
            text = f"{type(error).__name__}: {error}"
            found.out.append(ContestEntry(kernel, Status.FAILED, None, text))
            ENGINE.ledger.record_failure(kernel, facts, text)
            continue
        if fits:
            found.runs[kernel] = run
        else:
            found.out.append(ContestEntry(kernel, Status.WRONG, None, "another result than the reference"))
            ENGINE.ledger.record_verdict(kernel, facts, Verdict.WRONG)
            ENGINE.bump()
    return found


def _legal(report: Report, only: Sequence[str], leave: Sequence[str]) -> list[Kernel]:
    kernels = [each.kernel for each in report.candidates if each.legal]
    return [each for each in kernels if (not only or names_any(only, each)) and not names_any(leave, each)]


def _times(found: _Contest, samples: int, origin: str) -> dict[Kernel, Measurement]:
    effort = Effort(samples, budget_s=1.5, most_s=1.5)  # a library that is hopeless in one long call gets no other
    runners = race({kernel.id: run for kernel, run in found.runs.items()}, clock_of(CPU), effort)
    times = {
        kernel: measurement(runners[kernel.id].samples, noise=runners[kernel.id].noise, origin=origin)
        for kernel in found.runs
        if runners[kernel.id].taken
    }
    return dict(sorted(times.items(), key=lambda each: each[1].median_us))


def _open(times: Mapping[Kernel, Measurement], enough: int) -> list[Kernel]:
    """Those that may be the fastest, where one of them has fewer samples than make a time count; else none.

    Calls of 100 ms run out of budget after three samples, and one that seemed hopeless in the first three turns was
    stopped. A set counts as much as its least certain time, so without more samples the library itself would stay: for
    2000 texts of 400 characters it took six times as long as the fastest one (WordPiece, 2 CPU cores, 2026-11-22).
    """
    best = min(times.values(), key=lambda each: each.median_us)
    bound = DECIDED * best.median_us * (1 + best.noise)
    near = [kernel for kernel, each in times.items() if each.median_us / (1 + each.noise) <= bound]
    few = any(times[kernel].samples < enough for kernel in near)
    return near if len(near) > 1 and few else []


def _longer(found: _Contest, kernels: Sequence[Kernel], samples: int) -> dict[Kernel, Measurement]:
    """Times of some with as many samples as make a time count; none is stopped, and a sample is one burst."""
    effort = Effort(samples, budget_s=LONG_S, hopeless=0, steady=0)
    runners = race({kernel.id: found.runs[kernel] for kernel in kernels}, CpuClock(bursts=1), effort, seed=1)
    return {each: measurement(runners[each.id].samples, noise=runners[each.id].noise) for each in kernels}


@dataclass(slots=True, kw_only=True)
class _PlainParty(Party[PlainJob]):
    """What is timed of cases, and whether it is remembered; without ``remembers`` nothing is vetted before."""

    samples: int
    remembers: bool
    only: Sequence[str] = ()
    again: bool = False
    proofs: Pairs = ()
    told: Callable[[Contest], None] = lambda _: None
    found: list[Contest] = field(default_factory=list)
    known: int = 0

    def to_vet(self, jobs: Sequence[PlainJob]) -> Pairs:  # noqa: ARG002  # one proof holds for all cases
        """What no child was given yet."""
        asked = {name for name, each in self.verdicts.items() if each.reached}
        return [(kernel, facts) for kernel, facts in self.proofs if (kernel.id, class_text(facts)) not in asked]

    def pauses(self, number: int, job: PlainJob, children: Children) -> bool:  # noqa: ARG002
        """What may run is known when the proofs are."""
        return True

    def revisits(self, seen: Mapping[int, PlainJob]) -> list[int]:  # noqa: ARG002
        """None: a case is measured once."""
        return []

    def look(self, number: int, job: PlainJob, todo: int, *, again: bool = False) -> str:  # noqa: ARG002
        if self.remembers and not self.again and self._is_known(job):
            self.known += 1
            return ""
        contest = _contest(job, self.only, self.leave_out)
        alone = self.remembers and len(contest.runs) < 2  # nothing to choose between, so no time is needed
        if alone and not contest.out:
            self.known += 1
            return ""
        measured: dict[Kernel, Measurement] = {}
        if not alone:
            measured = self._remembered(contest) if self.remembers else _times(contest, self.samples, "bench")
        timed = [ContestEntry(kernel, Status.TIMED, each) for kernel, each in measured.items()]
        self.found.append(Contest(job.name, contest.report, (*timed, *contest.out)))
        self.told(self.found[-1])
        return ""

    def _remembered(self, contest: _Contest) -> dict[Kernel, Measurement]:
        """Times that may decide from now on: of a calm moment, and of enough samples."""
        for _ in range(CALM_TRIES):
            times = _times(contest, self.samples, "tune")
            record_times(contest.facts, times)
            best_us = next(iter(times.values())).median_us
            if all(each.noise <= CALM for each in times.values() if each.median_us < DECIDED * best_us):
                break
        enough = min(self.samples, FULL_SAMPLES)
        near = _open(times, enough)
        if near:
            longer = _longer(contest, near, enough)
            record_times(contest.facts, longer)
            times = dict(sorted({**times, **longer}.items(), key=lambda each: each[1].median_us))
        return times

    def _is_known(self, job: PlainJob) -> bool:
        """Whether every kernel that may run has a time that was measured here, or there is nothing to choose."""
        facts = facts_of_case(job.operation, job.case, job.params)
        kernels = _legal(job.report(facts), (), self.leave_out)
        evidence = costs(ENGINE.ledger.evidence(kernels, facts), kernels)
        if len(kernels) < 2:
            return True
        best_us = min((each.cost_us for each in evidence.values()), default=0.0)
        return all(
            kernel.id in evidence
            and evidence[kernel.id].provenance == Provenance.MEASURED
            and (evidence[kernel.id].confidence >= USABLE or evidence[kernel.id].cost_us > DECIDED * best_us)
            for kernel in kernels
        )


def bench_plain(
    jobs: Sequence[PlainJob],
    *,
    samples: int | None = None,
    only: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    deadline: Deadline | None = None,
    told: Callable[[Benched], None] = lambda _: None,
) -> Compared:
    """Measure cases until the time is over; times are not remembered. ``told`` gets each result."""
    party = _PlainParty(
        jobs=jobs, device=CPU, deadline=deadline or Deadline(None), leave_out=leave_out, only=only,
        samples=samples or current_policy()["tune_samples"], remembers=False, told=lambda each: told(benched(each)),
    )  # fmt: skip
    left = tuple(job.name for job in run_loop(party))
    return Compared(tuple(map(benched, party.found)), left, {}, {}, {}, party.deadline.spent_s)


def tune_plain(
    jobs: Sequence[PlainJob],
    *,
    samples: int | None = None,
    budget_s: float | None = None,
    again: bool = False,
    leave_out: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Prove what has to be proved, measure every legal kernel on cases, and remember it."""

    def told(each: Contest) -> None:
        best = next((f"{kernel.id} {time.median_us:.1f} us" for kernel, time in each.times.items()), "")
        lost = [f"{entry.kernel.id} {entry.status}: {entry.detail}" for entry in each.entries if not entry.measurement]
        progress(f"{each.name}: {'; '.join(filter(None, [best, *lost]))}")

    asked = {(each.operation.name, str(each.params)): each for each in jobs}.values()
    proofs = [pair for each in asked for pair in plain_pairs(each.operation.name, each.params, again=again)]
    party = _PlainParty(
        jobs=jobs, device=CPU, deadline=Deadline(budget_s), leave_out=leave_out,
        samples=samples or current_policy()["tune_samples"], remembers=True, again=again,
        proofs=[pair for pair in proofs if not names_any(leave_out, pair[0])], vet_told=progress, told=told,
    )  # fmt: skip
    left = run_loop(party)
    choices = [choice_now(each, each.facts, each.report.kernel_id, USABLE) for each in party.found]
    changed = sum(each.kernel_id != each.before for each in choices)  # times of a case are recorded several times
    return Tuned(
        tuple(party.found), tuple(choices), party.known, {}, {}, len(left), tuple(party.verdicts.values()), {}, {},
        changed, 0, party.deadline.spent_s, 0.0,
    )  # fmt: skip


def plain_jobs(pattern: str, params: Mapping[str, Any], cases: Sequence[Case] | None = None) -> list[PlainJob]:
    """The cases of operations without tensors, or others than their own, with what ``params`` name."""
    operations = plain_operations(pattern)
    return [PlainJob(each, case, params) for each in operations for case in (each.cases if cases is None else cases)]
