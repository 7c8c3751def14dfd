"""The inputs' calls measured, the model timed as a whole and by modules, and what does not pay taken out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Module

from layerzero.asking.trace import traced
from layerzero.integrations.exchange import Exchange, Together
from layerzero.integrations.optimize.candidate import distance
from layerzero.integrations.optimize.gate import LEAST, Switch, gate
from layerzero.integrations.optimize.inputs import Workload
from layerzero.integrations.optimize.report import BY_CALL, Optimized, Replaced
from layerzero.integrations.optimize.spent import ROUNDS, Spent, spent
from layerzero.integrations.optimize.steps import Steps
from layerzero.integrations.optimize.time_left import RUN
from layerzero.serving.warmup import Progress
from layerzero.tuning.keeping.archive import refused
from layerzero.tuning.measuring.tune_run import Step

WHOLE = 5
"""Runs of the model without which nothing stays: one compared, and of both ways one that warms up and one timed."""

STAYS = "without which nothing stays"
NO_TIME_FOR_WHOLE = "no time was left to compare and time the whole (budget_s)"


def measure(
    root: Module,
    report: Optimized,
    workload: Workload,
    before: list[Tensor],
    *,
    rounds: int,
    isolate: bool,
    tell: Progress = lambda *_: None,
) -> None:
    """Measure the calls that the inputs make, compare the outputs, and take out what does not pay.

    Kernels are measured in the time that runs of the model leave, or half of what there is: what was neither compared
    nor timed as a whole does not stay.
    """
    time = report.time
    by_kind: dict[str, list[Exchange]] = defaultdict(list)
    for exchange, told in zip(report._exchanges, report.replaced, strict=True):
        by_kind[told.kind].append(exchange)
    if _has_time(report) and time.allows("measuring kernels on the inputs' calls", RUN, WHOLE + 1):
        reserved_s = min(time.expected_s(RUN, _runs(len(by_kind), rounds)), time.deadline.left_s / 2)
        deadline = time.deadline.sooner(max(reserved_s, time.expected_s(RUN, WHOLE)))
        tuned = report.tuned = workload.tune(
            deadline=deadline, isolate=isolate, progress=lambda each: _told(each, tell)
        )
        report.refused = refused({each.report.operation for each in tuned.contests}, workload.device)
        if tuned.left:
            report.tune.append(
                f"{tuned.left} calls were not measured within the budget; call again with more, or lz.tune"
            )
    if not _has_time(report):
        report.time.leave(f"comparing and timing the whole, {STAYS}", RUN, WHOLE)
        report.take_out(report._exchanges, lambda told: f"{told.kind}: {NO_TIME_FOR_WHOLE}")
        return
    after = workload.run()
    errors = [distance(got, expected) for got, expected in zip(after, before, strict=False)]
    report.error = max(errors, default=None)
    if by_kind:
        _gate(report, workload, by_kind, rounds, tell)
    report._forget()
    if time.allows("naming the kernels of each module", RUN, 2):
        workload.run()  # packs what these inputs' kernels want, and nothing that was only tried
        _name_kernels(root, report, workload)
    if time.allows("the time of each kind of modules", RUN, 2 * ROUNDS if report.replaced else ROUNDS):
        report.spent = _spent(root, report, workload)


def _has_time(report: Optimized) -> bool:
    """Whether what is put on can be compared and timed, without which it does not stay."""
    return report.time.fits(RUN, WHOLE)


def _runs(kinds: int, rounds: int) -> int:
    """How many runs of the model follow the measuring of kernels: one compared, two named, the others timed."""
    return 3 + (kinds + 4) * (rounds + 1) + 2 * ROUNDS


def _gate(
    report: Optimized, workload: Workload, by_kind: Mapping[str, list[Exchange]], rounds: int, tell: Progress
) -> None:
    """Time the model as a whole, and take out what does not pay, or could not be timed."""
    switches = {kind: _switch(Together(exchanges)) for kind, exchanges in by_kind.items()}
    left_s = report.time.deadline.left_s
    timed = report.timed = gate(
        switches,
        workload.sample,
        rounds,
        lambda turn, of: tell("timing kinds of modules", turn, of),
        workload.fits,
    )
    each = workload.samples(rounds + 1)
    if timed is None:
        report.time.leave(f"timing the whole, {STAYS}", RUN, workload.samples(WHOLE - 1), left_s)
        report.take_out(report._exchanges, lambda told: f"{told.kind}: {NO_TIME_FOR_WHOLE}")
        return
    if timed.together:
        report.time.leave("timing kinds of modules apart", RUN, (len(switches) + 2) * each, left_s)

    def why(told: Replaced) -> str:
        gain = timed.gains[told.kind]
        if gain >= LEAST:  # the whole decided
            return f"{told.kind}: it gained {gain:+.1%} in its turn, but all that gained less than 1 % together"
        return f"{told.kind}: end to end it gained {gain:+.1%}, less than 1 %"

    report.take_out([each for kind in timed.dropped for each in by_kind[kind]], why)


def _told(step: Step, tell: Progress) -> None:
    left = "" if step.left_s is None else f", {step.left_s:.0f} s left"
    tell(f"measuring {step.job.name}{left}", step.number, step.total)


def _switch(kind: Exchange) -> Switch:
    return lambda on: kind.on() if on else kind.off()


def _spent(root: Module, report: Optimized, workload: Workload) -> Spent:
    """Time by modules; a captured step runs none of them, so it is off meanwhile."""
    steps = [each for each in report._exchanges if isinstance(getattr(each, "state", None), Steps)]
    others = [each for each in report._exchanges if each not in steps]

    def switch(on: bool) -> None:
        for each in others:
            each.on() if on else each.off()

    kinds = {each.path: each.kind for each in report.replaced if each.kind not in {"attention", "step"}}
    for each in steps:
        each.off()
    try:
        found = spent(root, kinds, workload.call, switch if others else None, workload.device)
        found.steps_off = bool(steps)
        return found
    finally:
        for each in steps:
            each.on()


def _name_kernels(root: Module, report: Optimized, workload: Workload) -> None:
    """Say which kernels the inputs' calls get: a prompt and a token of one module may have kernels of their own."""
    ran: dict[str, dict[str, None]] = defaultdict(dict)
    paths = {each.path for each in report.replaced if each.kernel != BY_CALL}
    with torch.no_grad():
        found = traced(root, workload.call)
    for row in found.rows:
        ran[row.layer if row.layer in paths else BY_CALL][row.kernel] = None
    for each in report.replaced:
        kernels = ran.get(BY_CALL if each.kernel == BY_CALL else each.path)
        if kernels:
            each.kernel = ", ".join(kernels)
