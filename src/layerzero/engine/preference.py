"""What decides besides times: sources that the user prefers or avoids, and torch's own kernels where none is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Candidate, Term
from layerzero.engine.policy import Policy, names_any

PREFER_POINTS = 20.0
AVOID_POINTS = -50.0

Named = tuple[Sequence[str], Sequence[str]]
"""What policy prefers and avoids for a call."""


def may_come_first(kernel: Kernel, facts: Facts, policy: Policy) -> bool:
    """Whether a priority alone may put no kernel of another library before it.

    That is what torch's own function runs, and what the user wants: what a program itself registers, and what policy
    prefers.
    """
    if policy["unmeasured"] != "stock":
        return False
    return kernel.is_stock(facts) or _is_wanted(kernel, named(facts, policy)[0])


def kept_first(
    legal: Sequence[Candidate], facts: Facts, policy: Policy, asked: Named, priority: Mapping[str, int]
) -> tuple[str | None, frozenset[str]]:
    """The kernel that torch's own function would take, and with it those that it does not hold back.

    Of several of torch's that is the one of the highest priority, unless the user avoids it; without one, none is kept.
    """
    if policy["unmeasured"] != "stock":
        return None, frozenset()
    prefer, avoid = asked
    stock = [
        (-priority[each.kernel.id], each.kernel.id)
        for each in legal
        if each.kernel.is_stock(facts) and not (avoid and names_any(avoid, each.kernel))
    ]
    if not stock:
        return None, frozenset()
    taken = min(stock)[1]
    return taken, frozenset([taken, *[each.kernel.id for each in legal if _is_wanted(each.kernel, prefer)]])


def _is_wanted(kernel: Kernel, preferred: Sequence[str]) -> bool:
    return kernel.backend.origin in ("code", "decorator") or (bool(preferred) and names_any(preferred, kernel))


def named(facts: Facts, policy: Policy) -> Named:
    """What policy prefers and avoids for a call, its rules included."""
    prefer, avoid = policy.prefer_sources, policy.avoid_sources
    for rule in policy.rules:
        if (rule.prefer or rule.avoid) and rule.matches(facts):
            prefer, avoid = (*prefer, *rule.prefer), (*avoid, *rule.avoid)
    return prefer, avoid


def policy_terms(kernel: Kernel, prefer: Sequence[str], avoid: Sequence[str]) -> Sequence[Term]:
    """What the user's preference is worth."""
    terms = [Term("prefer", PREFER_POINTS)] if prefer and names_any(prefer, kernel) else []
    if avoid and names_any(avoid, kernel):
        terms.append(Term("avoid", AVOID_POINTS))
    return terms
