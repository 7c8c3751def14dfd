"""Which calls of other sizes a plan may serve: what its route, kernel and limits were shown not to depend on.

Sizes may differ within a power of two where nothing that made the plan read them; preference may be a little off then,
legality not: what limits demand of sizes and strides is tested on the arguments of every call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from layerzero.core.facts import Facts, fact_name
from layerzero.core.limit import Limit
from layerzero.core.limit_kinds import Custom
from layerzero.core.operation import Operation
from layerzero.core.plan import Plan
from layerzero.core.reuse_conditions import (
    CLASS,
    SAME,
    WITHIN,
    Condition,
    Conditions,
    SizedCall,
    all_conditions,
    names_no_size,
)
from layerzero.engine.kept import Kept
from layerzero.engine.policy import Policy


class _Outline(NamedTuple):
    """What the conditions of calls that differ in sizes only have in common.

    Attributes:
        varying: axes that may vary.
        exact: operands of the sizes that stay as they are.
        classes: operands of the sizes whose product stays in its class.
        fixed: the conditions that name no size of the call.
        asked: limits whose conditions may follow from the sizes.
    """

    varying: frozenset[str]
    exact: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    fixed: Conditions
    asked: tuple[Limit, ...]


OUTLINES: Kept[_Outline | None] = Kept()
"""By kernel, policy, and what a call has beside its sizes; None where only exact calls may run a plan."""


def conditions_of(plan: Plan, policy: Policy, order: tuple[str, ...]) -> Conditions | None:
    """What a call of the same coarse key must satisfy to run this plan; None if only the exact call may.

    ``order`` has the function's tensors by number.
    """
    kernel, facts = plan.kernel, plan.report.facts
    if kernel.sizes_bound is None or plan.transforms_data:
        return None  # a copy's strides and alignment follow from sizes in ways that no condition here says
    if kernel.build_key is not None or kernel.prebuilt is not None:
        return None  # what is compiled for one size of a class may not be for another
    outline = _outline(plan, policy, order)
    if outline is None:
        return None
    demanded: list[Condition] = []
    if outline.asked or kernel.workspace_bytes is not None:
        call = SizedCall(facts, kernel.layout, order, outline.varying)
        asked = all_conditions(outline.asked, call)
        if asked is None or not _fits_in_memory(plan, policy, call):
            return None
        demanded = asked
    shapes = [facts.tensors[name].shape if name in facts.tensors else () for name in order]
    exact = [(WITHIN, (each,), (size := shapes[each >> 8][each >> 1 & 0x7F], size)) for each in outline.exact]
    classes = []
    for operands in outline.classes:
        product = math.prod([shapes[each >> 8][each >> 1 & 0x7F] for each in operands])
        classes.append((CLASS, operands, (product.bit_length(),)))
    return (*exact, *classes, *outline.fixed, *demanded)


def _outline(plan: Plan, policy: Policy, order: tuple[str, ...]) -> _Outline | None:
    """The outline for a plan's call; None where only the exact call may run the plan."""
    kernel, facts, varies = plan.kernel, plan.report.facts, plan.report.varies
    ranks = tuple([len(tensor.shape) for tensor in facts.tensors.values()])
    key = kernel, policy, order, varies, facts.operation.name, facts.layout, ranks, facts.sizeless()
    return OUTLINES.get(key, lambda: _outlined(plan, policy, order))


def _outlined(plan: Plan, policy: Policy, order: tuple[str, ...]) -> _Outline | None:
    kernel, facts = plan.kernel, plan.report.facts
    read = [*(kernel.sizes_bound or ()), *(condition.fact for rule in policy.rules for condition in rule.conditions)]
    read += [name for limit in kernel.limits if isinstance(limit, Custom) for name in limit.reads]
    varying = frozenset(plan.report.varies).difference(*(_axes_behind(facts.operation, name) for name in read))
    if not varying:
        return None
    call = SizedCall(facts, kernel.layout, order, varying)
    demanded = all_conditions([limit for limit in kernel.limits if names_no_size(limit)], call)
    if demanded is None:
        return None
    exact, same = _axes(call)
    asked = tuple(limit for limit in kernel.limits if not names_no_size(limit))
    return _Outline(varying, tuple(exact), tuple(_classes(call)), (*same, *demanded), asked)


def _axes_behind(operation: Operation, name: str) -> Iterable[str]:
    """The axes that a fact follows from; all of them where that is not declared."""
    name = fact_name(name, operation)
    if name not in operation.derived:
        return (name,)
    return operation.derived_from.get(name, (*operation.facts, "..."))


def _axes(call: SizedCall) -> tuple[list[int], list[Condition]]:
    """The sizes that stay as they are, and the conditions by which those of equal names stay equal."""
    exact: list[int] = []
    same: list[Condition] = []
    first: dict[tuple[str, int], int] = {}
    for tensor in call.facts.tensors:
        for place, axis in enumerate(call.axes(tensor)):
            operand = call.operand(tensor, place)
            if axis not in call.varying:
                exact.append(operand)
                continue
            known = first.setdefault((axis, place if axis == "..." else 0), operand)
            if known != operand:
                same.append((SAME, (known, operand), ()))
    return exact, same


def _classes(call: SizedCall) -> Iterable[tuple[int, ...]]:
    """Sizes derived of several axes stay in their class, too: verdicts and built artefacts belong to classes."""
    operation = call.facts.operation
    for name in operation.derived:
        axes = operation.derived_from.get(name, ())
        if call.varying.intersection(axes):
            operands = [
                operand for axis in axes for operand in (call.sizes(axis) if axis == "..." else [call.size(axis)])
            ]
            if operands:
                yield tuple(operands)


def _fits_in_memory(plan: Plan, policy: Policy, call: SizedCall) -> bool:
    """Whether the largest call of the class would, since workspaces grow with sizes."""
    kernel, facts = plan.kernel, call.facts
    if kernel.workspace_bytes is None:
        return True
    largest = {
        name: (1 << size.bit_length()) - 1 if call.varies(name) else size for name, size in facts.sizes().items()
    }
    tensors = {}
    for name, fact in facts.tensors.items():
        shape = [(1 << size.bit_length()) - 1 for size in fact.shape]
        shape = [
            big if axis in call.varying else size
            for axis, size, big in zip(call.axes(name), fact.shape, shape, strict=True)
        ]
        tensors[name] = msgspec.structs.replace(fact, shape=tuple(shape))
    upper = Facts(facts.operation, facts.device, facts.layout, tensors, {**facts, **largest})
    try:
        return kernel.workspace_for(upper) <= policy.memory_headroom_mb * 2**20
    except Exception:  # noqa: BLE001  # it answered for the call itself; what it cannot answer for is not reused
        return False
