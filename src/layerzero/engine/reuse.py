"""Which calls of other sizes a plan may serve: what its route, kernel and limits were shown not to depend on.

Sizes may differ within a power of two where nothing that made the plan read them; preference may be a little off then,
legality not: what limits demand of sizes and strides is tested on the arguments of every call.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from layerzero.core.conditions import CLASS, SAME, WITHIN, Condition, Conditions, SizedCall, all_conditions
from layerzero.core.facts import FACT_ALIASES, Facts
from layerzero.core.limit_kinds import Custom
from layerzero.core.operation import Operation
from layerzero.core.plan import Plan
from layerzero.engine.policy import Policy


def conditions_of(plan: Plan, policy: Policy, order: tuple[str, ...]) -> Conditions | None:
    """What a call of the same coarse key must satisfy to run this plan; None if only the exact call may.

    ``order`` has the function's tensors by number.
    """
    kernel, facts = plan.kernel, plan.report.facts
    if kernel.sizes_bound is None or plan.transforms_data:
        return None  # a copy's strides and alignment follow from sizes in ways that no condition here says
    if kernel.build_key is not None or kernel.prebuilt is not None:
        return None  # what is compiled for one size of a class may not be for another
    read = [*kernel.sizes_bound, *(condition.fact for rule in policy.rules for condition in rule.conditions)]
    read += [name for limit in kernel.limits if isinstance(limit, Custom) for name in limit.reads]
    varying = frozenset(plan.report.varies).difference(*(_axes_behind(facts.operation, name) for name in read))
    if not varying:
        return None
    call = SizedCall(facts, kernel.layout, order, varying)
    demanded = all_conditions(kernel.limits, call)
    if demanded is None or not _fits_in_memory(plan, policy, call):
        return None
    return (*_axes(call), *_classes(call), *demanded)


def _axes_behind(operation: Operation, name: str) -> Iterable[str]:
    """The axes that a fact follows from; all of them where that is not declared."""
    name = FACT_ALIASES.get(name, name)
    if name not in operation.derived:
        return (name,)
    return operation.derived_from.get(name, (*operation.facts, "..."))


def _axes(call: SizedCall) -> Iterable[Condition]:
    """Equal names stay equal, and what may not vary stays as it is."""
    first: dict[tuple[str, int], int] = {}
    for tensor, fact in call.facts.tensors.items():
        start, varying = call.operand(tensor, 0), call.varying
        for place, (axis, size) in enumerate(zip(call.axes(tensor), fact.shape, strict=True)):
            operand = start | place << 1
            if axis not in varying:
                yield WITHIN, (operand,), (size, size)
                continue
            known = first.setdefault((axis, place if axis == "..." else 0), operand)
            if known != operand:
                yield SAME, (known, operand), ()


def _classes(call: SizedCall) -> Iterable[Condition]:
    """Sizes derived of several axes stay in their class, too: verdicts and built artefacts belong to classes."""
    operation = call.facts.operation
    for name in operation.derived:
        axes = operation.derived_from.get(name, ())
        if call.varying.intersection(axes):
            operands = [
                operand for axis in axes for operand in (call.sizes(axis) if axis == "..." else [call.size(axis)])
            ]
            product = 1
            for operand in operands:
                product *= _size_at(call, operand)
            if operands:
                yield CLASS, tuple(operands), (product.bit_length(),)


def _size_at(call: SizedCall, operand: int) -> int:
    return call.facts.tensors[call.order[operand >> 8]].shape[operand >> 1 & 0x7F]


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
