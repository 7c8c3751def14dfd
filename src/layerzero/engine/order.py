"""The order of the legal kernels of a call, and why: the one place where a choice is made.

:func:`order` is a pure function of the candidates, the facts, the policy and the evidence. It asks nothing and keeps
nothing. The candidates may come in any order. What decides, in this order:

1. **Which times count** (:func:`reliable`). A prediction that is ahead of a time of this very call by less than it may
   be off by does not count. A kernel that is :data:`DECIDED` times slower, noise aside, is as certain as the best.
2. **What a kernel costs** (:func:`decisive`). That is how long a caller waits. Among kernels with about the same wait
   (:data:`NEARLY`, :data:`NEARLY_MEASURED`), plans for new sizes and the device's time decide. Times stay as measured.
3. **Points.** A kernel with evidence has ``A - 50 * log2(cost / least cost)``, the term ``cost``. A is the highest
   priority among kernels with evidence. One confidence, the lowest of the set, mixes that with the term ``priority``.
   A kernel without evidence has its priority, less ``unmeasured`` where another one has evidence, less ``adaptation``.
4. **What torch's own function runs** (the term ``stock``). A priority alone replaces it by no other library, unless
   policy says ``unmeasured: priority``. Kernels that the user registered or prefers are not held back. One exception
   needs no time (the term ``emulated``): where a CPU emulates half precision, a kernel that widens it comes first.
5. **Policy**: the terms ``prefer`` and ``avoid``. A lock is applied to the order later (:mod:`layerzero.engine.pick`).
6. **Ties.** Within the noise of the best, these decide: first what stock does not hold back, then priority, then the
   kernel id. So ranks and restarts agree. The refused follow by priority and id.

Each constant says what it is and which measurement made it so; ``docs/decisions`` 0031, 0044 and 0059 say more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from layerzero.core.evidence import HOST_MARGIN, Evidence, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Candidate, Term
from layerzero.engine import isolation
from layerzero.engine.isolation import NO_MORE
from layerzero.engine.policy import Named, Policy, kept_first, named, policy_terms

DECIDED = 2.0
"""A kernel that is so many times slower, noise aside, is slower for sure: rough times of it blur nothing."""

FOR_SURE = 0.5
"""The least confidence in a best from which all others are slower for sure: no priority makes up for twice the time."""

NEARLY = 1.1
"""Kernels with at most so many times the shortest wait have about the same wait."""

NEARLY_MEASURED = 1.5
"""The same for a kernel that was measured here; in its calls the product of wait and device's time decides.

The device's time repeats itself, the host's does not. An H200 and an H100 were tuned to a kernel that takes the device
28 and 31 us for one of 19 and 20; callers waited 37 us for 39 on one and, with a host half as quick, 44 for 60 on the
other (2026-11-24). By what was measured of 1,014 calls for the tables that ship, the least product within 1.5 takes
1.010 (H100) and 1.008 (H200) of the least device time of all, and callers wait 1.004 and 1.002 of the shortest; the
device alone takes 1.016 and 1.010 within 1.1, and within 1.5 1.008 and 1.005 for waits of 1.011 and 1.010.

By so much at most one follows the best, too. Where that was :data:`NEARLY`, bursts on an H100's host in the middle
of builds, off by a quarter and a third, made a tie of 18 and 30 us of the device, and torch's own came first
(2026-11-24).
"""

DEVICE_NOISE = 0.02
"""A device repeats itself within a percent or two, whatever its host does."""

POINTS_PER_DOUBLING = 50.0
"""What twice the best time costs."""

UNMEASURED_PENALTY = 30.0
"""What a kernel without evidence loses to one that has some."""

STOCK_POINTS = -100.0
"""What a kernel has over torch's own while no time speaks for it: less than any priority is worth."""

STOCK_MARGIN = 5.0
"""What torch's own kernel keeps before a quicker one, as far as the times are in doubt: at a confidence of 0.7 (a table
of another machine), the other must gain 3 %, at 0.5 it must gain 7 %; more than the noise in any case.

What first calls get by the tables that ship, computed from the device times of 21 to 27 calls of unseen heads: 1.115,
1.117 and 1.096 of the best at 5 (two H200s, an H100), the same at 0, and 1.144, 1.137 and 1.096 at 10 (2026-11-24).
"""

EMULATED, EMULATED_POINTS = "emulated", 30.0
"""For computing in float32 what torch emulates: with a priority of 30, more than torch's own (50, packed 55), and less
than one of these that a user prefers. A time of its own decides instead."""

ADAPTATION_POINTS = -5.0
"""What each copy, repeat or fold costs a kernel without evidence; a measured time includes them."""

