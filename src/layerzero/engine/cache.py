"""Plans by key: one table for each policy, one epoch for everything that could make a plan stale.

A plan is kept for the exact key of the call that it was chosen for, or, where nothing read the sizes, for the coarse
key of its size class with conditions that every call must meet. The C hit path has an index of the same tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from layerzero.core.plan import Plan
from layerzero.core.reuse_conditions import Conditions, holds
from layerzero.core.system import forking
from layerzero.engine.policy import Policy

MAX_TABLES = 32
"""Policies whose plans are kept; a program that opens scopes with ever new settings forgets the oldest."""

MAX_IN_CLASS = 8
"""Plans of one coarse key; they differ in sizes that may not vary. Further ones are kept for their exact call."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a call is found by.

    Attributes:
        exact: everything that a limit can read.
        coarse: the same with sizes and strides as classes.
        native: writes into the C index; None for a call of the Python path.
    """

    exact: Hashable
    coarse: Hashable
    native: Any = None


MAX_SEEN = 4096
"""Calls whose plans the Python path remembers, in addition to the table."""


class InClass(NamedTuple):
    """The key under which a table holds one of the plans of a coarse key."""

    coarse: Hashable
    number: int


class PlanTable(dict[Hashable, Plan]):
    """The plans of one policy by exact key, or by :class:`InClass`.

    ``seen`` and ``last`` answer the Python path for calls that it has looked up before: all of them, and the latest.
    Readers take no lock: a lookup is one dictionary read, and the only write is the plan's reference bit.
    """

    __slots__ = ("_numbers", "classes", "index", "last", "seen")

    def __init__(self, index: Any = None) -> None:
        super().__init__()
        self.classes: dict[Hashable, tuple[tuple[InClass, Conditions], ...]] = {}
        self.index = index
        self.seen: dict[Hashable, Plan] = {}
        self.last: tuple[Hashable, Plan | None] = (None, None)
        self._numbers = 0

    def find(
        self, exact: Hashable, coarse: Hashable, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]
    ) -> Plan | None:
        """The plan of this very call, or one of its size class whose conditions it meets."""
        plan = self.get(exact)
        for name, conditions in self.classes.get(coarse, ()) if plan is None else ():
            if holds(conditions, shapes, strides):
                plan = self.get(name)
                break
        return plan

    def saw(self, exact: Hashable, plan: Plan) -> None:
        """Let the Python path find a plan for a call without looking at conditions again."""
        if len(self.seen) >= MAX_SEEN:
            self.seen.clear()
        self.seen[exact] = plan

    def _forget_seen(self) -> None:
        self.seen.clear()
        self.last = (None, None)

    def add(self, key: Key, plan: Plan, conditions: Conditions | None) -> None:
        """Keep a plan; the caller holds the cache's lock."""
        held = self.classes.get(key.coarse, ())
        if conditions is not None and any(each == conditions for _, each in held):
            return  # two calls of the class were chosen for at once
        if len(held) >= MAX_IN_CLASS:
            conditions = None
        if conditions is None:
            name = key.exact
        else:
            self._numbers += 1
            name = InClass(key.coarse, self._numbers)
            self.classes[key.coarse] = (*held, (name, conditions))
        if name in self:
            return
        self[name] = plan
        if key.native is not None:
            run = plan.direct or plan.run
            key.native.put(self.index, key.exact, key.coarse, plan, run, plan.reads_negated, conditions)

    def drop(self, names: Sequence[Hashable]) -> None:
        """Forget plans; the caller holds the cache's lock."""
        self._forget_seen()
        gone = [plan for plan in (self.pop(name, None) for name in names) if plan is not None]
        for name in names:
            if isinstance(name, InClass):
                left = tuple(each for each in self.classes[name.coarse] if each[0] != name)
                if left:
                    self.classes[name.coarse] = left
                else:
                    del self.classes[name.coarse]
        if self.index is not None:
            self.index.remove({id(plan) for plan in gone})

    def clear(self) -> None:
        super().clear()
        self._forget_seen()
        self.classes.clear()
        if self.index is not None:
            self.index.clear()


