"""New times, and whether they make another kernel the best one: only then are choices made anew."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from layerzero.core.evidence import Evidence, Measurement
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.system import forking
from layerzero.engine import probe
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.order import replaces
from layerzero.engine.pick import ranked
from layerzero.tuning.keeping.rows import work_of


def record_times(facts: Facts, times: Mapping[Kernel, Measurement]) -> bool:
    """Remember the times of a tuning window; start a new epoch if they changed the winner, and tell whether they did.

    The winner is what selection would take; :func:`layerzero.engine.order.replaces` says when another one replaces it.
    """
    kinds = sorted({measurement.graph for measurement in times.values()})
    asked = [facts.on(facts.device, capturing=graph) for graph in kinds]
    with _LOCK:
        epoch, held = ENGINE.epoch, _HELD.setdefault(ENGINE.ledger, {})
        before = [_held(held, each, epoch) or _winner(each)[0] for each in asked]
        for kernel, measurement in times.items():
            ENGINE.ledger.record_time(kernel, facts, measurement)
        after = [_next(each, old) for each, old in zip(asked, before, strict=True)]
        held.update(
            (_identity(each), (epoch, winner)) for each, winner in zip(asked, after, strict=True) if winner is not None
        )
    changed = after != before
    if changed:
        ENGINE.new_winner()
    return changed


def _identity(facts: Facts) -> tuple[bytes, bool]:
    return work_of(facts).key, bool(facts["capturing"])


def _held(held: Mapping[tuple[bytes, bool], tuple[int, str]], facts: Facts, epoch: int) -> str | None:
    """The winner that plans were chosen by; None if they were chosen anew since, by what selection takes now."""
    then, winner = held.get(_identity(facts), (epoch, None))
    return winner if then == epoch else None


def _winner(facts: Facts) -> tuple[str | None, Mapping[str, Evidence]]:
    """What selection takes for a call under the process-wide settings, and the evidence of the kernels it may take."""
    policy, ledger = CONFIGURATION.policy, ENGINE.ledger
    kernels = ENGINE.registry.candidates(str(facts["operation"]))
    # what is not legal wins nothing, however fast it was in a tuning run that may compile
    machine = probe.this_machine()
    judged, _ = ENGINE.standings.judge(kernels, facts, policy, machine, ENGINE.health, ledger, by_priority=False)
    legal = [each for each in ranked(judged, facts, policy, ledger) if each.legal]
    evidence = {each.kernel.id: each.evidence for each in legal if each.evidence is not None}
    return (legal[0].kernel.id if legal else None), evidence


def _next(facts: Facts, before: str | None) -> str | None:
    """The winner after new times: the one before unless another replaces it."""
    best, evidence = _winner(facts)
    if best is None or before is None or best not in evidence or before not in evidence:
        return best
    return best if replaces(evidence[best], evidence[before]) else before


_HELD: WeakKeyDictionary[Ledger, dict[tuple[bytes, bool], tuple[int, str]]] = WeakKeyDictionary()
"""By ledger, for each work and kind of time: the winner that this process's plans were chosen by, and the epoch."""

_LOCK = forking.lock()
