"""What runs where a kernel has no form of a call's handle, as in a capture, or can make none: chosen once, and kept.

Or where memory did not suffice for it.

Nothing is wrong with the kernel, and no failure is noted: its plan stays where calls find it, since the next handle may
have what it wants. A plan that never ran notes which handles it refused: to mark its first run anew took 2 ms a call.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from layerzero.core.errors import CudaGraphUnsafeError, NoKernelFoundError, NotPreparedError
from layerzero.core.handle import Handle
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Plan
from layerzero.core.system import log
from layerzero.engine import failures, headroom, health, transforms
from layerzero.engine.config import current_policy
from layerzero.engine.policy import Policy

if TYPE_CHECKING:
    from layerzero.engine.dispatch import Dispatcher, Engine

MAX_CALLS = 64
"""Sizes of calls whose substitutes a plan keeps."""


def run(
    of: Dispatcher, plan: Plan, error: NotPreparedError, arguments: dict[str, Any], tried: frozenset[str] = frozenset()
) -> Any:
    """Run the next kernel that is prepared, in place of the plan's own. Raises: the error where only a reference is."""
    error.__traceback__ = None  # a handle may keep it, and its frames hold a call's tensors
    tensors = of.tensors(arguments)
    capturing = transforms.capturing(tensors)
    tried |= {plan.kernel.id}
    if not capturing:
        _keep_unproved(of, plan)
    call: Hashable = (capturing, tried, *[(each.shape, each.stride()) for each in tensors])
    another = plan.instead.get(call)
    if another is None:
        another = _chosen(of, plan, error, arguments, tried)
        another.keep = _keep_nothing  # until its first run was accepted
        if len(plan.instead) >= MAX_CALLS:
            plan.instead.clear()
        plan.instead[call] = another
    try:
        return of.checked(another, arguments) if another.keep else another.run(**arguments)
    except NotPreparedError as again:
        again.__traceback__ = None
        return run(of, another, error, arguments, tried)
    except Exception as next_error:  # noqa: BLE001  # whatever a kernel raises
        plan.instead.pop(call, None)
        return of.failed(another, next_error, arguments)


def _chosen(
    of: Dispatcher, plan: Plan, error: NotPreparedError, arguments: dict[str, Any], tried: Iterable[str]
) -> Plan:
    try:
        another = of.choose(arguments, current_policy(), failed=tuple(tried))
    except (NoKernelFoundError, CudaGraphUnsafeError):
        raise copy.copy(error) from None
    if another.kernel.is_reference:
        raise copy.copy(error)
    log.info("%s runs in place of %s: %s", another.kernel.id, plan.kernel.id, error)
    return another


def ruled_out(
    engine: Engine, plan: Plan, error: Exception, policy: Policy, arguments: dict[str, Any], failed: Sequence[Kernel]
) -> set[str]:
    """The kernels that may not run in place of one that raised, itself among them; ``failed`` raised before it.

    Where memory ran out, the device is read anew: what fits is chosen first, then what needs least, until one runs.
    What says nothing of its need is ruled out unless torch's allocator refused a request: a driver or a library may
    have none left for any kernel. Nothing is wrong with the kernel: it does not rest. Of 845 calls with 2 GB left, 3
    failed while the next kernel had to fit with the margin, and a kernel answered them (H200, torch 2.11, 2026-11-26).
    Raises: what the caller must see, where no other kernel may run.
    """
    if not failures.out_of_memory(error):
        failures.check_retry(plan, error, policy, engine, arguments, failed)
        return {plan.kernel.id}
    health.let_pass(error)
    facts = plan.report.facts
    if facts.operation.is_collective:  # the other ranks run this very kernel
        raise error
    results_fit = headroom.ran_out(plan.kernel, facts, policy, error)
    if (
        not results_fit
        or facts["capturing"]
        or facts.operation.schema.mutated
        or plan.report.locked
        or not policy.fallback_enabled
    ):
        raise error
    if headroom.says_how_much(error):
        return {plan.kernel.id}
    kernels = engine.registry.candidates(facts.operation.name)
    return {plan.kernel.id, *(each.id for each in kernels if not headroom.is_known(each, facts))}


def _keep_nothing(_: Plan) -> None:
    """What keeps a substitute: the plan whose place it takes has it."""


def _keep_unproved(of: Dispatcher, plan: Plan) -> None:
    """Keep a plan whose first run is still to be accepted; the plan itself takes its place then."""
    keep = plan.keep
    if keep is None or keep is _keep_nothing:  # it is kept already, as where two threads got the same plan
        return
    plan.keep = None
    unproved = replace(plan, direct=None)

    refused: WeakKeyDictionary[Handle, tuple[Hashable, NotPreparedError]] = WeakKeyDictionary()

    def first(*given: Any, **named: Any) -> Any:
        arguments = {**dict(zip(of.names, given, strict=False)), **named}
        handles = [each for name in of.function.handles if isinstance(each := arguments[name], Handle)]
        known = [said for each in handles if (said := refused.get(each)) is not None and said[0] == each.versions]
        if handles and len(known) == len(handles):
            raise known[0][1]
        plan.keep = proved
        try:
            return of.checked(plan, arguments)
        except NotPreparedError as error:
            if not transforms.capturing(of.tensors(arguments)):
                refused.update({each: (each.versions, error) for each in handles})
            raise

    def proved(plan: Plan) -> None:
        of.cache.take_out(unproved)
        keep(plan)

    unproved.run = first
    keep(unproved)