SURELY = 1.5
"""How much slower a measured kernel must be, the noise of both aside, for doubts to keep nothing for it: torch's own
norm stayed where it had taken 4.1 times a library's, with a confidence below 0.1 (AMD EPYC, other processes running,
2026-11-22)."""

Known = Mapping[str, Evidence]  # by kernel id
Us = Mapping[str, float]  # by kernel id

_ESTIMATED = frozenset({Provenance.PREDICTED, Provenance.PRIOR})
"""Of sizes that were not measured here, so that nothing is planned for them yet."""


def order(
    candidates: Iterable[Candidate],
    facts: Facts,
    policy: Policy,
    evidence: Known,
    widening: Collection[str] = (),
    extra_us: Us = NO_MORE,
) -> list[Candidate]:
    """Give the legal candidates their terms and costs and order them, best first; the refused follow.

    Args:
        candidates: as judged for the call, in any order.
        facts: of the call.
        policy: what the user prefers and avoids, and what decides where nothing was measured.
        evidence: the times that are known, as the ledger gives them.
        widening: the kernels that are known to be faster than what the device emulates for such a call.
        extra_us: by id, what kernels cost more in processes of their own; times are without it.
    """
    candidates = list(candidates)
    legal = [each for each in candidates if not each.reasons]
    refused = [(-each.kernel.priority, each.kernel.id, each) for each in candidates if each.reasons]
    evidence = isolation.costing_more(evidence, extra_us) if extra_us else evidence
    call = _call(legal, facts, policy, evidence, widening, extra_us)
    scored = [_scored(candidate, call) for candidate in legal]
    ordered = _ordered(scored, call) if len(scored) > 1 else scored
    return [*ordered, *[each for *_, each in sorted(refused)]] if refused else ordered


def costs(evidence: Mapping[str, Evidence], kernels: Iterable[Kernel]) -> Mapping[str, Evidence]:
    """The evidence that counts among these kernels, with the costs and the confidence by which they are compared."""
    planning = {kernel.id for kernel in kernels if kernel.plans_sizes}
    return decisive(reliable(evidence), planning) if evidence else evidence


def replaces(new: Evidence, held: Evidence) -> bool:
    """Whether new times make another kernel the winner: its cost is less by more than the noise of both.

    Plans that were chosen stay chosen while two kernels are as good as equal. Both have their :func:`costs`.
    """
    return held.cost_us > new.cost_us * (1 + max(new.cost_noise, held.cost_noise))


def reliable(found: Mapping[str, Evidence]) -> Mapping[str, Evidence]:
    """The times that count; what is slower for sure is as certain as the best, since a set has its lowest confidence.

    What a prediction may be off by lowers its confidence and makes no ties: the estimate is the better guess in one.
    Choices recomputed from an H200's stored times took 1.010 to 1.013 times the best of three judgements of 80 calls
    so, 1.016 with ties within 1 % (2026-11-22).
    """
    found = _without_doubtful(found)
    name = _least(found)
    best = found[name]
    bound = DECIDED * best.cost_us * (1 + best.cost_noise)
    slower = {other for other, each in found.items() if each.cost_us / (1 + each.cost_noise) > bound}
    if len(found) > 1 and len(slower) == len(found) - 1 and name not in slower:
        # no other may be the best one: rough times of it, taken on a busy machine, still say that
        best = msgspec.structs.replace(best, confidence=max(best.confidence, FOR_SURE))
        found = {**found, name: best}
    counting = {}
    for name, each in found.items():
        confidence = max(each.confidence, best.confidence) if name in slower else each.confidence
        noise = 0.0 if each.provenance is Provenance.PREDICTED else each.cost_noise
        same = confidence == each.confidence and noise == each.cost_noise
        counting[name] = each if same else msgspec.structs.replace(each, confidence=confidence, cost_noise=noise)
    return counting


def _without_doubtful(found: Mapping[str, Evidence]) -> Mapping[str, Evidence]:
    """Without predictions that are ahead of a time of this very call by less than they may be off by.

    A run of tuning measured FlashAttention 3 at 500 us and had no time left for FlashAttention 4, of which 452 were
    predicted, by up to 17 % off: calls took 1.22 times as long with it (decoding over pages, H200, 2026-11-23).
    """
    own = [each.cost_us for each in found.values() if each.provenance is Provenance.MEASURED]
    if not own or len(own) == len(found):
        return found
    quickest_us = min(own)
    return {
        name: each
        for name, each in found.items()
        if each.provenance is not Provenance.PREDICTED
        or not each.cost_us < quickest_us < each.cost_us * (1 + each.cost_noise)
    }


