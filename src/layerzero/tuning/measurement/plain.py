"""Times of operations without tensors: every legal kernel on the operation's cases, in turn, and remembered by tuning.

    lz.tune("tokenize", params={"tokenizer_id": "model/tokenizer.json"})

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
from layerzero.core.ledger import class_text
from layerzero.core.operation import Case, Operation, Routed
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason
from layerzero.engine import failures
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.order import DECIDED, costs
from layerzero.engine.plain import PLAIN_CALLS, plain_facts
from layerzero.engine.policy import names_any
from layerzero.ops import plain_function_of
from layerzero.tuning.measurement.clocks import CpuClock, clock_of
from layerzero.tuning.measurement.comparison import record_times
from layerzero.tuning.measurement.loop import Children, Pairs, Party, run_loop
from layerzero.tuning.measurement.timing import Deadline, Effort, measurement, race
from layerzero.tuning.prediction.fitting import FULL_SAMPLES
from layerzero.tuning.verification.vetting import Vetted, facts_of_case, plain_operations, plain_pairs

CPU = torch.device("cpu")

CALM, CALM_TRIES = 0.1, 3
"""Noise of those that may be the fastest above which a case is measured again, and how often."""

USABLE = 0.5
"""Confidence from which on a time is not measured again."""

LONG_S = 4.0
"""Seconds that each of those that may be the fastest gets where a few samples did not tell which is."""


@dataclass(frozen=True, slots=True)
class PlainBenched:
    """One case: times by kernel, the quickest first, what went wrong or may not run, and what was chosen before."""

    operation: str
    case: str
    times: Mapping[str, Measurement]
    wrong: Mapping[str, str]
    refused: Mapping[str, tuple[Reason, ...]]
    chosen: str | None

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "operation": self.operation,
            "case": self.case,
            "chosen": self.chosen,
            "kernels": {
                name: {"median_us": each.median_us, "p95_us": each.p95_us, "noise": each.noise, "samples": each.samples}
                for name, each in self.times.items()
            },
            "wrong": dict(self.wrong),
            "refused": {kernel: [str(reason) for reason in reasons] for kernel, reasons in self.refused.items()},
        }


@dataclass(frozen=True, slots=True)
class PlainTuned:
    """What a tuning run found: proofs, times, and for how many cases the winner changed."""

    vetted: tuple[Vetted, ...]
    contests: tuple[PlainBenched, ...]
    known: int
    winners_changed: int
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "vetted": [each.to_dict() for each in self.vetted],
            "contests": [each.to_dict() for each in self.contests],
            "known": self.known,
            "winners_changed": self.winners_changed,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        measured = f"{len(self.contests)} cases measured, {self.known} known already"
        return f"{measured}, {self.winners_changed} winners changed, in {self.seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class PlainJob:
    """One case of an operation without tensors, with the parameters that name what it works with."""

    operation: Operation
    case: Case
    params: Mapping[str, Any]

    def report(self, facts: Facts) -> Report:
        """Which kernels may run."""
        function = plain_function_of(self.operation.name)
        assert function is not None, self.operation.name
        return PLAIN_CALLS[function.name][0].explain(facts, current_policy())[0]


@dataclass(slots=True)
class _Contest:
    """One case: which kernels may run, and what they run."""

    facts: Facts
    report: Report
    runs: dict[Kernel, Callable[[], Any]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


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
            found.wrong[kernel.id] = f"{type(error).__name__}: {error}"
            ENGINE.ledger.record_failure(kernel, facts, found.wrong[kernel.id])
            continue
        if fits:
            found.runs[kernel] = run
        else:
            found.wrong[kernel.id] = "another result than the reference"
    return found


def _legal(report: Report, only: Sequence[str], leave: Sequence[str]) -> list[Kernel]:
    kernels = [each.kernel for each in report.candidates if each.legal]
    return [each for each in kernels if (not only or names_any(only, each)) and not names_any(leave, each)]


def _times(found: _Contest, samples: int, origin: str) -> dict[Kernel, Measurement]:
    runners = race({kernel.id: run for kernel, run in found.runs.items()}, clock_of(CPU), Effort(samples, budget_s=1.5))
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
    told: Callable[[PlainBenched], None] = lambda _: None
    found: list[PlainBenched] = field(default_factory=list)
    known: int = 0
    changed: int = 0

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
        """Measure a case."""
        if self.remembers and not self.again and self._is_known(job):
            self.known += 1
            return ""
        contest = _contest(job, self.only, self.leave_out)
        if self.remembers and len(contest.runs) < 2:  # nothing to choose between
            self.known += 1
            return ""
        measured = self._remembered(contest) if self.remembers else _times(contest, self.samples, "bench")
        times, report = {kernel.id: each for kernel, each in measured.items()}, contest.report
        self.found.append(
            PlainBenched(report.operation, job.case.name, times, contest.wrong, report.failures, report.kernel_id)
        )
        self.told(self.found[-1])
        return ""

    def _remembered(self, contest: _Contest) -> dict[Kernel, Measurement]:
        """Times that may decide from now on: of a calm moment, and of enough samples."""
        for _ in range(CALM_TRIES):
            times = _times(contest, self.samples, "tune")
            self.changed += record_times(contest.facts, times)
            best_us = next(iter(times.values())).median_us
            if all(each.noise <= CALM for each in times.values() if each.median_us < DECIDED * best_us):
                break
        enough = min(self.samples, FULL_SAMPLES)
        near = _open(times, enough)
        if near:
            longer = _longer(contest, near, enough)
            self.changed += record_times(contest.facts, longer)
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
    pattern: str,
    params: Mapping[str, Any],
    *,
    samples: int | None = None,
    only: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    deadline: Deadline | None = None,
    told: Callable[[PlainBenched], None] = lambda _: None,
) -> list[PlainBenched]:
    """Measure the operations' cases until the time is over; times are not remembered. ``told`` gets each result."""
    party = _PlainParty(
        jobs=_jobs(pattern, params), device=CPU, deadline=deadline or Deadline(None), leave_out=leave_out, only=only,
        samples=samples or current_policy()["tune_samples"], remembers=False, told=told,
    )  # fmt: skip
    run_loop(party)
    return party.found


