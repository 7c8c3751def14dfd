"""Whether a kernel may run in the capture of a CUDA graph, by what a child process found out about its captures here.

The ledger knows verdicts, which ``layerzero vet --graph`` finds. Every choice in a capture asks it, also where torch or
an engine began the capture. A plan that was kept before may be called there without a choice: its text refuses where a
choice would.
"""

from __future__ import annotations

from msgspec.structs import replace

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.policy import Policy

SETTING = "graph_strict_mode"

UNPROVED = "no capture of it was proved here, so that nothing says what its replays give"


_FACT = "a capture of "


def how_to_prove(facts: Facts) -> str:
    """What to type before the capture, for a reason's hint."""
    return (
        f"Prove it before the capture: `layerzero vet {facts.operation.name} --graph --manifest FILE` with what "
        f"lz.record wrote (or --shapes), or lz.warmup where {SETTING} is set"
    )


def capture_reasons(kernel: Kernel, facts: Facts, policy: Policy, ledger: Ledger) -> list[Reason]:
    """Why a capture may not have a kernel, by its verdict; one that says of itself that it is unsafe needs none.

    A collective's kernel has none: no child process is several ranks, and a verdict of one machine splits the ranks.
    """
    if not kernel.graph_safe or facts.operation.is_collective:
        return []
    why = ledger.capture(kernel, facts)
    if why:
        return [
            Reason(
                ReasonCode.CUDA_GRAPH_UNSAFE, f"{_FACT}{kernel.id}", "one whose captures are right", why,
                f"Another version of its library clears it, or `layerzero vet --graph --kernel {kernel.id} --again`",
            )
        ]  # fmt: skip
    if why is None and policy[SETTING]:
        return [
            Reason(
                ReasonCode.CUDA_GRAPH_UNSAFE, f"{_FACT}{kernel.id}", f"proved here ({SETTING})", "not proved",
                how_to_prove(facts),
            )
        ]  # fmt: skip
    return []


def is_verdict(reason: Reason) -> bool:
    """Whether a reason tells of a verdict about captures, or that there is none."""
    return reason.code is ReasonCode.CUDA_GRAPH_UNSAFE and reason.fact.startswith(_FACT)


def barred(kernel: Kernel, facts: Facts, policy: Policy, ledger: Ledger) -> bool:
    """Whether a plan that is made outside of a capture has to refuse to run in one: a hit asks nothing."""
    return not facts["capturing"] and bool(capture_reasons(kernel, facts, policy, ledger))


def noted(report: Report, ledger: Ledger) -> Report:
    """The report of a choice in a capture, which says so where the kernel's captures were not proved."""
    chosen, facts = report.chosen, report.facts
    if chosen is None or facts.operation.is_collective or ledger.capture(chosen.kernel, facts) is not None:
        return report
    return replace(report, notes=(*report.notes, UNPROVED))
