"""The order of legal kernels: measured evidence decides, static priority fills the gaps, policy bends.

What torch's own function would run is the champion of a call of which nothing is known: a priority alone replaces it by
no other library, unless policy says ``unmeasured: priority``. Kernels that the user's own code registered are not held
back by that: whoever registers one means it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

from layerzero.core.evidence import Evidence, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger, Libraries
from layerzero.core.plan import Candidate, Term
from layerzero.engine.policy import Policy, names_kernel

POINTS_PER_DOUBLING = 50.0
"""What twice the best time costs."""

UNMEASURED_PENALTY = 30.0
"""What a kernel without evidence loses beside one that has some."""

STOCK_POINTS = -100.0
"""What a kernel has beside torch's own while no time speaks for it: less than any priority is worth."""

STOCK_MARGIN = 5.0
"""What torch's own kernel keeps before a quicker one, as far as the times are in doubt: at a confidence of 0.7 (a table
of another machine), the other must gain 3 %, at 0.5 it must gain 7 %; more than the noise in any case.

What first calls get by the tables that ship, computed from the device times of 21 to 27 calls of unseen heads: 1.115,
1.117 and 1.096 of the best at 5 (two H200s, an H100), the same at 0, and 1.144, 1.137 and 1.096 at 10 (2026-11-24).
"""

PREFER_POINTS = 20.0
AVOID_POINTS = -50.0
ADAPTATION_POINTS = -5.0
"""What each copy, repeat or fold costs a kernel without evidence; a measured time includes them."""

SURELY = 1.5
"""How much slower a measured kernel must be, the noise of both aside, for doubts to keep nothing for it: torch's own
norm stayed where it had taken 4.1 times a library's, with a confidence below 0.1 (AMD EPYC, other processes beside
it, 2026-11-22)."""


def rank(
    candidates: Sequence[Candidate], facts: Facts, policy: Policy, ledger: Ledger, libraries: Libraries | None = None
) -> list[Candidate]:
    """Score the legal candidates and order them; the refused follow by priority and id.

    With A the highest priority among candidates that have evidence and c_best their least cost, evidence is worth
    ``A - 50 * log2(c / c_best)``, the term ``cost``; one confidence c, the lowest of the set, mixes it with priority.
    Who is slower than the quickest by more than the noise of both has no more priority than that one: doubts lift
    nobody over it. Without evidence a candidate has its priority, less c * 30 points where another one has evidence and
    policy does not prefer it. Within the noise of the best, priority and then the kernel id decide, so that ranks and
    restarts agree.

    Beside torch's own kernel, one of a library without evidence loses 100 points, and one with evidence (1 - c) * 200
    where torch's has none. Where it has, no priority counts more than that of torch's, which keeps (1 - c) * 5 before
    a quicker one, unless it is surely slower.

    ``libraries`` are those that a question is about; times hold for versions.
    """
    legal = [candidate for candidate in candidates if not candidate.reasons]
    asked = [each.kernel for each in legal]
    evidence = ledger.evidence(asked, facts) if libraries is None else ledger.evidence(asked, facts, libraries)
    known = [each.kernel for each in legal if each.kernel.id in evidence]
    device, named = facts.device, _named(facts, policy)
    stock, first = _kept_first([each.kernel for each in legal], facts, policy, named)
    priority_of = {each.kernel.id: each.kernel.priority_on(device) for each in legal}
    anchor = max([priority_of[kernel.id] for kernel in known], default=0)
    quickest = min(known, key=lambda kernel: evidence[kernel.id].cost_us, default=None)
    confidence = min((found.confidence for found in evidence.values()), default=0.0)
    scored = []
    for candidate in legal:
        kernel, found = candidate.kernel, evidence.get(candidate.kernel.id)
        own, bonus = priority_of[kernel.id], _policy_terms(kernel, named)
        held_back = stock is not None and kernel.id not in first
        if found is not None and quickest is not None:
            best = evidence[quickest.id]
            points = anchor - POINTS_PER_DOUBLING * math.log2(found.cost_us / best.cost_us)
            slower = found.cost_us > best.cost_us * (1 + found.cost_noise + best.cost_noise)
            surely = slower and _surely_slower(found, best)
            bound = quickest if slower and (stock is None or surely) else stock
            priority = own if bound is None else min(own, priority_of[bound.id])
            if surely and stock is not None:
                priority = min(priority, priority_of[stock.id])
            terms = [Term("cost", confidence * points), Term("priority", (1 - confidence) * priority)]
            if kernel is stock and kernel is not quickest and not surely:
                terms.append(Term("stock", (1 - confidence) * STOCK_MARGIN))
            elif held_back and stock is not None and stock.id not in evidence:
                terms.append(Term("stock", 2 * (1 - confidence) * STOCK_POINTS))
        else:
            terms = [Term("priority", own)]
            if held_back:
                terms.append(Term("stock", STOCK_POINTS))
            elif evidence and not any(term.name == "prefer" for term in bonus):
                terms.append(Term("unmeasured", -UNMEASURED_PENALTY * confidence))
            if candidate.adaptations:
                moves = sum([adaptation.moves_data for adaptation in candidate.adaptations])
                if moves:
                    terms.append(Term("adaptation", moves * ADAPTATION_POINTS))
        scored.append(_with_evidence(candidate, (*terms, *bonus), found))
    refused = sorted(
        [each for each in candidates if each.reasons], key=lambda each: (-each.kernel.priority, each.kernel.id)
    )
    return _order(scored, confidence, priority_of, first) + refused