def tune_plain(
    pattern: str,
    params: Mapping[str, Any],
    *,
    samples: int | None = None,
    budget_s: float | None = None,
    again: bool = False,
    leave_out: Sequence[str] = (),
    cases: Sequence[Case] | None = None,
    progress: Callable[[str], None] | None = None,
) -> PlainTuned:
    """Prove what has to be proved, measure every legal kernel on the operations' cases, and remember it.

    ``cases`` are others than the operations' own.
    """
    deadline = Deadline(budget_s)

    def told(each: PlainBenched) -> None:
        first, time = next(iter(each.times.items()))
        if progress is not None:
            progress(f"{each.operation} {each.case}: {first} {time.median_us:.1f} us")

    proofs = [pair for pair in plain_pairs(pattern, params, again=again) if not names_any(leave_out, pair[0])]
    party = _PlainParty(
        jobs=_jobs(pattern, params, cases), device=CPU, deadline=deadline, leave_out=leave_out,
        samples=samples or current_policy()["tune_samples"], remembers=True, again=again, proofs=proofs,
        vet_told=progress, told=told,
    )  # fmt: skip
    run_loop(party)
    vetted = tuple(party.verdicts.values())
    return PlainTuned(vetted, tuple(party.found), party.known, party.changed, deadline.spent_s)


def _jobs(pattern: str, params: Mapping[str, Any], cases: Sequence[Case] | None = None) -> list[PlainJob]:
    operations = plain_operations(pattern)
    return [PlainJob(each, case, params) for each in operations for case in (each.cases if cases is None else cases)]
