"""Times of operations without tensors: every legal kernel on the operation's cases, in turn, and remembered by tuning.

    lz.tune("tokenize", params={"tokenizer_id": "model/tokenizer.json"})

What has to prove itself first does so in a child. Each result is compared with the reference before a time counts. What
is timed is the kernel's own call.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from layerzero.core.evidence import Measurement, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation, Routed
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason
from layerzero.engine import failing
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.order import DECIDED, costs
from layerzero.engine.plain import PLAIN_CALLS, plain_facts
from layerzero.engine.policy import names_kernel
from layerzero.ops import plain_function_of
from layerzero.tuning.measuring.clocks import CpuClock, clock_of
from layerzero.tuning.measuring.timing import Effort, measurement, race
from layerzero.tuning.predicting.weighing import FULL_SAMPLES
from layerzero.tuning.predicting.winner import record_times
from layerzero.tuning.proving.vetting import Vetted, facts_of_case, plain_operations, plain_pairs, vet_calls

CALM, CALM_TRIES = 0.1, 3
"""Noise of those that may be the fastest above which a case is measured again, and how often."""

USABLE = 0.5
"""Confidence from which on a time is not measured again."""

LONG_S = 4.0
"""Seconds that each of those that may be the fastest gets where a few samples did not tell who is."""


@dataclass(frozen=True, slots=True)
class PlainBenched:
    """One case: times by kernel, the quickest first, what went wrong, who may not run, and who was chosen before."""

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


@dataclass(slots=True)
class _Contest:
    """One case: who may run, and what they run."""

    facts: Facts
    report: Report
    arguments: Mapping[str, Any]
    runs: dict[Kernel, Callable[[], Any]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def _contest(
    operation: Operation, case: Case, params: Mapping[str, Any], only: Sequence[str], leave: Sequence[str]
) -> _Contest:
    assert operation.plain is not None
    arguments = operation.plain.draw(case, params)
    facts = plain_facts(Routed(operation, arguments))
    function = plain_function_of(operation.name)
    assert function is not None, operation.name
    report, _ = PLAIN_CALLS[function.name][0].explain(facts, current_policy())
    found = _Contest(facts, report, arguments)
    wanted = operation.reference(**arguments)
    for each in report.candidates:
        kernel = each.kernel
        asked = not only or any(names_kernel(name, kernel) for name in only)
        if not each.legal or not asked or any(names_kernel(name, kernel) for name in leave):
            continue
        try:
            run = functools.partial(kernel.load(facts), arguments["items"])
            fits = operation.plain.equal(run(), wanted)
        except Exception as error:  # whatever a library raises
            if failing.out_of_memory(error):
                raise
            found.wrong[kernel.id] = f"{type(error).__name__}: {error}"
            ENGINE.ledger.record_failure(kernel, facts, found.wrong[kernel.id])
            continue
        if fits:
            found.runs[kernel] = run
        else:
            found.wrong[kernel.id] = "another result than the reference"
    return found


def _times(found: _Contest, samples: int, origin: str) -> dict[Kernel, Measurement]:
    by_id = {kernel.id: kernel for kernel in found.runs}
    clock = clock_of(torch.device("cpu"))
    runners = race(
        {kernel.id: run for kernel, run in found.runs.items()},
        clock,
        Effort(samples, budget_s=1.5),
    )
    times = {
        by_id[name]: measurement(each.samples, noise=each.noise, origin=origin)
        for name, each in runners.items()
        if each.taken
    }
    return dict(sorted(times.items(), key=lambda each: each[1].median_us))


def _open(times: Mapping[Kernel, Measurement], enough: int) -> list[Kernel]:
    """Those that may be the fastest, where one of them has fewer samples than make a time count; else nobody.

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
    """Times of some with as many samples as make a time count; nobody is stopped, and a sample is one burst."""
    effort = Effort(samples, budget_s=LONG_S, hopeless=0, steady=0)
    by_id = {kernel.id: kernel for kernel in kernels}
    runners = race({kernel.id: found.runs[kernel] for kernel in kernels}, CpuClock(bursts=1), effort, seed=1)
    return {by_id[name]: measurement(each.samples, noise=each.noise) for name, each in runners.items()}


