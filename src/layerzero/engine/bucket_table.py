"""A plan's choices while a process holds them: which bucket a call lies in, and what is said of one outside of all.

A bucket is a kind of call (operation, dtype and every fact that is no live size) with the live sizes at which it ends.
A call lies in it if none of its live sizes is larger; of several, the smallest bucket counts whose kernel may run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from layerzero.core.errors import FrozenChoiceError
from layerzero.core.evidence import live_sizes, looseness
from layerzero.core.facts import Facts
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.reuse_conditions import WITHIN, Condition, Conditions, SizedCall, size_above
from layerzero.core.system import forking
from layerzero.engine.frozen_choices import FrozenChoice, candidate_of, class_name, noted, why_not, with_choice
from layerzero.engine.policy import Policy
from layerzero.ops import function_of

MOST_MISSES = 1000
"""Classes of calls outside of all buckets that are remembered."""


class Row(NamedTuple):
    """One bucket: the live sizes at which it ends, how its tensors lie, its name and its choice."""

    sizes: Mapping[str, int]
    lies: list[str]
    name: str
    choice: FrozenChoice


class BucketTable:
    """The buckets of a plan.

    Attributes:
        strict: whether a call outside of all buckets is an error; else it is chosen for at run time.
        lacking: whether points of the plan's grid have no bucket, since the budget was over.
        misses: such calls, by the name of their class, each with its reason.
    """

    def __init__(
        self, entries: Iterable[tuple[Facts, Policy, str, FrozenChoice]], *, strict: bool = False, lacking: bool = False
    ) -> None:
        self._lock = forking.lock()
        self._kinds: dict[str, list[Row]] = defaultdict(list)
        self._functions: set[str] = set()
        self.strict, self.lacking = strict, lacking
        self.misses: dict[str, Reason] = {}
        for facts, policy, name, choice in entries:
            kind = class_name(facts, policy, dense=True, sizes="")
            self._kinds[kind].append(Row(live_sizes(facts), looseness(facts), name, choice))
            self._functions.add(_function(facts))
        for rows in self._kinds.values():
            rows.sort(key=lambda each: (math.prod(each.sizes.values()), each.name))

    def rows(self, facts: Facts, policy: Policy) -> list[Row]:
        """The buckets that a call lies in: those of tensors that lie as its own first, then by size."""
        sizes, lies = live_sizes(facts), looseness(facts)
        found = [
            row
            for row in self._kinds.get(class_name(facts, policy, dense=True, sizes=""), ())
            if all(size <= row.sizes.get(name, -1) for name, size in sizes.items())
        ]
        return sorted(found, key=lambda row: row.lies != lies)

    def held(self, report: Report, policy: Policy) -> Report:
        """The report with the plan's kernel as its choice; as it is for a call that the plan says nothing of."""
        rows = self.rows(report.facts, policy)
        for row in rows:
            found = candidate_of(report, row.choice)
            if found is not None and found.legal:
                note = f"frozen: {found.kernel.id}, by the plan's bucket {row.name}"
                return noted(with_choice(report, found), f"{note}; {row.choice.why}" if row.choice.why else note)
        if rows:
            why = why_not(candidate_of(report, rows[0].choice))
            return noted(report, f"frozen: {rows[0].choice.kernel}, by the plan, cannot run: {why}")
        reason = self.reason(report.facts, policy)
        return report if reason is None else noted(report, str(reason))

    def reason(self, facts: Facts, policy: Policy) -> Reason | None:
        """Why a call lies in no bucket; None for one of a function that the plan says nothing of."""
        if _function(facts) not in self._functions or self.rows(facts, policy):
            return None
        rows = self._kinds.get(class_name(facts, policy, dense=True, sizes=""))
        again = "Solve again with buckets that hold it"
        if self.lacking:
            again = "Points of the plan's grid were not recorded: solve again with a larger budget_s"
        hint = f"{again}, or leave it to the choice at run time"
        if not rows:
            own = class_name(facts, policy, dense=True, sizes="").split()
            near = self._nearest(own)
            lacking = " ".join(each for each in near if each not in own)
            more = " ".join(each for each in own if each not in near)
            wanted = lacking or f"without {more.replace('requires_grad=True', 'gradients')}"
            got = more or f"without {lacking}"
            if "requires_grad=True" in more.split():
                hint = "Use torch.no_grad(): a plan is solved for calls without gradients"
            return Reason(ReasonCode.PLAN_BUCKET_MISS, "the kind of call", wanted, got, hint)
        sizes = live_sizes(facts)

        def over(row: Row) -> list[str]:
            return [name for name, size in sizes.items() if size > row.sizes.get(name, -1)]

        nearest = min(rows, key=lambda row: (len(over(row)), -math.prod(row.sizes.values())))
        names = over(nearest)
        wanted = " and ".join(f"at most {nearest.sizes.get(name)}" for name in names)
        got = " and ".join(str(sizes[name]) for name in names)
        return Reason(ReasonCode.PLAN_BUCKET_MISS, " and ".join(names), wanted, got, hint)

    def bounded(
        self, conditions: Conditions | None, facts: Facts, policy: Policy, order: tuple[str, ...]
    ) -> Conditions | None:
        """What calls of other sizes must satisfy to share a plan, so that they lie in the same buckets as well.

        They have the same bit length. Where a bucket ends within it, a size stays between two ends. No condition says
        that of a product of several: calls share a plan there if all of them lie in some bucket, which counts for what
        is fast and not for what is legal; else only the exact call has the plan.
        """
        rows = self._kinds.get(class_name(facts, policy, dense=True, sizes=""), [])
        call, more = SizedCall(facts, None, order, frozenset()), list[Condition]()
        for name, size in live_sizes(facts).items():
            ends = sorted({row.sizes[name] for row in rows if name in row.sizes})
            if not any(1 << size.bit_length() >> 1 <= end < size_above(size) for end in ends):
                continue
            leading = call.sizes("...") if facts.operation.schema.axis(name).leading else ()
            try:
                where = leading[0] if len(leading) == 1 else call.size(name)
            except IndexError:
                if size_above(size) > rows[-1].sizes.get(name, -1):  # the largest, which holds all that others hold
                    return None
                continue
            least = max((end + 1 for end in ends if end < size), default=0)
            more.append((WITHIN, (where,), (least, min((end for end in ends if end >= size), default=1 << 62))))
        return None if conditions is None else (*conditions, *more)

    def _nearest(self, words: Sequence[str]) -> list[str]:
        """The words of the kind that shares most of them, the operation first of all."""
        kinds = [each.split() for each in self._kinds]
        return max(kinds, key=lambda each: (each[0] == words[0], len({*each} & {*words}), each))

    def missed(self, facts: Facts, policy: Policy) -> str | None:
        """Remember a call outside of all buckets; what to tell of it, the first time that its class comes."""
        reason, name = self.reason(facts, policy), class_name(facts, policy)
        with self._lock:
            if reason is None or name in self.misses or len(self.misses) >= MOST_MISSES:
                return None
            self.misses[name] = reason
        return f"{facts.operation.name}: {reason}; it is chosen for at run time"

    def refuse(self, report: Report, policy: Policy) -> None:
        """Raise FrozenChoiceError for a call outside of all buckets of a strict plan."""
        reason = self.reason(report.facts, policy) if self.strict and not report.locked else None
        if reason is not None:
            self.missed(report.facts, policy)
            raise FrozenChoiceError(report.operation, [str(reason)])


def _function(facts: Facts) -> str:
    """The function whose calls a plan speaks of together; operations without tensors are each their own."""
    function = function_of(facts.operation.name)
    return facts.operation.name if function is None else function.name
