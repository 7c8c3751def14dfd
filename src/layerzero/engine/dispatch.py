"""The way of a call. Read :meth:`Dispatcher.choose`: facts, route, candidates, policy, limits, score, plan, proof.

A call that was chosen before never gets here past the table lookup that :mod:`layerzero.engine.call` generates.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from layerzero.core import graph_capture
from layerzero.core.errors import CudaGraphUnsafeError, NoKernelFoundError, NotPreparedError
from layerzero.core.facts import CallState, Facts, FactsBuilder, TensorFacts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.operation import Function, Routed
from layerzero.core.plan import Candidate, Plan, Report, when_outdated
from layerzero.core.system import forking, log
from layerzero.engine import (
    batch_split,
    failures,
    legality,
    logging_once,
    plan_source,
    probe,
    proofs,
    reuse,
    substitutes,
    transforms,
)
from layerzero.engine.cache import FLIGHTS, Key, PlanCache
from layerzero.engine.config import CONFIGURATION, current_policy
from layerzero.engine.events import EVENTS
from layerzero.engine.first_run import Recent, first_run
from layerzero.engine.frozen_choices import Frozen, History, yet_to_agree
from layerzero.engine.fusion import FUSING
from layerzero.engine.health import Health
from layerzero.engine.judgements import Later, Standings
from layerzero.engine.pick import pick, priority_decides, ranked, require, with_every_reason
from layerzero.engine.policy import Policy
from layerzero.engine.probe import Machine
from layerzero.engine.registry import REGISTRY, Registry
from layerzero.engine.services import SERVICES
from layerzero.engine.transforms import reference_in_transform, shapes_answer

Watcher = Callable[[Any, Plan], None]
"""Called with each call's function and the plan that ran, or, on meta and fake tensors, would run.

It runs in the caller's thread and context.
"""


class Engine:
    """What selection works with in this process: registry, ledger, health, and the caches to invalidate."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._ledger: Ledger | None = None
        self.recent = Recent()
        self.history = History()
        self.health = Health(self.bump)
        self.standings = Standings()
        self.caches: list[PlanCache] = []
        self.epoch = 0
        self.watchers: tuple[Watcher, ...] = ()
        self.frozen: Frozen | None = None
        self.winners = 0  # how often another kernel became the fastest of a class
        self._lock = forking.rlock()
        registry.on_change(self.bump)
        CONFIGURATION.on_change(self.bump)
        when_outdated(self.bump)
        forking.when_torn(self.bump)  # a table may hold half of a plan

    @property
    def ledger(self) -> Ledger:
        """What is remembered about kernels; the first question opens it, so that importing touches no disk."""
        if self._ledger is None:
            with self._lock, graph_capture.held_off():
                self._ledger = self._ledger or SERVICES.ledger()
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def bump(self) -> None:
        """Start a new epoch: every plan is chosen anew on its next call."""
        _ = CONFIGURATION.policy  # made outside this lock: settings that change hold theirs as they wait for this one
        with self._lock:  # a bump from a timer must not publish a policy that was replaced meanwhile
            self.epoch += 1
            for kept in (self.standings, plan_source.TEXTS, reuse.OUTLINES):
                kept.forget()
            FUSING.look(frozen=self.frozen is not None, registered=self.registry.has_own)
            for cache in self.caches:
                cache.publish(CONFIGURATION.policy)

    def decide(
        self,
        judged: Sequence[Candidate],
        routed: Routed,
        facts: Facts,
        policy: Policy,
        machine: Machine,
        later: Later | None = None,
        *,
        alone: bool = False,
    ) -> tuple[Report, list[Candidate]]:
        """Order judged kernels by what is known of them, and pick one; ``later`` judges those that cannot win.

        Times decide nothing where choices are frozen or priority alone decides, whatever a process writes meanwhile,
        where ranks have yet to agree, for invariant bits, and in a collective; ``alone`` leaves out freezing and ranks.
        """
        frozen, together, ranks = None if alone else self.frozen, routed.operation.is_collective, torch.distributed
        if frozen is None and (together or (not alone and ranks.is_available() and ranks.is_initialized())):
            frozen = yet_to_agree(policy, together=together)
        open_ = not together and (frozen is None or not frozen.decides(judged, facts, policy))
        times = self.ledger if open_ and later is None and not policy.invariant else None
        judged = legality.with_casts(judged, routed, policy) if routed.casts else judged
        ordered = ranked(judged, facts, policy, times, machine.asked)
        timed = times is not None and not times.untimed(facts)  # of another order of memory, where not of this one
        report = pick(ordered, routed, facts, policy, self.registry.lock_for(policy, facts), later, timed=timed)
        report = proofs.invariance_noted(report, policy) if policy.invariant else report
        return report if frozen is None else frozen.held(report, policy), ordered

    def keep_current(self, cache: PlanCache) -> None:
        """Let a new function's cache hear of every epoch from now on."""
        _ = CONFIGURATION.policy  # as in bump
        with self._lock:  # else a policy that is replaced meanwhile would stay the one of its hits
            cache.publish(CONFIGURATION.policy)
            self.caches = [*self.caches, cache]

    def forget(self, function: str, cache: PlanCache) -> None:
        """Forget plans and calls of a function that is taken back."""
        self.history.forget(function)
        with self._lock:
            self.caches = [each for each in self.caches if each is not cache]
        cache.publish(CONFIGURATION.policy)

    def new_winner(self) -> None:
        """Another kernel became the fastest of a class: a new epoch, unless choices are frozen."""
        self.winners += 1
        if self.frozen is None:
            self.bump()

    def watch(self, watcher: Watcher) -> None:
        """Call a watcher for every call that runs. No plan is kept until the last one stops: hits would go unseen."""
        with self._lock:
            self.watchers = (*self.watchers, watcher)
        self.bump()

    def unwatch(self, watcher: Watcher) -> None:
        with self._lock:
            self.watchers = tuple(each for each in self.watchers if each != watcher)
        self.bump()


