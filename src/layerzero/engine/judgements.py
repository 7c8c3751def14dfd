"""What is kept of judging between misses: the part that sizes, memory, verdicts and health do not change.

Calls that are alike but for their sizes are refused by the same kernels for the same reasons (not installed, another
device, an argument they lack), and of the others only the limits that read sizes or memory are left to ask. Explaining
never uses this: :func:`layerzero.engine.legality.judge` lists every reason anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from layerzero.core.device import Device
from layerzero.core.fact_reads import Watched, names_no_size
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.limit_kinds import NOTHING, Finding, Findings, Limit
from layerzero.core.plan import Adaptation, Candidate, moves_data
from layerzero.core.reasons import Reason
from layerzero.engine import headroom, isolation, legality, proofs
from layerzero.engine.health import Health
from layerzero.engine.policy import Policy, may_come_first
from layerzero.engine.probe import Machine

Value = TypeVar("Value")

MAX_KEPT = 256
"""Kinds of calls that are remembered; scales and dropout rates that are new each time must not fill memory."""


class EpochValues(Generic[Value]):
    """Values by key, at most :data:`MAX_KEPT`.

    Nothing of a kernel outlives the epoch in which it goes, but for what a decision that was under way still writes.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Value]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Start a new epoch. A decision in progress may still write to the old dict, which is then garbage."""
        self._kept = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key; it is made where there is none, and not kept where the key has no hash."""
        keeping = self._kept
        try:
            kept = keeping.get(key)
        except TypeError:  # an argument without a hash
            return make()
        if kept is None:
            if len(keeping) >= MAX_KEPT:
                keeping.clear()
            kept = keeping[key] = (make(),)
        return kept[0]


class Standing(NamedTuple):
    """One kernel among calls that differ in sizes only.

    Attributes:
        kernel: the kernel.
        priority: on the device of these calls.
        refused: its candidate where the sizes do not matter, None where it may be legal.
        untested: whether a verdict decides about its library, too.
        vetted: whether a verdict decides.
        adaptations: what its plan does because of its layout.
        steps: in the order in which they are declared, the limits that read sizes or memory, and what the others found
            that a plan makes good.
    """

    kernel: Kernel
    priority: int
    refused: Candidate | None
    untested: bool = False
    vetted: bool = True
    adaptations: tuple[Adaptation, ...] = ()
    steps: tuple[Limit | Findings, ...] = ()


class _Standings(NamedTuple):
    """The standings of a kind of calls: which kernels are refused, and which may be legal.

    Those of ``first`` come before the others where nothing was measured; both are in the order of their priorities.
    ``stock`` are torch's own, which hold the others back; ``rival`` is the highest priority of those others. ``of`` are
    the kernels, the device, the machine and the policy that they are about.
    """

    refused: tuple[Candidate, ...]
    standings: tuple[Standing, ...]
    first: frozenset[str]
    stock: frozenset[str]
    rival: int
    of: tuple[tuple[Kernel, ...], Device, Machine, Policy]


Later = Callable[[], list[Candidate]]
"""Judges the kernels that were left out."""


