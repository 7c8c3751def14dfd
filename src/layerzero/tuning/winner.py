"""New times, and whether they make another kernel the best one: only then are choices made anew."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from layerzero.core.evidence import Evidence, Measurement
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.plan import Candidate
from layerzero.engine import score
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.tuning.rows import work_of


def record_times(facts: Facts, times: Mapping[Kernel, Measurement]) -> bool:
    """Remember the times of a tuning window; start a new epoch if they changed the winner, and tell whether they did.

    The winner is what selection would take among the kernels that have times, and another one replaces it only if it
    is ahead by more than the noise of both: plans that were chosen stay chosen while two kernels are as good as equal.
    """
    kinds = sorted({measurement.graph for measurement in times.values()})
    asked = [facts.on(facts.device, capturing=graph) for graph in kinds]
    with _LOCK:
        held = _HELD.setdefault(ENGINE.ledger, {})
        before = [held.get(_identity(each)) or _winner(each) for each in asked]
        for kernel, measurement in times.items():
            ENGINE.ledger.record_time(kernel, facts, measurement)
        after = [_next(each, old) for each, old in zip(asked, before, strict=True)]
        held.update((_identity(each), winner) for each, winner in zip(asked, after, strict=True) if winner is not None)
    changed = after != before
    if changed:
        ENGINE.new_winner()
    return changed


def _identity(facts: Facts) -> tuple[bytes, bool]:
    return work_of(facts).key, bool(facts["capturing"])


def _ranked(facts: Facts) -> tuple[list[Candidate], Mapping[str, Evidence]]:
    kernels = ENGINE.registry.candidates(str(facts["operation"]))
    evidence = ENGINE.ledger.evidence(kernels, facts)
    known = [Candidate(kernel, ()) for kernel in kernels if kernel.id in evidence]
    return score.rank(known, facts, CONFIGURATION.policy, ENGINE.ledger), evidence


def _winner(facts: Facts) -> str | None:
    ranked, _ = _ranked(facts)
    return ranked[0].kernel.id if ranked else None


def _next(facts: Facts, before: str | None) -> str | None:
    """The winner after new times: the one before unless another is ahead by more than the noise."""
    ranked, evidence = _ranked(facts)
    best = ranked[0].kernel.id if ranked else None
    if best is None or before is None or before not in evidence:
        return best
    new, old = evidence[best], evidence[before]
    return best if old.time_us > new.time_us * (1 + max(new.noise, old.noise)) else before


_HELD: WeakKeyDictionary[Ledger, dict[tuple[bytes, bool], str]] = WeakKeyDictionary()
"""By ledger: the winner that this process's plans were chosen by, for each work and kind of time."""

_LOCK = threading.Lock()
