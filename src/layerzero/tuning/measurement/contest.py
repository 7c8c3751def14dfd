"""Time every legal kernel of one call side by side, once each has shown that it is right.

What is timed is what a user deploys: the plan that the engine writes, with its adapters. A kernel's first run is marked
as any first run is, so that one that kills the process is a suspect afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from layerzero.core.errors import LayerZeroWarning
from layerzero.core.evidence import Measurement
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict
from layerzero.core.plan import Candidate, Plan, Report
from layerzero.engine import failures, isolation, plan_source
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.first_run import first_run
from layerzero.engine.functions import CALLS
from layerzero.engine.jit import BUILT
from layerzero.engine.policy import names_any
from layerzero.engine.proofs import SETTING
from layerzero.inspection.answers import explain
from layerzero.testing.compare import copied
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import lost_context, raised
from layerzero.tuning.measurement import clocks
from layerzero.tuning.measurement.admission import copied_bytes, least_us
from layerzero.tuning.measurement.clocks import Clock, Graphs, Run, Sample, clock_of
from layerzero.tuning.measurement.timing import CONTENDS, Effort, TimeOverError, measurement, race
from layerzero.tuning.storage import environment as conditions
from layerzero.tuning.verification.child import Truth, truth_of


class Status(StrEnum):
    """What became of a kernel in a contest."""

    TIMED = "timed"
    STOPPED = "stopped"
    """Timed, but given up after a few samples: hopelessly slower than the best."""
    WRONG = "wrong"
    FAILED = "failed"
    MEMORY = "memory"
    """There was too little of it; that says nothing about the kernel."""
    BANNED = "banned"
    """A child process ran it first, and it crashed, hung or was wrong there."""
    UNTRIED = "not tried"
    """A child process was to run it first, and the time was over before it did."""
    UNCAPTURED = "not captured"
    """It ran, and a capture refuses it."""
    HOPELESS = "cannot win"
    """What its plan copies alone takes longer than another kernel took for the call."""


@dataclass(frozen=True, slots=True)
class ContestEntry:
    """One kernel in a contest.

    Attributes:
        kernel: the kernel.
        status: what became of it.
        measurement: its time, None where it has none.
        detail: why it has none.
        error: relative distance of its result from the reference in float64, None where nothing was compared.
        samples: microseconds of a call, in order.
    """

    kernel: Kernel
    status: Status
    measurement: Measurement | None = None
    detail: str = ""
    error: float | None = None
    samples: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, object]:
        names = ("median_us", "p95_us", "samples", "noise", "first_call_us", "device_us", "host_us")
        return {
            "kernel_id": self.kernel.id,
            "status": str(self.status),
            **{name: getattr(self.measurement, name) for name in names if self.measurement is not None},
            "detail": self.detail,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Contest:
    """What was found about one call.

    Attributes:
        name: the call, for people.
        report: which kernels were legal, which were refused and why, and which the engine would have chosen before.
        entries: the legal kernels, fastest first, then those without a time.
        others: samples of what was timed with them and is no kernel.
    """

    name: str
    report: Report
    entries: tuple[ContestEntry, ...]
    others: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def facts(self) -> Facts:
        return self.report.facts

    @property
    def times(self) -> dict[Kernel, Measurement]:
        return {each.kernel: each.measurement for each in self.entries if each.measurement is not None}

    def to_dict(self) -> dict[str, object]:
        return {
            "call": self.name,
            "operation": self.report.operation,
            "before": self.report.kernel_id,
            "kernels": [entry.to_dict() for entry in self.entries],
        }

    @property
    def best(self) -> ContestEntry | None:
        """The fastest, None if none has a time."""
        return self.entries[0] if self.entries and self.entries[0].measurement is not None else None

    @property
    def contenders(self) -> tuple[ContestEntry, ...]:
        """Those that may be the best one, however slow the host was: kernels that come later are timed against them.

        A time replaces the one before it. Where the fastest alone was timed again, while the host took twice as long,
        its rival of a calmer moment won, with 1.7 times the best one's device time (an H100, 1.8 on an H200,
        2026-11-24).
        """
        timed = [(each, each.measurement) for each in self.entries if each.measurement is not None]
        least = min((time.median_us for _, time in timed), default=0.0)
        return tuple(
            [
                entry
                for entry, time in timed
                if entry.status is Status.TIMED
                and Sample(time.median_us, time.device_us, time.host_us).at_least_us <= CONTENDS * least
            ]
        )

    def joined(self, found: Contest) -> Contest:
        """With what came to the call later; a kernel that was timed before, and is not now, keeps its time."""
        timed = {each.kernel.id for each in self.entries if each.measurement is not None}
        later = [each for each in found.entries if each.measurement is not None or each.kernel.id not in timed]
        entries = {each.kernel.id: each for each in (*self.entries, *later)}
        ordered = sorted(
            entries.values(), key=lambda each: each.measurement.median_us if each.measurement else math.inf
        )
        return dataclasses.replace(self, entries=tuple(ordered))


@contextmanager
def window() -> Iterator[None]:
    """What may happen in a tuning window: kernels compile, and what is tried warns of nothing."""
    import warnings

    with warnings.catch_warnings(), SCOPES.scope({"allow_jit_compile": True}), torch.no_grad():
        warnings.simplefilter("ignore", LayerZeroWarning)
        yield


def contest(
    call: RandomCall,
    *,
    effort: Effort | None = None,
    graph: bool = False,
    leave_out: Collection[str] = (),
    only: Collection[str] = (),
    banned: Mapping[str, tuple[Status, str]] | None = None,
    beside: Mapping[str, Run] | None = None,
    clock: Clock | None = None,
    origin: str = "tune",
    seed: int = 0,
    passed: Callable[[], bool] = lambda: False,
) -> Contest:
    """Judge, prove and time every kernel that is legal for a call under the policy in force.

    The reference takes part only where it is alone: elsewhere its time would decide nothing.

    Args:
        effort: how long to measure.
        graph: time replays of a captured CUDA graph; kernels that are not graph-safe are left out then.
        leave_out: libraries or kernel globs that do not take part.
        only: those that alone do; all if empty.
        banned: kernels that a child process found guilty, or had no time for, with what is known of them.
        beside: further callables to time among the kernels, by name; they are not proved.
        clock: that of the call's device by default.
        origin: what measures, for the record.
        seed: draws the order of the turns.
        passed: whether the time is over, checked before the truth is made and before each kernel is compared with it.

    Raises: TimeOverError where it was over before all kernels were compared.
    """
    with window():
        function = CALLS[call.function]
        given = function.function.bind((), call.arguments)
        policy = current_policy()
        report, _ = function.dispatcher.explain(given, policy)
        device = next(value for value in given.values() if isinstance(value, torch.Tensor)).device
        clock = clock or clock_of(device, graph=graph)
        entrants = taking_part(report, leave_out, only, graph=graph)
        guilty = banned or {}
        out = [
            ContestEntry(each.kernel, guilty[each.kernel.id][0], None, guilty[each.kernel.id][1])
            for each in report.candidates
            if each.kernel.id in guilty
        ]
        entrants = [each for each in entrants if each.kernel.id not in guilty]
        if passed():
            raise TimeOverError
        truth = truth_of(call, report.facts) if entrants else None
        ready: dict[str, _Ready] = {}
        quickest_us = math.inf
        for candidate in sorted(entrants, key=lambda each: copied_bytes(each, report.facts)):
            assert truth is not None
            if passed():
                raise TimeOverError
            least = least_us(candidate, report.facts, device)
            if least > quickest_us:
                text = f"its copies alone take {least:.0f} us, another took {quickest_us:.0f}"
                out.append(ContestEntry(candidate.kernel, Status.HOPELESS, None, text))
                continue
            made = _made_ready(candidate, report, call, truth, graph)
            if isinstance(made, ContestEntry):
                out.append(made)
            else:
                ready[candidate.kernel.id] = made
                if any(copied_bytes(each, report.facts) for each in entrants):
                    quickest_us = min(quickest_us, clock.once(made.run))
        del truth
    with torch.no_grad():  # outside the window: what is timed with the kernels chooses as it does elsewhere
        runs = {name: each.run for name, each in ready.items()}
        raced = race({**runs, **(beside or {})}, clock, effort or Effort(), seed=seed)
    state = conditions.condition(device)
    timed = []
    for name, each in ready.items():
        runner, more_us = raced[name], isolation.extra_us([each.kernel], report.facts, policy).get(name, 0.0)
        kept = measurement(
            [max(us - more_us, 0.1) for us in runner.samples],
            device_us=runner.device_us, host_us=runner.host_us, noise=runner.noise,
            first_call_us=each.first_call_us, graph=graph, condition=state, origin=origin, error=each.error,
        )  # fmt: skip
        status = Status.STOPPED if runner.stopped else Status.TIMED
        timed.append(ContestEntry(each.kernel, status, kept, "", each.error, tuple(runner.samples)))
    timed.sort(key=lambda entry: entry.measurement.median_us if entry.measurement else 0.0)
    others = {name: tuple(raced[name].samples) for name in beside or {}}
    return Contest(call.name, report, (*timed, *out), others)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A kernel that ran, was right, and can be timed."""

    kernel: Kernel
    run: Run
    first_call_us: float
    error: float | None


