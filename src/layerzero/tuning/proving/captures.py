"""The proofs that a capture needs where ``graph_strict_mode`` is set: of what calls would choose, in children."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from layerzero.asking.answers import explain
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import capture_text
from layerzero.engine.config import SCOPES
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.graph_safety import SETTING
from layerzero.tuning.proving.vetting import Vetted, vet_calls

log = logging.getLogger("layerzero")

MOST_KERNELS = 4
"""How many kernels are tried for a call, one after the other: torch's own are among the first few."""


def prove_chosen(calls: Sequence[Facts]) -> tuple[Vetted, ...]:
    """Prove what calls would choose in a capture, and where that is unsafe, what they would choose then.

    Returns: what was found. What could not be tried has no verdict, and strict mode goes on refusing it; it is logged.
    """
    found: dict[tuple[str, str], Vetted] = {}
    for _ in range(MOST_KERNELS):
        unknown = [(each, facts) for facts in calls for each in _chosen(facts)]
        pairs = [(each, facts) for each, facts in unknown if (each.id, capture_text(facts)) not in found]
        if not pairs:
            break
        found |= {(each.kernel_id, each.call_class): each for each in vet_calls(pairs, graph=True, go_on=True)}
    for each in found.values():
        if each.verdict is None:
            log.warning("%s: no capture of it was proved, which %s asks for", each, SETTING)
    return tuple(found.values())


def _chosen(facts: Facts) -> Iterator[Kernel]:
    """What the call would run before the capture and in it, as far as nothing is known of its captures."""
    with SCOPES.scope({SETTING: False}):
        reports = [explain(facts), explain(facts.on(facts.device, capturing=True))]
    for report in reports:
        chosen = report.chosen
        if chosen is not None and chosen.kernel.graph_safe and ENGINE.ledger.capture(chosen.kernel, facts) is None:
            yield chosen.kernel
