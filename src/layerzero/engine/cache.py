"""Plans by exact key: one table for each policy, one epoch for everything that could make a plan stale."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from layerzero.core.plan import Plan
from layerzero.engine.policy import Policy

Table = dict[Hashable, Plan]
"""Readers take no lock: a lookup is one dictionary read, and the only write is the plan's reference bit."""


MAX_TABLES = 32
"""Policies whose plans are kept; a program that opens scopes with ever new settings forgets the oldest."""


class PlanCache:
    """The tables of one function.

    ``current`` is the table of the process-wide policy. A bump replaces every table by an empty one; a plan chosen
    under an older epoch is not inserted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.epoch = 0
        self.current: Table = {}
        self._tables: dict[Policy, Table] = {}

    def table(self, policy: Policy) -> Table:
        """The table of a policy."""
        table = self._tables.get(policy)
        if table is None:
            with self._lock:
                table = self._table(policy)
        return table

    def _table(self, policy: Policy) -> Table:
        if policy not in self._tables and len(self._tables) >= MAX_TABLES:
            oldest = next(each for each, table in self._tables.items() if table is not self.current)
            del self._tables[oldest]
        return self._tables.setdefault(policy, {})

    def publish(self, policy: Policy) -> None:
        """Make a policy the process-wide one and empty every table."""
        with self._lock:
            self.epoch += 1
            self._tables = {policy: {}}
            self.current = self._tables[policy]

    def insert(self, key: Hashable, plan: Plan, policy: Policy, epoch: int, max_size: int) -> bool:
        """Keep a plan; refused if the epoch moved since it was chosen."""
        with self._lock:
            if epoch != self.epoch or max_size == 0:
                return False
            table = self._table(policy)
            if len(table) >= max_size:
                _evict(table, max_size)
            table[key] = plan
            return True

    def size(self) -> int:
        """Number of plans in all tables."""
        with self._lock:
            return sum(len(table) for table in self._tables.values())


def _evict(table: Table, max_size: int) -> None:
    """Second chance: drop the plans that nobody used since the last sweep, at least an eighth of the table."""
    goal = max(1, max_size // 8)
    unused = [key for key, plan in list(table.items()) if not plan.used][:goal]
    for plan in list(table.values()):
        plan.used = False
    if len(unused) < goal:
        chosen = set(unused)
        unused += [key for key in list(table) if key not in chosen][: goal - len(unused)]
    for key in unused:
        table.pop(key, None)
