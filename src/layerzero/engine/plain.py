"""The way of a call without tensors: facts, candidates, policy, limits, score, plan, by the same judges as the others.

:class:`PlainDispatcher` chooses and runs for one function; :class:`PlainWays` holds what was chosen, in a table for
each policy that starts empty in each epoch. There is nothing to adapt, to capture or to trace, so a plan is the
kernel's callable, and a key is what the function makes of a call: its own buckets of sizes, whose upper ends are the
facts. A limit on a size therefore holds for every call of the bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from layerzero.core.device import Device
from layerzero.core.errors import NoKernelFoundError
from layerzero.core.facts import Facts, FactsBuilder
from layerzero.core.operation import Routed
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Candidate, Plan, Report
from layerzero.core.system import forking
from layerzero.engine import failures, legality, logging_once, probe
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE, Engine
from layerzero.engine.events import EVENTS
from layerzero.engine.pick import require
from layerzero.engine.policy import Policy
from layerzero.engine.probe import Machine
from layerzero.ops import PLAIN_FUNCTIONS

MAX_TABLES = 32
"""Policies of open blocks whose choices are kept."""

Table = dict[Any, Any]


def plain_facts(routed: Routed, device: Device | None = None) -> Facts:
    """The facts of a call without tensors."""
    return FactsBuilder(routed.operation).of_valid(routed.arguments, device=device or Device.detect("cpu"))


class PlainDispatcher:
    """Chooses and runs for one function whose operations have no tensors.

    Attributes:
        ways: what was chosen for its calls.
    """

    ways: PlainWays

    def __init__(self, function: PlainFunction, engine: Engine = ENGINE) -> None:
        self.function = function
        self.engine = engine
        self.operations = {each.name: each for each in function.operations}

    def explain(
        self, facts: Facts, policy: Policy, *, machine: Machine | None = None, failed: Collection[str] = ()
    ) -> tuple[Report, list[Candidate]]:
        """Judge and rank every kernel for a call; nothing runs and nothing is kept."""
        machine = machine or probe.this_machine()
        engine = self.engine
        kernels = engine.registry.candidates(facts.operation.name)
        judged = legality.judge(kernels, facts, policy, machine, engine.health, engine.ledger, failed=failed)
        return engine.decide(judged, Routed(facts.operation, {}), facts, policy, machine)

    def choose(self, facts: Facts, policy: Policy, failed: Collection[str] = ()) -> Plan:
        """Choose a kernel and load it. Raises: NoKernelFoundError where nothing legal is left."""
        failed, began_ns = set(failed), time.perf_counter_ns()
        while True:
            frozen = self.engine.frozen
            report, _ = self.explain(facts, policy, failed=failed)
            if frozen is not None:
                frozen.refuse(report, policy)
            chosen = require(report)
            try:
                run = chosen.kernel.load(facts)
            except Exception as error:  # noqa: BLE001  # this kernel cannot be had: the next one is tried
                failures.not_loaded(chosen.kernel, report, error, self.engine)
                failed.add(chosen.kernel.id)
                continue
            if self.engine.frozen is not frozen:
                continue  # frozen or thawed meanwhile: the next choice is made with it
            plan = Plan(chosen.kernel, report, "kernel(items)", _nothing, run, proved=True, direct=run)
            logging_once.tell_choice(plan, policy, frozen)
            EVENTS.selected(plan, began_ns)
            return plan

    def first(self, plan: Plan, items: Any) -> Any:
        """Run a plan for the first time.

        It needs no mark on disk: what works on a form of its own ran in a child before, and what defines a form has
        nothing that could take its place.
        """
        result = plan.run(items)
        self.engine.health.worked(plan.kernel, plan.report.operation, plan.report.facts.device.name)
        return result

    def answer(self, plan: Plan, error: BaseException, arguments: Mapping[str, Any]) -> tuple[Plan, Any]:
        """Answer a plan that raised: another kernel runs where that is safe, else the error reaches the caller."""
        policy, tried = current_policy(), [plan.kernel]
        while True:
            failures.check_retry(plan, _plain_error(error), policy, self.engine, arguments, tried[:-1])
            try:
                another = self.choose(plan.report.facts, policy, failed={each.id for each in tried})
            except NoKernelFoundError:
                failures.alone(plan, error)
            tried.append(another.kernel)
            try:
                result = self.first(another, arguments["items"])
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as next_error:  # noqa: BLE001  # whatever a kernel raises
                failures.log_failure(plan, error)
                plan, error = another, next_error
                continue
            logging_once.tell_fallback(plan, another, _plain_error(error), self.engine.health)
            return another, result


def _nothing(**_: Any) -> Mapping[str, Any]:
    """A call without tensors has none to adapt."""
    return {}


class PanicError(RuntimeError):
    """A library panicked in an exception class that is no ``Exception``."""


def _plain_error(error: BaseException) -> Exception:
    """An exception that other code may catch; interrupts are raised as they are."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error
    made = PanicError(f"{type(error).__name__}: {error}")
    made.__cause__ = error
    return made