def taking_part(
    report: Report, leave_out: Collection[str] = (), only: Collection[str] = (), *, graph: bool = False
) -> list[Candidate]:
    """The legal kernels that are measured: all but the reference, or the reference where it is alone."""
    uncaptured = without_a_handle(report) if graph else ()
    legal = [
        each
        for each in report.candidates
        if each.legal
        and not names_any(leave_out, each.kernel)
        and (not only or names_any(only, each.kernel))
        and (each.kernel.graph_safe or not graph)
        and each.kernel.id not in uncaptured
    ]
    return [each for each in legal if not each.kernel.is_reference] or legal


def without_a_handle(report: Report) -> set[str]:
    """Ids of the kernels that a capture takes with another handle only, such as a step whose buffers stay in place."""
    facts = report.facts
    inside = explain(facts.on(facts.device, capturing=True))
    handles = facts.operation.schema.handles
    return {name for name, reasons in inside.failures.items() if any(each.fact in handles for each in reasons)}


def bound_plan(candidate: Candidate, report: Report, call: RandomCall) -> tuple[Plan, Run]:
    """The plan that the engine would write for a kernel, and a call of it."""
    function = CALLS[call.function].dispatcher.function
    plan = plan_source.build(function, candidate, report, current_policy())
    values = tuple(function.bind((), call.arguments).values())
    return plan, functools.partial(plan.run, *values)