def bench_plain(
    pattern: str,
    params: Mapping[str, Any],
    *,
    samples: int | None = None,
    only: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    passed: Callable[[], bool] = lambda: False,
) -> Iterator[PlainBenched]:
    """Measure the operations' cases until ``passed`` says that the time is over; times are not remembered."""
    for operation in plain_operations(pattern):
        for case in operation.cases:
            if passed():
                return
            found = _contest(operation, case, params, only, leave_out)
            times = _times(found, samples or current_policy()["tune_samples"], "bench") if found.runs else {}
            yield _told(case, found, times)


def _told(case: Case, found: _Contest, times: Mapping[Kernel, Measurement]) -> PlainBenched:
    named = {kernel.id: each for kernel, each in times.items()}
    report = found.report
    return PlainBenched(report.operation, case.name, named, found.wrong, report.failures, report.kernel_id)


def tune_plain(
    pattern: str,
    params: Mapping[str, Any],
    *,
    samples: int | None = None,
    budget_s: float | None = None,
    again: bool = False,
    leave_out: Sequence[str] = (),
    modules: Sequence[str] = (),
    cases: Sequence[Case] | None = None,
    progress: Callable[[str], None] | None = None,
) -> PlainTuned:
    """Prove what has to be proved, measure every legal kernel on the operations' cases, and remember it.

    ``cases`` are others than the operations' own.
    """
    started = time.perf_counter()
    waiting = [
        (kernel, facts)
        for kernel, facts in plain_pairs(pattern, params, again=again)
        if not any(names_kernel(name, kernel) for name in leave_out)
    ]
    vetted = vet_calls(waiting, modules=modules, progress=progress) if waiting else ()
    contests, known, changed = [], 0, 0
    for operation in plain_operations(pattern):
        for case in operation.cases if cases is None else cases:
            if budget_s is not None and time.perf_counter() - started > budget_s:
                break
            if not again and _known(operation, case, params, leave_out):
                known += 1
                continue
            found = _contest(operation, case, params, (), leave_out)
            if len(found.runs) < 2:  # nothing to choose between
                known += 1
                continue
            wanted = samples or current_policy()["tune_samples"]
            for _ in range(CALM_TRIES):
                times = _times(found, wanted, "tune")
                changed += record_times(found.facts, times)
                best_us = next(iter(times.values())).median_us
                if all(each.noise <= CALM for each in times.values() if each.median_us < DECIDED * best_us):
                    break
            enough = min(wanted, FULL_SAMPLES)
            near = _open(times, enough)
            if near:
                longer = _longer(found, near, enough)
                changed += record_times(found.facts, longer)
                times = dict(sorted({**times, **longer}.items(), key=lambda each: each[1].median_us))
            contests.append(_told(case, found, times))
            if progress is not None:
                first = next(iter(times))
                progress(f"{operation.name} {case.name}: {first.id} {times[first].median_us:.1f} us")
    return PlainTuned(tuple(vetted), tuple(contests), known, changed, time.perf_counter() - started)


def _known(operation: Operation, case: Case, params: Mapping[str, Any], leave: Sequence[str]) -> bool:
    """Whether every kernel that may run has a time that was measured here, or there is nothing to choose."""
    facts = facts_of_case(operation, case, params)
    function = plain_function_of(operation.name)
    assert function is not None, operation.name
    report, _ = PLAIN_CALLS[function.name][0].explain(facts, current_policy())
    kernels = [
        each.kernel
        for each in report.candidates
        if each.legal and not any(names_kernel(name, each.kernel) for name in leave)
    ]
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
