"""What is kept of judging between misses: the part that sizes, memory, verdicts and health do not change.

Calls that are alike but for their sizes are refused by the same kernels for the same reasons (not installed, another
device, an argument they lack), and of the others only the limits that read sizes or memory are left to ask. Explaining
never uses this: :func:`layerzero.engine.legality.judge` lists every reason anew.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from layerzero.core import limit_kinds, limit_launch
from layerzero.core.device import Device
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.limit import NOTHING, Finding, Findings, Limit
from layerzero.core.plan import Adaptation, Candidate
from layerzero.core.reasons import Reason
from layerzero.engine import legality, split
from layerzero.engine.health import Health
from layerzero.engine.policy import Lock, Policy
from layerzero.engine.probe import Machine

MAX_KEPT = 256
"""Kinds of calls that are remembered; scales and dropout rates that are new each time must not fill memory."""

_SIZELESS = frozenset({
    *(limit_kinds.Platform, limit_kinds.Arch, limit_kinds.Instruction, limit_kinds.Dtype),
    *(limit_kinds.LseWithoutGradient, limit_kinds.SdpaEnabled, limit_launch.Generation, limit_launch.TensorCore),
})  # fmt: skip
"""Limits that read the device, the dtype and the eager state only; ``OneOf`` and ``Positive`` say what they read."""


class Standing(NamedTuple):
    """One kernel among calls that differ in sizes only.

    Attributes:
        kernel: the kernel.
        refused: its candidate where the sizes do not matter, None where it may be legal.
        untested: whether a verdict decides about its library, too.
        adaptations: what its plan does because of its layout.
        steps: in the order in which they are declared, the limits that read sizes or memory, or say not what they
            read, and what the others found that a plan makes good.
    """

    kernel: Kernel
    refused: Candidate | None
    untested: bool = False
    adaptations: tuple[Adaptation, ...] = ()
    steps: tuple[Limit | Findings, ...] = ()


class _Kept(NamedTuple):
    kernels: tuple[Kernel, ...]
    device: Device
    machine: Machine
    standings: tuple[Standing, ...]


class Standings:
    """The standings of one epoch, by what a call has beside its sizes."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}

    def forget(self) -> None:
        """Start a new epoch. Who is deciding now writes into what is let go of here."""
        self._kept = {}

    def judge(
        self,
        kernels: Sequence[Kernel],
        facts: Facts,
        policy: Policy,
        machine: Machine,
        health: Health,
        ledger: Ledger,
        *,
        failed: Collection[str] = (),
    ) -> list[Candidate]:
        """Judge every kernel for one call, with no more than the first reason that was found for a refused one."""
        lock = policy.lock_for(facts)
        seen: dict[str | None, Facts] = {None: facts, facts.layout: facts}
        odd = any(tensor.negated or 0 in tensor.shape for tensor in facts.tensors.values())
        judged = []
        for standing in self._of(kernels, facts, policy, machine):
            if standing.refused is not None:
                judged.append(standing.refused)
                continue
            layout = standing.kernel.layout
            if layout not in seen:
                seen[layout] = facts.seen_in(layout)
            reasons, adaptations = _judged(
                standing, facts, seen[layout], policy, machine, health, ledger, lock, odd=odd
            )
            if standing.kernel.id in failed:
                reasons.append(legality.JUST_FAILED)
            judged.append(Candidate(standing.kernel, tuple(reasons), adaptations))
        return split.last_resort(judged, facts, policy, lock, legality.limit_findings)

    def _of(self, kernels: Sequence[Kernel], facts: Facts, policy: Policy, machine: Machine) -> tuple[Standing, ...]:
        these, keeping = tuple(kernels), self._kept
        key = (facts.operation.name, facts.layout, policy, id(facts.device), facts.sizeless())
        try:
            kept = keeping.get(key)
        except TypeError:  # an argument without a hash
            return tuple(_standing(kernel, facts, policy, machine) for kernel in these)
        if kept is None or kept.machine is not machine or kept.kernels != these:
            if len(keeping) >= MAX_KEPT:
                keeping.clear()
            found = tuple(_standing(kernel, facts, policy, machine) for kernel in these)
            kept = keeping[key] = _Kept(these, facts.device, machine, found)
        return kept.standings


def _standing(kernel: Kernel, facts: Facts, policy: Policy, machine: Machine) -> Standing:
    state = machine.state(kernel.backend, facts.device)
    reason = legality.elsewhere(kernel, facts)
    if reason is None and not state.untested:  # a verdict may lift what is said of an untested version
        reason = legality.library_reason(kernel, facts, machine, None)
    if reason is not None:
        return Standing(kernel, Candidate(kernel, (reason,)))
    denied = [] if policy.rules else legality.policy_reasons(kernel, facts, policy)  # rules may read sizes
    if denied:
        return Standing(kernel, Candidate(kernel, tuple(denied)))
    if kernel.revision is not None:  # what a descriptor says is told beside what the kernel itself says
        return Standing(kernel, None, state.untested)
    seen = facts.seen_in(kernel.layout)
    fixed = facts.operation.schema.sizeless
    steps: list[Limit | Findings] = [
        legality.checked(limit, seen) if _reads_no_size(limit, fixed) else limit for limit in kernel.limits
    ]
    steps.append((*legality.argument_findings(kernel, seen), *legality.state_findings(kernel, seen)))
    found = [finding for step in steps if isinstance(step, tuple) for finding in step]
    adaptations = legality.adaptations_for(kernel, facts)
    view = tuple(adaptations)
    refused = legality.repair(kernel, found, facts, policy, adaptations)
    if refused:
        return Standing(kernel, Candidate(kernel, tuple(refused), tuple(adaptations)))
    return Standing(kernel, None, state.untested, view, tuple(step for step in steps if step != NOTHING))


def _reads_no_size(limit: Limit, fixed: Collection[str]) -> bool:
    if type(limit) in (limit_kinds.OneOf, limit_kinds.Positive):
        return all(name in fixed for name in limit.facts_read())
    return type(limit) in _SIZELESS


def _judged(
    standing: Standing,
    facts: Facts,
    seen: Facts,
    policy: Policy,
    machine: Machine,
    health: Health,
    ledger: Ledger,
    lock: Lock | None,
    *,
    odd: bool,
) -> tuple[list[Reason], tuple[Adaptation, ...]]:
    """What is still to be asked of a kernel for this very call; ``odd`` if a tensor is empty or negated."""
    kernel = standing.kernel
    reasons = legality.policy_reasons(kernel, facts, policy) if policy.rules else []
    where = machine if standing.untested else None
    reasons += legality.trust_reasons(kernel, facts, policy, where, health, ledger, lock)
    if reasons:
        return reasons, standing.adaptations
    if kernel.revision is not None:
        adaptations = legality.adaptations_for(kernel, facts)
        findings = legality.limit_findings(kernel, seen)
        return legality.repair(kernel, findings, facts, policy, adaptations), tuple(adaptations)
    findings = _findings(standing, seen)
    if odd:
        findings += legality.memory_findings(kernel, seen)
    if not findings:
        return reasons, standing.adaptations
    adaptations = list(standing.adaptations)
    return legality.repair(kernel, findings, facts, policy, adaptations), tuple(adaptations)


def _findings(standing: Standing, seen: Facts) -> list[Finding]:
    """What the limits that are left find, up to the first finding that nothing makes good."""
    findings: list[Finding] = []
    for step in standing.steps:
        found = step if isinstance(step, tuple) else legality.checked(step, seen)
        if found:
            findings += found
            if any(legality.final(finding) for finding in found):
                return findings
    return findings