class Standings:
    """The standings of one epoch, by what a call has apart from its sizes."""

    def __init__(self) -> None:
        self._kept: EpochValues[_Standings] = EpochValues()

    def forget(self) -> None:
        """Start a new epoch. A decision in progress may still write to the old dict, which is then garbage."""
        self._kept.forget()

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
        by_priority: bool,
        capturing: bool | None = None,
        only: str = "",
    ) -> tuple[list[Candidate], Later | None]:
        """Judge the kernels for one call, with no more than the first reason that was found for a refused one.

        Where ``by_priority`` says that priority alone decides, only those that may win are judged: those of a lower
        priority than a legal one that moves no data, and all behind a legal one of torch's own, are left for later, and
        what judges them is returned with the others. What verdicts or health decide about is never left. Whether a left
        one is built is looked up when the report is read: it would not be chosen if it were.

        ``only`` judges one of the kernels, by its id, without what is tried where no other is legal.
        """
        kept, lock = self._of(kernels, facts, policy, machine), policy.lock_for(facts, kernels)
        odd = False  # whether a tensor is empty or negated
        for tensor in facts.tensors.values():
            odd = odd or tensor.negated or 0 in tensor.shape
        operation = facts.operation.name
        on_record = ledger.on_record(kernels)
        capturing = bool(facts["capturing"]) if capturing is None else capturing  # where verdicts of captures decide
        judged: list[Candidate] = []
        left: list[Standing] = []
        best, stock, ill = -1, False, health.any_rests()
        for standing in kept.standings:
            kernel = standing.kernel
            if only and kernel.id != only:
                continue
            reasons = health.reasons(kernel, operation, facts.device.name) if ill else []
            if standing.vetted or reasons or kernel.id in on_record or capturing:
                where = machine if standing.untested else None
                reasons = legality.trust_reasons(kernel, facts, policy, where, health, ledger, lock)
            elif kernel.id in kept.stock and not stock and best <= kept.rival:
                pass  # it may hold a rival back
            elif standing.priority < best or (stock and kernel.id not in kept.first):
                left.append(standing)
                continue
            candidate = _judged(standing, facts, policy, reasons, odd=odd, just_failed=kernel.id in failed)
            judged.append(candidate)
            if (
                by_priority
                and not candidate.reasons
                and not kernel.is_reference
                and not moves_data(candidate.adaptations)
            ):
                best = max(best, standing.priority)
                stock = stock or kernel.id in kept.stock
        if only:
            return judged, None
        if left:
            return judged, functools.partial(_judge_left, kept.refused, left, facts, policy, odd)
        judged += kept.refused
        judged = legality.last_resort(judged, facts, policy, lock)
        if health.nothing_else(judged, lock):  # one that rests may run, if all its limits hold
            judged = legality.judge(kernels, facts, policy, machine, health, ledger, failed=failed)
        return judged, None

    def _of(self, kernels: Sequence[Kernel], facts: Facts, policy: Policy, machine: Machine) -> _Standings:
        here = id(facts.device), id(machine), id(policy), tuple(map(id, kernels))  # what is kept holds them
        key = facts.operation.name, facts.layout, here, facts.sizeless()
        return self._kept.get(key, lambda: _kept(kernels, facts, policy, machine))


def _kept(kernels: Sequence[Kernel], facts: Facts, policy: Policy, machine: Machine) -> _Standings:
    every, unasked = kernels, [Candidate(each, (proofs.UNASKED,)) for each in kernels if each.asked_for]
    if unasked:  # no setting asks: such calls are judged in full
        kernels = [each for each in every if not each.asked_for]
    standings = (_standing(kernel, facts, policy, machine) for kernel in kernels)
    first = frozenset(kernel.id for kernel in kernels if may_come_first(kernel, facts, policy))
    found = sorted(standings, key=lambda each: (each.kernel.id not in first, -each.priority))
    refused = (*[each.refused for each in found if each.refused is not None], *unasked)
    open_ones = tuple(each for each in found if each.refused is None)
    stock = frozenset(kernel.id for kernel in kernels if kernel.is_stock(facts)) & first
    others = (each.priority for each in open_ones if each.kernel.id not in first)
    return _Standings(
        refused, open_ones, first, stock, max(others, default=-1), (tuple(every), facts.device, machine, policy)
    )


def _judge_left(
    refused: Sequence[Candidate], left: Sequence[Standing], facts: Facts, policy: Policy, odd: bool
) -> list[Candidate]:
    return [*(_judged(standing, facts, policy, [], odd=odd) for standing in left), *refused]