def _least(found: Mapping[str, Evidence]) -> str:
    """The kernel with the least cost; of equal ones the first id, so that the order of the kernels says nothing."""
    return min([(each.cost_us, name) for name, each in found.items()])[1]


def wait_us(each: Evidence) -> float:
    """How long a caller waits at the host's usual pace: that a host may be slower counts elsewhere."""
    return each.cost_us if each.device_us is None else max(each.device_us, each.cost_us / HOST_MARGIN)


def decisive(found: Mapping[str, Evidence], planning: Collection[str] = ()) -> Mapping[str, Evidence]:
    """The same evidence, with costs by which, of kernels with about the same wait, the least costly is first.

    That is one that makes no plan for a size that was not measured here, and of these the one that takes the device
    least, where all of them tell it. In a call of which anything was measured here, it is the least product of wait and
    device's time, so that no measured kernel is behind one that it beats by both. The others follow by what they cost
    more, at most by the bound, and never after one that is not near; that one keeps its cost, in which the host counts
    :data:`HOST_MARGIN` times. Times stay as they were measured.

    Calls back to back wait for the longer of host and device, and of small calls that is the host, whose pace is a
    machine's: by it alone, an H200 behind a slow host took kernels of 1.6 times the best one's device time
    (2026-11-22). A caller that captures a step, or launches it behind longer work, waits for the device. A library that
    plans anew for every size (``planning``, by id) makes the first call of each take a thousand times as long, of which
    no repeated measurement says anything.
    """
    if not found or (not planning and all(each.device_us is None for each in found.values())):  # as on a CPU
        return found
    waits = {name: wait_us(each) for name, each in found.items()}
    best_us = min(waits.values())
    near = {name: each for name, each in found.items() if waits[name] <= _nearness(each) * best_us}
    plans = {name for name, each in near.items() if name in planning and each.provenance in _ESTIMATED}
    free = {name: each for name, each in near.items() if name not in plans} or near
    told = all(each.device_us is not None for each in free.values())
    measured = any(each.provenance is Provenance.MEASURED for each in found.values())  # one rule for all that are near
    alone = len(near) < 2 and (not measured or _least(found) in near)  # then nearness decides nothing
    if alone or (not told and len(free) == len(near)):
        return found
    cost = {name: each.device_us if told and each.device_us else waits[name] for name, each in free.items()}
    if measured:
        cost = {name: math.sqrt(us * waits[name]) for name, us in cost.items()}
    least = min(cost.values())
    most = NEARLY_MEASURED if measured else NEARLY
    further_us = min([each.cost_us for name, each in found.items() if name not in near], default=math.inf)
    compared = dict(found)
    for name, each in near.items():
        cost_us = min(best_us * min(cost.get(name, math.inf) / least, most), further_us)
        noise = min(each.cost_noise, DEVICE_NOISE) if told else each.cost_noise
        if told and each.provenance is Provenance.MEASURED:  # half of what decides is the wait
            noise = (noise + each.cost_noise) / 2
        compared[name] = msgspec.structs.replace(each, cost_us=cost_us, cost_noise=noise)
    return compared


def _nearness(each: Evidence) -> float:
    return NEARLY_MEASURED if each.provenance is Provenance.MEASURED else NEARLY


class _Call(NamedTuple):
    """What the legal kernels of a call have in common while they are scored.

    Attributes:
        named: what policy prefers and avoids.
        priority: of each kernel on the device, by id.
        stock: the kernel that torch's own function would take, None where that holds nothing back.
        first: that one, and those that it does not hold back.
        found: the evidence that counts, with costs.
        widening: those that are known to be faster than what the device emulates.
        quickest: the kernel with the least cost, None without evidence.
        anchor: the highest priority among kernels with evidence.
        confidence: of the set: the lowest of its members.
        extra_us: what processes of their own add to costs.
    """

    named: Named
    priority: Mapping[str, int]
    stock: str | None
    first: frozenset[str]
    found: Mapping[str, Evidence]
    widening: Collection[str]
    quickest: str | None
    anchor: int
    confidence: float
    extra_us: Us


def _call(
    legal: Sequence[Candidate], facts: Facts, policy: Policy, evidence: Known, widening: Collection[str], extra_us: Us
) -> _Call:
    wishes, device = named(facts, policy), facts.device
    priority = {each.kernel.id: each.kernel.priority_on(device) for each in legal}
    stock, first = kept_first(legal, facts, policy, wishes, priority)
    first = first.union(widening) if stock is not None else first
    found = {name: evidence[name] for name in priority if name in evidence} if evidence else evidence
    if not found:
        return _Call(wishes, priority, stock, first, found, widening, None, 0, 0.0, extra_us)
    found = costs(found, [each.kernel for each in legal])
    anchor = max([priority[name] for name in found])
    confidence = min([each.confidence for each in found.values()])
    return _Call(wishes, priority, stock, first, found, widening, _least(found), anchor, confidence, extra_us)