class PlainWays:
    """What was chosen for a function, by the keys that it makes (:class:`layerzero.core.plain.Ways`).

    Attributes:
        misses: calls that were chosen for.
    """

    def __init__(self, dispatcher: PlainDispatcher) -> None:
        self.dispatcher = dispatcher
        self.misses = 0
        self._lock = forking.lock()
        self._counting = forking.rlock()  # what a finalizer calls meanwhile counts, too
        self._policy: Policy | None = None
        self._base: Table = {}
        self._scoped: dict[Policy, Table] = {}
        self._plans: dict[Any, tuple[Policy, Plan]] = {}
        self.table: Table = self._base
        dispatcher.engine.keep_current(self)  # type: ignore[arg-type]  # it needs new epochs alone
        SCOPES.watch(self._blocks)

    def publish(self, policy: Policy) -> None:
        """Start an epoch: everything is chosen anew."""
        with self._lock:
            self._policy, self._base, self._scoped, self._plans = policy, {}, {}, {}
            self.table = self._read()

    def forget(self) -> None:
        """Choose anew at the next call: what calls name has changed."""
        with self._lock:
            self._base, self._scoped, self._plans = {}, {}, {}
            self.table = self._read()

    def plans(self) -> list[tuple[Policy, Plan]]:
        """What was chosen in this epoch, each with the settings that it was chosen under."""
        with self._lock:
            return list(self._plans.values())

    def _blocks(self, _: int) -> None:
        self.table = self._read()

    def _read(self) -> Table:
        """The table that calls read.

        While a block of settings is open, every call checks which settings hold. While a watcher is registered, every
        call is chosen for and reported.
        """
        return _NONE if SCOPES.active or self.dispatcher.engine.watchers else self._base

    def scoped(self) -> Table:
        """The table of the settings that hold here; while there are listeners, one that is gone after the call."""
        if self.dispatcher.engine.watchers:
            return {}
        if not SCOPES.active:
            return self._base
        policy = SCOPES.policy()
        with self._lock:
            if len(self._scoped) >= MAX_TABLES and policy not in self._scoped:
                self._scoped.clear()
            return self._scoped.setdefault(policy, {})

    def find(self, key: Any, arguments: Mapping[str, Any]) -> tuple[Callable[..., Any], Any]:
        """Choose for a call, and run it: what runs later calls of its kind, and its result."""
        dispatcher = self.dispatcher
        dispatcher.engine.registry.ready()
        operation = self._operation(arguments)
        facts = plain_facts(Routed(operation, arguments))
        policy = current_policy()
        with self._counting:
            self.misses += 1
        plan = dispatcher.choose(facts, policy)
        try:
            result = dispatcher.first(plan, arguments["items"])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  # whatever a kernel raises
            plan, result = dispatcher.answer(plan, error, arguments)
        with self._lock:
            self._plans[key if policy is self._policy else (key, policy)] = policy, plan
        dispatcher.engine.history.add(dispatcher.function.name, key, plan.report.facts, policy)
        for watcher in dispatcher.engine.watchers:
            watcher(dispatcher.function, plan)
        return plan.run, result

    def failed(self, key: Any, error: BaseException, arguments: Mapping[str, Any]) -> Any:
        """Answer a call whose kernel raised."""
        policy = current_policy()
        known = self._plans.get(key if policy is self._policy else (key, policy))
        if known is None:  # an epoch began meanwhile
            return self.find(key, arguments)[1]
        return self.dispatcher.answer(known[1], error, arguments)[1]

    def _operation(self, arguments: Mapping[str, Any]) -> Any:
        for each in self.dispatcher.function.operations:
            if set(arguments) <= each.schema.known:
                return each
        raise LookupError(f"{self.dispatcher.function.name}: no operation takes {sorted(arguments)}")


_NONE: Table = {}
"""The table that is read while settings hold in a block: nothing is ever put there."""


class _PlainCalls(dict[str, tuple[PlainDispatcher, Callable[..., Any]]]):
    """The dispatcher and the public function of each name, made when first wanted."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = forking.rlock()

    def __missing__(self, name: str) -> tuple[PlainDispatcher, Callable[..., Any]]:
        with self._lock:
            if name not in self:
                function = PLAIN_FUNCTIONS[name]
                dispatcher = PlainDispatcher(function)
                dispatcher.ways = PlainWays(dispatcher)
                self[name] = dispatcher, function.make(dispatcher.ways)
            return self[name]


PLAIN_CALLS = _PlainCalls()
"""By the name of the function."""


def _count_anew() -> None:
    """Count misses from zero in a forked child."""
    for dispatcher, _ in PLAIN_CALLS.values():
        dispatcher.ways.misses = 0


forking.in_child(_count_anew)
