"""What this process itself does of a build: load what a child built, or compile where no other process can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Candidate, Report
from layerzero.core.recipe import CallRecipe
from layerzero.engine import plan_source
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.first_run import first_run
from layerzero.engine.functions import CALLS
from layerzero.engine.jit import BUILT, BuildIdentity, BuildOutcome, build_of
from layerzero.inspection.answers import explain
from layerzero.ops import function_of
from layerzero.testing.single_run import duplicate
from layerzero.tuning.measurement.online import let_others_capture
from layerzero.tuning.verification.build_child import failed, short_of_memory
from layerzero.tuning.verification.child import rebuilt


@dataclass(frozen=True, slots=True)
class Chosen:
    """The candidate, and the report that would choose it."""

    candidate: Candidate
    report: Report

    @property
    def kernel(self) -> Kernel:
        return self.candidate.kernel

    @property
    def facts(self) -> Facts:
        return self.report.facts

    @property
    def identity(self) -> BuildIdentity:
        return build_of(self.kernel, self.facts)

    def ready(self) -> bool:
        return BUILT.ready(self.kernel, self.facts)


def with_builds(facts: Facts) -> Report:
    """The report of a call for which kernels may be built."""
    with SCOPES.scope({"allow_jit_compile": True}):
        return explain(facts)


def wanted(facts: Facts, failed: Callable[[Kernel, Facts], bool]) -> Chosen | None:
    """The kernel that would be chosen and is not built, with the report that says so; None if the winner is built.

    What failed to build is passed over.
    """
    report = with_builds(facts)
    if report.chosen is None:
        return None
    for candidate in (report.chosen, *(each for each in report.candidates if each is not report.chosen)):
        if not candidate.legal:
            return None
        if not candidate.kernel.jit or BUILT.ready(candidate.kernel, facts):
            return None
        if not failed(candidate.kernel, facts):
            return Chosen(candidate, report)
        if report.locked:
            return None
    return None


def taken_over(each: Chosen) -> BuildOutcome:
    """Load what a child built, so that no call waits for that either."""
    if not BUILT.ready(each.kernel, each.facts):
        why = "a child process built it, but left nothing where its library would keep it: there is no room, or only"
        why += " the driver keeps it; lz.warmup builds it in this process"
        return BuildOutcome(why, lasting=False)
    try:
        _beside_captures(each)
        _plan(each)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # what does not load here is refused as what does not build
        return outcome_of(error)
    return BuildOutcome()


def outcome_of(error: BaseException) -> BuildOutcome:
    """What became of a build that raised in this process."""
    lacked_room = isinstance(error, (MemoryError, OSError, torch.OutOfMemoryError))
    return failed(error, lasting=not lacked_room or isinstance(error, ImportError))


def _beside_captures(each: Chosen) -> None:
    """Let another thread capture a graph meanwhile, which what is loaded here would break off otherwise."""
    if each.facts.device.torch_type == "cuda":
        let_others_capture()


def _plan(each: Chosen) -> Any:
    function = function_of(each.report.operation)
    assert function is not None, "only calls of functions are built for"
    return plan_source.build(function, each.candidate, each.report, current_policy())


def built_here(each: Chosen) -> BuildOutcome:
    """Build in this thread what no other process can build for this one."""
    try:
        recipe = CallRecipe.of(each.facts)
        short = short_of_memory(recipe)
        if short:
            return BuildOutcome(short, lasting=False)
        _beside_captures(each)
        with SCOPES.scope({"allow_jit_compile": True}), torch.no_grad():
            call = duplicate(rebuilt(recipe))
            given = CALLS[call.function].function.bind((), call.arguments)
            plan = _plan(each)
            with first_run(plan, ENGINE.ledger):
                for _ in range(2):
                    plan.run(**given)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a compiler raises, as setuptools by an exit
        return outcome_of(error)
    BUILT.add(each.kernel, each.facts)
    return BuildOutcome()