def plan_in_a_capture(kernel: Kernel, report: Report, call: RandomCall) -> tuple[Plan, Run] | str:
    """The plan that the engine would write inside a capture, where an eager one may refuse to run, and a call of it.

    What the kernel made in its first run is there by now. Why a capture refuses the kernel all the same, if it does.
    """
    with SCOPES.scope({SETTING: False}):  # that it was not proved keeps it from no measurement
        report = explain(report.facts.on(report.facts.device, capturing=True))
    candidate = next(each for each in report.candidates if each.kernel.id == kernel.id)
    if not candidate.legal:
        return "; ".join(map(str, report.failures.get(kernel.id, ())))
    return bound_plan(candidate, report, call)


def _made_ready(
    candidate: Candidate, report: Report, call: RandomCall, truth: Truth, graph: bool
) -> _Ready | ContestEntry:
    """Load a kernel, run it for the first time, and compare it with the truth."""
    kernel, facts = candidate.kernel, report.facts
    started = time.perf_counter()
    try:
        plan, run = bound_plan(candidate, report, call)
        result = _first_result(plan, call)
        first_call_us = (time.perf_counter() - started) * 1e6
        error = truth.error(result)
        del result
        problems = truth.problems(kernel, lambda **given: plan.run(**_bound(call, given)))
        if problems:
            ENGINE.ledger.record_verdict(kernel, facts, Verdict.WRONG)
            ENGINE.bump()
            return ContestEntry(kernel, Status.WRONG, None, "; ".join(problems), error)
        if kernel.jit:
            BUILT.add(kernel, facts)
        clocks.note(kernel, facts, run)
        if not graph:
            return _Ready(kernel, run, first_call_us, error)
        inside = plan_in_a_capture(kernel, report, call)
        if isinstance(inside, str):  # it has done no wrong
            ENGINE.ledger.record_capture(kernel, facts, inside, work=True)
            return ContestEntry(kernel, Status.UNCAPTURED, None, inside, error)
        return _Ready(kernel, Graphs().captured([inside[1]], before=run), first_call_us, error)
    except Exception as failure:  # whatever a kernel raises is a finding, and the others go on
        if lost_context(facts.device):
            raise
        if failures.out_of_memory(failure):
            return ContestEntry(kernel, Status.MEMORY, None, raised(failure))
        ENGINE.ledger.record_failure(kernel, facts, raised(failure))
        return ContestEntry(kernel, Status.FAILED, None, raised(failure))


def _first_result(plan: Plan, call: RandomCall) -> Any:
    """Run a plan for the first time, on copies of what it writes into, until the device is done."""
    facts = plan.report.facts
    mutated = facts.operation.schema.mutated
    copies = {name: copied(value) if name in mutated else value for name, value in call.arguments.items()}
    with first_run(plan, ENGINE.ledger):
        result = plan.run(**_bound(call, copies))
        wrong = failures.wrong_result(plan, result, call.arguments)
        if wrong is not None:
            raise wrong
    if facts.device.torch_type == "cuda":
        torch.cuda.synchronize()
    return result


def _bound(call: RandomCall, given: Mapping[str, Any]) -> dict[str, Any]:
    return CALLS[call.function].function.bind((), given)


def torch_default(function: str, arguments: Mapping[str, Any]) -> Run | None:
    """A call of torch's own function with a call's arguments; None where torch has none for it."""
    operation = CALLS[function].function.operations[0]  # those of one function have the same way around them
    return None if operation.stock is None else operation.stock(**arguments)