def _surely_slower(found: Evidence, best: Evidence) -> bool:
    """Whether both were measured here and no noise of either makes up for the distance."""
    if found.provenance is not Provenance.MEASURED or best.provenance is not Provenance.MEASURED:
        return False
    return found.cost_us / (1 + found.cost_noise) > SURELY * best.cost_us * (1 + best.cost_noise)


def may_come_first(kernel: Kernel, facts: Facts, policy: Policy) -> bool:
    """Whether a priority alone may put no kernel of another library before it.

    That is what torch's own function runs, and beside it what the user wants: what a program itself registers, and what
    policy prefers.
    """
    if policy["unmeasured"] != "stock":
        return False
    return kernel.is_stock(facts) or _is_wanted(kernel, _named(facts, policy)[0])


def _kept_first(
    legal: Sequence[Kernel], facts: Facts, policy: Policy, named: _Named
) -> tuple[Kernel | None, frozenset[str]]:
    """The kernel that torch's own function would take, and with it those that it does not hold back.

    Of several of torch's that is the one of the highest priority, unless the user avoids it; without one, nobody is.
    """
    if policy["unmeasured"] != "stock":
        return None, frozenset()
    prefer, avoid = named
    stock = [each for each in legal if each.is_stock(facts)]
    if avoid:
        stock = [each for each in stock if not any(names_kernel(pattern, each) for pattern in avoid)]
    if not stock:
        return None, frozenset()
    taken = max(stock, key=lambda kernel: kernel.priority_on(facts.device))
    return taken, frozenset([taken.id, *(each.id for each in legal if _is_wanted(each, prefer))])


def _is_wanted(kernel: Kernel, preferred: Sequence[str]) -> bool:
    return kernel.backend.origin in ("code", "decorator") or any(names_kernel(pattern, kernel) for pattern in preferred)


_Named = tuple[Sequence[str], Sequence[str]]
"""What policy prefers and avoids for a call."""


def _named(facts: Facts, policy: Policy) -> _Named:
    prefer, avoid = policy.prefer_sources, policy.avoid_sources
    for rule in policy.rules:
        if (rule.prefer or rule.avoid) and rule.matches(facts):
            prefer, avoid = (*prefer, *rule.prefer), (*avoid, *rule.avoid)
    return prefer, avoid


def _policy_terms(kernel: Kernel, named: _Named) -> list[Term]:
    prefer, avoid = named
    terms: list[Term] = []
    if not prefer and not avoid:  # as it is mostly
        return terms
    if any(names_kernel(pattern, kernel) for pattern in prefer):
        terms.append(Term("prefer", PREFER_POINTS))
    if any(names_kernel(pattern, kernel) for pattern in avoid):
        terms.append(Term("avoid", AVOID_POINTS))
    return terms


def _with_evidence(candidate: Candidate, terms: tuple[Term, ...], found: Evidence | None) -> Candidate:
    return Candidate(candidate.kernel, (), candidate.adaptations, terms, found)


def _cost_noise(candidate: Candidate) -> float:
    return 0.0 if candidate.evidence is None else candidate.evidence.cost_noise


def _kept_in_doubt(candidate: Candidate) -> float:
    """What torch's own kernel keeps before a quicker one."""
    return sum([term.points for term in candidate.terms if term.name == "stock" and term.points > 0.0])


def _order(
    scored: list[Candidate], confidence: float, priority_of: Mapping[str, int], first: frozenset[str]
) -> list[Candidate]:
    """Best first; those within the noise of the best are ordered by priority and id, those of ``first`` before others.

    What counts is the noise of the best and of the one beside it, as far as evidence does: a hopeless third, measured
    roughly, blurs nothing. And what torch's own keeps for the same doubts makes no tie of what is further apart: with
    both, a library had to gain 11 % by a table of another machine, and decoding on an H100 took 1.12 of torch's own
    device time, where 1.08 is what they get without, computed from their times (11 calls of unseen heads, 2026-11-24).
    """
    if len(scored) < 2:
        return scored
    scores = [(each.score, each.kernel.id, each) for each in scored]
    top, _, best = max(scores, key=operator.itemgetter(0, 1))

    def place(scored: tuple[float, str, Candidate]) -> tuple[float, bool, float, str]:
        behind, candidate = top - scored[0], scored[2]
        noise = confidence * POINTS_PER_DOUBLING * math.log2(1.0 + max(_cost_noise(best), _cost_noise(candidate)))
        tied = behind <= 0.0 or behind + _kept_in_doubt(candidate) <= noise
        kernel = candidate.kernel
        return 0.0 if tied else behind, kernel.id not in first, -priority_of[kernel.id], kernel.id

    return [each for _, _, each in sorted(scores, key=place)]