def _scored(candidate: Candidate, call: _Call) -> Candidate:
    kernel = candidate.kernel
    found = call.found.get(kernel.id)
    asked = policy_terms(kernel, *call.named) if any(call.named) else ()
    held_back = call.stock is not None and kernel.id not in call.first
    if found is not None and call.quickest is not None:
        terms = _measured_terms(kernel.id, found, call.found[call.quickest], call, held_back=held_back)
    else:
        terms = [Term("priority", call.priority[kernel.id])]
        if kernel.id in call.widening:
            terms.append(Term(EMULATED, EMULATED_POINTS))
        elif held_back:
            terms.append(Term("stock", STOCK_POINTS))
        elif call.found and "prefer" not in [term.name for term in asked]:
            terms.append(Term("unmeasured", -UNMEASURED_PENALTY * call.confidence))
        moves = sum([each.moves_data for each in candidate.adaptations]) if candidate.adaptations else 0
        if moves:
            terms.append(Term("adaptation", moves * ADAPTATION_POINTS))
    if kernel.id in call.extra_us:
        doubling = call.confidence * POINTS_PER_DOUBLING
        terms = isolation.terms_apart(terms, found, call.extra_us[kernel.id], doubling)
    return Candidate(kernel, (), candidate.adaptations, (*terms, *asked), found, candidate.workspace)


def _measured_terms(name: str, found: Evidence, best: Evidence, call: _Call, *, held_back: bool) -> list[Term]:
    """Terms of a kernel with evidence, relative to the quickest one.

    One that is slower than the quickest by more than the noise of both has no more priority than that one: doubts lift
    none over it. Against torch's own, no priority counts more than that of torch's, which keeps ``(1 - c) * 5`` before
    a quicker one, unless it is surely slower. Where torch's has no evidence, one with evidence loses ``(1 - c) * 200``.
    """
    stock, doubt = call.stock, 1 - call.confidence
    points = call.anchor - POINTS_PER_DOUBLING * math.log2(found.cost_us / best.cost_us)
    slower = found.cost_us > best.cost_us * (1 + found.cost_noise + best.cost_noise)
    surely = slower and surely_slower(found, best)
    bound = call.quickest if slower and (stock is None or surely) else stock
    priority = call.priority[name] if bound is None else min(call.priority[name], call.priority[bound])
    if surely and stock is not None:
        priority = min(priority, call.priority[stock])
    terms = [Term("cost", call.confidence * points), Term("priority", doubt * priority)]
    if name == stock and name != call.quickest and not surely:
        terms.append(Term("stock", doubt * STOCK_MARGIN))
    elif held_back and stock not in call.found:
        terms.append(Term("stock", 2 * doubt * STOCK_POINTS))
    return terms


def surely_slower(found: Evidence, best: Evidence) -> bool:
    """Whether both were measured here and no noise of either makes up for the distance."""
    if found.provenance is not Provenance.MEASURED or best.provenance is not Provenance.MEASURED:
        return False
    return found.cost_us / (1 + found.cost_noise) > SURELY * best.cost_us * (1 + best.cost_noise)


def _ordered(scored: Sequence[Candidate], call: _Call) -> list[Candidate]:
    """Best first; those within the noise of the best are ordered by ``first``, priority and id.

    What counts is the noise of the best and of its rival, as far as evidence does: a hopeless third, measured roughly,
    blurs nothing. And what torch's own keeps for the same doubts makes no tie of what is further apart: with both, a
    library had to gain 11 % by a table of another machine, and decoding on an H100 took 1.12 of torch's own device
    time, where 1.08 is what they get without, computed from their times (11 calls of unseen heads, 2026-11-24).
    """
    scores = [(each.score, each.kernel.id, each) for each in scored]
    top, _, best = max(scores)
    best_noise = 0.0 if best.evidence is None else best.evidence.cost_noise
    places = []
    for score, name, each in scores:
        behind = top - score
        noise = best_noise if each.evidence is None else max(best_noise, each.evidence.cost_noise)
        kept = sum([term.points for term in each.terms if term.name == "stock"]) if name == call.stock else 0.0
        tied = behind <= 0.0 or behind + kept <= call.confidence * POINTS_PER_DOUBLING * math.log2(1.0 + noise)
        places.append((0.0 if tied else behind, name not in call.first, -call.priority[name], name, each))
    places.sort()
    return [each for *_, each in places]