def _standing(kernel: Kernel, facts: Facts, policy: Policy, machine: Machine) -> Standing:
    machine = isolation.machine(kernel, policy, machine) if policy.isolating else machine
    state, priority = machine.state(kernel.backend, facts.device), kernel.priority_on(facts.device)
    reason = legality.elsewhere(kernel, facts)
    if reason is None and not state.untested:  # a verdict may lift what is said of an untested version
        reason = legality.library_reason(kernel, facts, machine, None)
    if reason is not None:
        return Standing(kernel, priority, Candidate(kernel, (reason,)))
    by_sizes = policy.rules or policy.isolating  # rules may read them; what processes share has a bound
    denied = [] if by_sizes else legality.policy_reasons(kernel, facts, policy)
    if denied:
        return Standing(kernel, priority, Candidate(kernel, tuple(denied)))
    vetted = state.untested or (policy.require_vetting and kernel.trust.needs_verdict)
    if kernel.revision is not None:  # a descriptor's reasons are reported with the kernel's own
        return Standing(kernel, priority, None, state.untested, vetted, tuple(legality.adaptations_for(kernel, facts)))
    seen = facts.seen_in(kernel.layout)
    watched = Watched(seen)
    steps: list[Limit | Findings] = [_settled(limit, watched) for limit in kernel.limits]
    steps += [tuple(legality.argument_findings(kernel, seen)), _settled(_OfState(kernel), watched)]
    found = [finding for step in steps if isinstance(step, tuple) for finding in step]
    adaptations = legality.adaptations_for(kernel, facts)
    view = tuple(adaptations)
    refused = legality.repair(kernel, found, facts, policy, adaptations)
    if refused:
        return Standing(kernel, priority, Candidate(kernel, tuple(refused), tuple(adaptations)))
    left = tuple(step for step in steps if step != NOTHING)
    return Standing(kernel, priority, None, state.untested, vetted, view, left)


@dataclass(frozen=True, slots=True)
class _OfState(Limit):
    """What a kernel demands of the eager state; its author says by the sizes, maybe, which calls are deterministic."""

    kernel: Kernel

    def check(self, facts: Facts) -> Findings:
        return tuple(legality.state_findings(self.kernel, facts))

    def describe(self) -> str:
        return "eager state"


def _settled(limit: Limit, facts: Watched) -> Limit | Findings:
    """What a limit finds in all calls of the kind of these; itself where it read what differs between them.

    Under capture it may ask what was made before, which changes.
    """
    facts.taken()
    try:
        found = limit.check(facts)
    except Exception:  # noqa: BLE001  # third parties write limits, too: it is checked and reported for each call
        return limit
    reads = facts.taken()
    settled = names_no_size(reads, facts) and not ("capturing" in reads and facts["capturing"])
    return found if settled else limit


def _judged(
    standing: Standing, facts: Facts, policy: Policy, reasons: list[Reason], *, odd: bool, just_failed: bool = False
) -> Candidate:
    """Check what is left to check of a kernel for this very call; ``reasons`` say that it is not trusted."""
    kernel = standing.kernel
    if policy.rules or policy.isolating:
        reasons = [*legality.policy_reasons(kernel, facts, policy), *reasons]
    adaptations = standing.adaptations
    if not reasons:
        seen = facts.seen_in(kernel.layout)
        findings = _findings(standing, seen) if kernel.revision is None else legality.limit_findings(kernel, seen)
        if odd and kernel.revision is None:
            findings += legality.memory_findings(kernel, seen)
        if findings:
            made_good = list(adaptations)
            reasons = legality.repair(kernel, findings, facts, policy, made_good)
            adaptations = tuple(made_good)
    if just_failed:
        reasons = [*reasons, legality.JUST_FAILED]
    if kernel.workspace_bytes is not None or facts.device.platform != "cpu" or headroom.RAN_OUT:
        # last: memory alone may keep every kernel from the call
        reasons = [*reasons, *headroom.reasons(kernel, facts, policy)]
    if kernel.jit:
        reasons = [*reasons, *legality.built_reasons(kernel, facts, policy, reasons)]
    return Candidate(kernel, tuple(reasons), adaptations)


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
