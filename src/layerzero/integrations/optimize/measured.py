"""The inputs' calls measured, the model timed as a whole and by modules, and what does not pay taken out."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.nn import Module

from layerzero.asking.trace import traced
from layerzero.integrations.exchange import Exchange, Together
from layerzero.integrations.optimize.candidate import distance
from layerzero.integrations.optimize.gate import LEAST, Switch, gate
from layerzero.integrations.optimize.inputs import Workload
from layerzero.integrations.optimize.report import BY_CALL, Left, Optimized
from layerzero.integrations.optimize.spent import Spent, spent
from layerzero.integrations.optimize.steps import Steps
from layerzero.serving.warmup import Progress
from layerzero.tuning.measuring.refused import refused
from layerzero.tuning.measuring.tuned import Step


def measure(
    root: Module,
    report: Optimized,
    workload: Workload,
    before: list[Tensor],
    *,
    rounds: int,
    budget_s: float | None,
    isolate: bool,
    tell: Progress = lambda *_: None,
) -> None:
    """Measure the calls that the inputs make, compare the outputs, and take out what does not pay."""
    tuned = report.tuned = workload.tune(budget_s=budget_s, isolate=isolate, progress=lambda each: _told(each, tell))
    report.refused = refused({each.report.operation for each in tuned.contests}, workload.device)
    after = workload.run()
    errors = [distance(got, expected) for got, expected in zip(after, before, strict=False)]
    report.error = max(errors, default=None)
    by_kind: dict[str, list[Exchange]] = defaultdict(list)
    for exchange, told in zip(report._exchanges, report.replaced, strict=True):
        by_kind[told.kind].append(exchange)
    switches = {kind: _switch(Together(exchanges)) for kind, exchanges in by_kind.items()}
    if switches:
        report.timed = gate(
            switches, workload.sample, rounds, lambda turn, of: tell("timing kinds of modules", turn, of)
        )
        for kind in report.timed.dropped:
            gain = report.timed.gains[kind]
            why = f"{kind}: end to end it gained {gain:+.1%}, less than 1 %"
            if gain >= LEAST:  # the whole decided
                why = f"{kind}: it gained {gain:+.1%} in its turn, but all that gained less than 1 % together"
            report.left += [Left(each.path, each.module, why) for each in report.replaced if each.kind == kind]
        kept = [
            (exchange, told)
            for exchange, told in zip(report._exchanges, report.replaced, strict=True)
            if told.kind not in report.timed.dropped
        ]
        report._exchanges = [exchange for exchange, _ in kept]
        report.replaced = [told for _, told in kept]
    report._forget()
    workload.run()  # packs what these inputs' kernels want, and nothing that was only tried
    _name_kernels(root, report, workload)
    report.spent = _spent(root, report, workload)
    if tuned.left:
        report.tune.append(f"{tuned.left} calls were not measured within the budget; call again with more, or lz.tune")


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