class PlanCache:
    """The tables of one function.

    ``current`` is the table of the process-wide policy. A bump replaces every table by an empty one; a plan chosen
    under an older epoch is not inserted. ``misses`` counts the calls that no plan was kept for.
    """

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._counting = forking.rlock()  # what a finalizer calls meanwhile counts, too
        self.epoch = self.misses = 0
        self.current = PlanTable()
        self._tables: dict[Policy, PlanTable] = {}
        self._new_index: Callable[[], Any] = _no_index
        self._on_publish: Callable[[Any], None] = _no_index

    def attach(self, new_index: Callable[[], Any], on_publish: Callable[[Any], None]) -> None:
        """Let every table have an index, and the C hit path know the one of the process-wide policy."""
        with self._lock:
            self._new_index, self._on_publish = new_index, on_publish
            self._tables = {
                policy: PlanTable(new_index()) for policy, table in self._tables.items() if table is self.current
            }
            self.current = next(iter(self._tables.values()))
            on_publish(self.current.index)

    def table(self, policy: Policy) -> PlanTable:
        table = self._tables.get(policy)
        if table is None:
            with self._lock:
                table = self._table(policy)
        return table

    def _table(self, policy: Policy) -> PlanTable:
        found = self._tables.get(policy)
        if found is None:
            if len(self._tables) >= MAX_TABLES:
                oldest = next(each for each, table in self._tables.items() if table is not self.current)
                del self._tables[oldest]
            found = self._tables[policy] = PlanTable(self._new_index())
        return found

    def publish(self, policy: Policy) -> None:
        """Make a policy the process-wide one and empty every table."""
        with self._lock:
            self.epoch += 1
            table = PlanTable(self._new_index())
            retired, self._tables = self._tables, {policy: table}
            self.current = table
            self._on_publish(table.index)
        del retired  # outside the lock: what ends with the plans may call anything

    def insert(
        self, key: Key, plan: Plan, policy: Policy, epoch: int, max_size: int, conditions: Conditions | None = None
    ) -> bool:
        """Keep a plan; refused if the epoch moved since it was chosen."""
        with self._lock:
            if epoch != self.epoch or max_size == 0:
                return False
            table = self._table(policy)
            if len(table) >= max_size:
                _evict(table, max_size)
            table.add(key, plan, conditions)
            return True

    def missed(self) -> None:
        """Count a call that no plan was kept for."""
        with self._counting:
            self.misses += 1

    def take_out(self, plan: Plan) -> None:
        with self._lock:
            for table in self._tables.values():
                table.drop([name for name, each in table.items() if each is plan])

    def plans(self) -> list[tuple[Policy, Plan]]:
        """The plans of all tables, each with the policy that it was chosen under."""
        with self._lock:
            return [(policy, plan) for policy, table in self._tables.items() for plan in table.values()]

    def size(self) -> int:
        with self._lock:
            return sum(len(table) for table in self._tables.values())


def _no_index(*_: Any) -> None:
    return None


def _evict(table: PlanTable, max_size: int) -> None:
    """Second chance: drop the plans that were not used since the last sweep, at least an eighth of the table."""
    goal = max(1, max_size // 8)
    unused = [key for key, plan in list(table.items()) if not plan.used][:goal]
    for plan in list(table.values()):
        plan.used = False
    if len(unused) < goal:
        chosen = set(unused)
        unused += [key for key in list(table) if key not in chosen][: goal - len(unused)]
    table.drop(unused)


class _Flight:
    def __init__(self) -> None:
        # Held until then; an Event costs ten times as much to make. A forked child forgets it with its flight.
        self.landed = threading.Lock()
        self.landed.acquire()
        self.plan: Plan | None = None
        self.error: BaseException | None = None


class Flights:
    """The choices that are being made in this process."""

    def __init__(self) -> None:
        self.forget()
        forking.in_child(self.forget)  # their threads exist in the parent only

    def forget(self) -> None:
        """Start without any, with a free lock."""
        self._lock = forking.lock()
        self._flights: dict[Hashable, _Flight] = {}
        self._here = threading.local()

    def shared(self, key: Hashable, choose: Callable[[], Plan]) -> Plan:
        """The plan that ``choose`` gives, called by one of the threads that ask for a key at the same time.

        Raises: what ``choose`` raised, in every thread that waited for it.
        """
        if getattr(self._here, "choosing", False):
            return choose()
        mine: _Flight | None = None
        try:  # an interrupt at any moment leaves no flight for which others would wait
            with self._lock:
                flight = self._flights.get(key)
                if flight is None:
                    mine = flight = self._flights[key] = _Flight()
            if mine is None:
                return self._awaited(flight, choose)
            self._here.choosing = True
            plan = mine.plan = choose()
        except BaseException as error:
            if mine is not None:
                mine.error = error
            raise
        finally:
            if mine is not None:
                self._here.choosing = False
                try:  # without the lock: Python 3.14 handles signals right after it is taken
                    self._flights.pop(key, None)
                finally:
                    mine.landed.release()
        return plan

    def _awaited(self, flight: _Flight, choose: Callable[[], Plan]) -> Plan:
        with flight.landed:
            pass
        if flight.plan is not None:
            return flight.plan
        if isinstance(flight.error, Exception):
            raise flight.error
        return choose()  # the other thread was interrupted, which is nothing about this call


FLIGHTS = Flights()
"""The choices that are being made in this process."""