ENGINE = Engine(REGISTRY)


class Dispatcher:
    """Chooses and runs for one function."""

    def __init__(self, function: Function, engine: Engine = ENGINE) -> None:
        self.function = function
        self.engine = engine
        self.names = tuple(each.name for each in function.parameters)
        self.order = tuple(each.name for each in function.parameters if each.name in function.tensors)
        self.cache = PlanCache()
        engine.keep_current(self.cache)

    def tensors(self, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, in the order of the function's parameters."""
        return [value for name in self.order if isinstance(value := arguments[name], torch.Tensor)]

    def explain(
        self,
        arguments: dict[str, Any],
        policy: Policy,
        *,
        machine: Machine | None = None,
        call_state: CallState | None = None,
        failed: Collection[str] = (),
        complete: bool = True,
    ) -> tuple[Report, list[Candidate]]:
        """Judge and rank every kernel for a call; nothing runs and nothing is kept.

        Unless ``complete``, a refused kernel has one reason where it may have more.
        """
        machine = machine or probe.this_machine()
        call_state = call_state or transforms.call_state(self.tensors(arguments), policy, self.function.state)
        routed = self.function.route(dict(arguments), policy.layout)
        facts = FactsBuilder(routed.operation).of_valid(
            routed.arguments, device=machine.device, layout=routed.layout, state=call_state
        )
        kernels, health = self.engine.registry.candidates(routed.operation.name), self.engine.health
        ledger, later, inside = self.engine.ledger, None, call_state.capturing
        if complete or policy.invariant or routed.casts:  # every reason counts: of some, rows alone are free
            judged = legality.judge(kernels, facts, policy, machine, health, ledger, failed=failed)
        else:
            alone = self.engine.frozen is None and not failed and priority_decides(kernels, facts, policy, ledger)
            judged, later = self.engine.standings.judge(
                kernels, facts, policy, machine, health, ledger, failed=failed, by_priority=alone, capturing=inside
            )
        report, ordered = self.engine.decide(judged, routed, facts, policy, machine, later)
        return proofs.noted(report, ledger) if inside else report, ordered

    def choose(self, arguments: dict[str, Any], policy: Policy, failed: Collection[str] = ()) -> Plan:
        """Choose a kernel, write its plan, and prove its limits on the tensors that it will get.

        Raises: InvalidCallError for the caller's mistakes, NoKernelFoundError or CudaGraphUnsafeError if nothing legal
        is left.
        """
        failed, began_ns = set(failed), time.perf_counter_ns()
        while True:
            frozen, machine = self.engine.frozen, probe.this_machine()  # a library that did not load is out
            report, judged = self.explain(arguments, policy, machine=machine, failed=failed, complete=False)
            if report.chosen is None or report.chosen.kernel.is_reference:  # its reader may ask why
                report = with_every_reason(report, policy, machine)
            if frozen is not None:
                frozen.refuse(report, policy)
            elif policy.jit == "background":
                self._build_later(judged, report.facts)
            chosen = require(report)
            try:
                plan = plan_source.build(self.function, chosen, report, policy, self.engine._ledger)  # open by now
            except Exception as error:  # noqa: BLE001  # this kernel cannot be had: the next one is tried
                failures.not_loaded(chosen.kernel, report, error, self.engine)
                failed.add(chosen.kernel.id)
                continue
            if self.engine.frozen is not frozen:
                continue  # frozen or thawed meanwhile: the next choice is made with it
            if self._prove(plan, arguments):
                if policy.sampling_rate and not report.facts.operation.is_collective and plan.gives is None:
                    SERVICES.sample(plan, self.function, policy.sampling_rate)
                self._tell(plan, policy, frozen)
                EVENTS.selected(plan, began_ns)
                return plan
            failed.add(chosen.kernel.id)

    def miss(self, key: Key, arguments: dict[str, Any]) -> Any:
        """Choose for a call that is not in the table, keep the plan, and run it."""
        policy = current_policy()
        tensors = self.tensors(arguments)
        for each in tensors:
            if each.is_meta:
                return shapes_answer(self, arguments, policy)
        self.cache.missed()
        return self.run(self.plan_for(key, arguments, policy, tensors), arguments)

    def plan_for(self, key: Key, arguments: dict[str, Any], policy: Policy, tensors: Sequence[torch.Tensor]) -> Plan:
        """Choose for a call that is not in the table, of these tensors; callers of one key choose once.

        The plan is kept once its first run was accepted: one that was interrupted is chosen, marked and checked again.
        """
        self.engine.registry.ready()  # before the epoch is read: what is declared by now starts one
        epoch = self.cache.epoch

        def chosen() -> Plan:
            plan = self.choose(arguments, policy)
            plan.keep = functools.partial(self._keep, key, policy, epoch)
            return plan

        if transforms.capturing(tensors):  # a capture does not wait
            return chosen()
        return FLIGHTS.shared((self.function.name, key.exact, id(policy), epoch), chosen)  # which outlives the flight

    def _keep(self, key: Key, policy: Policy, epoch: int, plan: Plan) -> None:
        self.engine.history.add(self.function.name, key.exact, plan.report.facts, policy)
        if not policy.cache_enabled:
            return
        self.engine.ledger.called(plan.report.facts)
        if not self.engine.watchers:
            conditions = reuse.conditions_of(plan, policy, self.order)
            if self.engine.frozen is not None and self.engine.frozen.plan is not None:
                conditions = self.engine.frozen.plan.bounded(conditions, plan.report.facts, policy, self.order)
            self.cache.insert(key, plan, policy, epoch, policy.cache_max_size, conditions)

    def run_unkept(self, arguments: dict[str, Any]) -> Any:
        """Choose and run without keeping anything: for calls whose arguments make no key."""
        policy = current_policy()
        if any(each.is_meta for each in self.tensors(arguments)):
            return shapes_answer(self, arguments, policy)
        self.cache.missed()
        return self.run(self.choose(arguments, policy), arguments)

    def run(self, plan: Plan, arguments: dict[str, Any]) -> Any:
        """Run a plan; if its kernel fails, do what :mod:`layerzero.engine.failures` allows."""
        try:
            return self.checked(plan, arguments)
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises
            return self.failed(plan, error, arguments)

    def checked(self, plan: Plan, arguments: dict[str, Any]) -> Any:
        """Run a plan for the first time: its result must be of the kind that the operation defines."""
        self.engine.recent.add(plan)
        with first_run(plan, self.engine.ledger):
            result = plan.run(**arguments)
            problem = failures.wrong_result(plan, result, arguments)
            if problem is not None:
                raise problem
        self.engine.health.worked(plan.kernel, plan.report.operation, plan.report.facts.device.name)
        note, keep, plan.keep = plan.report.facts.operation.note, plan.keep, None
        if note is not None:
            note(arguments, plan.report.facts.layout)
        if keep is not None:
            keep(plan)
        for watcher in self.engine.watchers:
            watcher(self.function, plan)
        return result

    def failed(self, plan: Plan, error: Exception, arguments: dict[str, Any]) -> Any:
        """Answer a plan that raised: another kernel runs where that is safe, else the error reaches the caller."""
        policy = current_policy()
        if isinstance(error, plan_source.PlanUnusableError):
            return self.run_unkept(arguments)
        if isinstance(error, NotPreparedError):
            return substitutes.run(self, plan, error, arguments)
        tried, failed = set[str](), list[Kernel]()
        while True:
            tried |= substitutes.ruled_out(self.engine, plan, error, policy, arguments, failed)
            failed.append(plan.kernel)
            try:
                another = self.choose(arguments, policy, failed=tried)
            except NoKernelFoundError:
                failures.alone(plan, error)
            except CudaGraphUnsafeError as nothing_left:
                failures.log_failure(plan, error)
                raise nothing_left from error
            try:
                result = self.checked(another, arguments)
            except Exception as next_error:  # noqa: BLE001  # whatever a kernel raises
                failures.log_failure(plan, error)
                plan, error = another, next_error
                continue
            logging_once.tell_fallback(plan, another, error, self.engine.health)
            return result

    def reference(self, arguments: dict[str, Any]) -> Any:
        """Run the reference, for transforms (vmap, grad, jvp) that only see through torch's own operators."""
        policy = current_policy()
        try:
            routed = self.function.route(dict(arguments), policy.layout)
        except RuntimeError as error:
            transforms.refuse_hidden(self.function, arguments, policy.layout, error)
            raise
        read = functools.partial(transforms.call_state, self.tensors(arguments), policy, self.function.state)
        return reference_in_transform(routed, policy, self.engine.registry, read)

    def _prove(self, plan: Plan, arguments: dict[str, Any]) -> bool:
        """Evaluate every limit again, on the adapted tensors themselves and without any repair."""
        kernel, facts = plan.kernel, plan.report.facts
        adapted = plan_source.adapted_tensors(plan, arguments)
        if kernel.layout is None or kernel.layout == facts.layout:
            for name in facts.tensors:
                if adapted.get(name) is not arguments[name]:
                    break
            else:
                plan.proved = True  # the very tensors that were judged, seen in the same way
                return True
        tensors = {name: TensorFacts.of(tensor) for name, tensor in adapted.items() if name in facts.tensors}
        judged = facts.seen_in(kernel.layout)
        if tensors == judged.tensors and not plan.transforms_data:  # what was judged is what the kernel gets
            plan.proved = True
            return True
        seen = judged.with_tensors(tensors)
        allowed = {
            adaptation.argument
            for adaptation in plan.adaptations
            if adaptation.kind in ("split", "apart") or adaptation.kind in facts.operation.adapters
        }
        cut = batch_split.cut_axis(facts.operation.schema)
        for finding in legality.limit_findings(kernel, seen):
            if finding.repair is None or (finding.repair.argument or cut) not in allowed:
                wrong = "%s: its plan does not satisfy its own limits: %s\n%s"
                log.error(wrong, kernel.id, finding.reason, plan.source)
                return False
        plan.proved, plan.adapted = True, seen
        return True

    def _build_later(self, judged: Iterable[Candidate], facts: Facts) -> None:
        """Have built, behind what runs meanwhile, what this call would choose if it were built; never in a capture."""
        unbuilt = [each.kernel for each in judged if each.kernel.jit and legality.only_unbuilt(each)]
        if unbuilt and not facts["capturing"]:
            SERVICES.build_later(unbuilt, facts)

    def _tell(self, plan: Plan, policy: Policy, frozen: Frozen | None) -> None:
        if plan.report.facts["capturing"]:
            graph_capture.keep(plan)
            logging_once.tell_capture(plan)
        logging_once.tell_choice(plan, policy, frozen)
        if plan.kernel.is_reference and policy.enabled and not plan.report.facts.empty:
            logging_once.tell_reference(plan)
        if plan.adaptations:
            logging_once.tell_adaptations(plan, policy)
        if policy.vet_in_background:
            SERVICES.vet_later(legality.awaiting(plan.report.candidates, plan.report.facts), plan.report.facts)
