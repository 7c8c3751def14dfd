"""Which calls of other sizes a plan may serve: what its route, kernel and limits were seen not to depend on.

Sizes may differ within a power of two where nothing that made the plan read more of them than that; preference may be a
little off then, legality not: what limits demand of sizes and strides is tested on the arguments of every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from layerzero.core import reuse_conditions  # noqa: F401  # what the limits of core demand
from layerzero.core.fact_reads import EVERYTHING, NEGATED, RANK, Reads, Watched, names_no_size, reads_of
from layerzero.core.facts import Facts, fact_name
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Limit
from layerzero.core.plan import Plan
from layerzero.core.reuse_conditions import (
    CLASS,
    SAME,
    WITHIN,
    Condition,
    Conditions,
    SizedCall,
    axes_read,
    conditions,
    orders,
    strides_read,
)
from layerzero.engine import headroom
from layerzero.engine.judgements import EpochValues
from layerzero.engine.legality import checked
from layerzero.engine.policy import Policy


class _Outline(NamedTuple):
    """What the conditions of calls of one kind have in common while the same axes vary.

    Attributes:
        varying: axes that may vary.
        exact: operands of the sizes that stay as they are.
        classes: operands of the sizes whose product stays in its class.
        fixed: the conditions that name no size of the call.
        sized: limits whose conditions follow from the sizes of a call.
        watched: limits without conditions that read a size or memory, so that each call has to show what they read.
    """

    varying: frozenset[str]
    exact: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    fixed: Conditions
    sized: tuple[Limit, ...]
    watched: tuple[Limit, ...]


class _Kind(NamedTuple):
    """Calls of one kernel that differ in sizes only.

    Attributes:
        outline: while all axes vary that the route, rules and what ``load`` read leave free.
        complete: whether that outline says all, whatever the sizes.
        outlines: of each smaller set of axes.
    """

    outline: _Outline
    complete: bool
    outlines: dict[frozenset[str], _Outline]


OUTLINES: EpochValues[_Kind] = EpochValues()
"""By kernel, policy, and what a call has apart from its sizes."""


def conditions_of(plan: Plan, policy: Policy, order: tuple[str, ...]) -> Conditions | None:
    """What a call of the same coarse key must satisfy to run this plan; None if only the exact call may.

    ``order`` has the function's tensors by number. No key holds the negative bit: where a limit reads it, the plan
    checks it. Calls in dense memory have their own, apart from those in other memory; where there are times, also those
    whose memory lies in another order.
    """
    facts = plan.report.facts
    made_good = _made_good(plan)
    if EVERYTHING in plan.reads or made_good is None:
        return None
    kind = _kind(plan, policy, order, made_good)
    may_need = facts.device.platform != "cpu" or bool(headroom.RAN_OUT)
    complete = kind.complete and not (may_need and headroom.need_of(plan.kernel, facts).known)
    outline, demanded = (kind.outline, []) if complete else _asked(kind, plan, policy, order, made_good)
    if not outline.varying:
        return None
    shapes = [facts.tensors[name].shape if name in facts.tensors else () for name in order]
    exact = [(WITHIN, (each,), (size := shapes[each >> 8][each >> 1 & 0x7F], size)) for each in outline.exact]
    classes = []
    for operands in outline.classes:
        product = math.prod([shapes[each >> 8][each >> 1 & 0x7F] for each in operands])
        classes.append((CLASS, operands, (product.bit_length(),)))
    told = (*exact, *classes, *outline.fixed, *demanded)
    lying = orders(SizedCall(facts, None, order, outline.varying), timed=plan.report.timed)
    return (*told, *[each for each in lying if each not in told])


class _MadeGood(NamedTuple):
    """What a plan does to tensors that calls of other sizes may have done to theirs.

    Attributes:
        limits: those that it makes good, so that they say nothing of the caller's tensors.
        reads: what these limits and the kernel's ``load`` read.
    """

    limits: tuple[Limit, ...]
    reads: Reads


def _made_good(plan: Plan) -> _MadeGood | None:
    """What a plan makes good; None where another call's tensors may lie differently from these once they are made.

    A copy's strides and alignment follow from sizes in ways that no condition here says: no limit may read them but one
    that wants the copy, which is dense whatever was copied. So do those of a tensor that an adapter gives: one that a
    call without it gets anew was shown to no limit, and of one that a call has, none may read how it lies.
    """
    if not plan.transforms_data:
        return _MadeGood((), plan.reads)
    kernel, facts, given, copied = plan.kernel, plan.report.facts, set[str](), set[str]()
    for each in plan.adaptations:
        adapter = facts.operation.adapters.get(each.kind)
        if adapter is not None and each.argument in adapter.gives_alone:
            given.add(adapter.gives)
        elif each.kind == "copy":
            copied.add(each.argument)
        elif each.moves_data and each.kind != "cast":  # whose result is dense, whatever was cast
            return None
    if plan.adapted is None or not given <= facts.tensors.keys():
        return None
    seen = facts.seen_in(kernel.layout)
    judged = [(limit, checked(limit, seen)) for limit in kernel.limits]
    found = tuple([limit for limit, findings in judged if findings])
    dense = frozenset([f"{name}.{part}" for name in copied for part in _DENSE])
    for limit, findings in judged:
        met = dense if findings and all(each.repair and each.repair.kind == "copy" for each in findings) else ()
        for read in reads_of(limit.check, plan.adapted):
            name, dot, part = read.partition(".")
            lies = (name in given and part not in _ALIKE) or (name in copied and part not in _OF_COPIES)
            if read == EVERYTHING or (dot and lies and read not in met):
                return None
    if copied and not dense.isdisjoint(plan.reads):
        return None
    return _MadeGood(found, plan.reads.union(*[reads_of(limit.check, seen) - dense for limit in found]))


_ALIKE = frozenset({"dtype", "ndim"})
"""What tensors that the same statements give have in common."""

_DENSE = ("contiguous", "last_stride", "strides")
_OF_COPIES = _ALIKE | {"shape", "contiguous", "last_stride"}
"""What a limit that wants a copy reads, and what other limits may: the same of each copy, or as of its tensor."""


def _kind(plan: Plan, policy: Policy, order: tuple[str, ...], made_good: _MadeGood) -> _Kind:
    kernel, facts, varies, equal = plan.kernel, plan.report.facts, plan.report.varies, plan.report.equal
    ranks = tuple([len(tensor.shape) for tensor in facts.tensors.values()])
    key = kernel, policy, order, varies, equal, made_good, facts.operation.name, facts.layout, ranks, facts.sizeless()

    def made() -> _Kind:
        rules = (condition.fact for rule in policy.rules for condition in rule.conditions)
        reads = made_good.reads.union([fact_name(name, facts.operation) for name in rules])
        call = SizedCall(facts, kernel.layout, order, frozenset() if _unexplained(facts) else frozenset(varies), equal)
        outline = _outlined(kernel, replace(call, varying=_without(reads, call)), made_good)
        told = kernel.build_key is None and kernel.prebuilt is None and kernel.workspace_bytes is None
        told = told and not _by_call(kernel, facts, policy)
        complete = told and not outline.sized and not outline.watched and not any("." in read for read in reads)
        return _Kind(outline, complete, {outline.varying: outline})

    return OUTLINES.get((*key, _for_all(facts)), made)


def _for_all(facts: Facts) -> tuple[bool, ...]:
    """Of which axes a tensor that broadcasts has one element for all: these have no name and stay as they are."""
    there = [each.name for each in facts.operation.schema.inputs if each.broadcast and each.name in facts.tensors]
    return tuple([size == 1 for name in there for size in facts.tensors[name].shape])


def _asked(
    kind: _Kind, plan: Plan, policy: Policy, order: tuple[str, ...], made_good: _MadeGood
) -> tuple[_Outline, list[Condition]]:
    """The outline of a call, and what its sizes and strides demand as well; what limits read leaves fewer axes."""
    kernel, facts = plan.kernel, plan.report.facts
    reads = _built_for(kernel, facts)
    if not bool is type(kernel.deterministic) is type(kernel.batch_invariant) is type(kernel.tp_invariant):
        reads = reads.union(*[reads_of(flag, facts) for flag in _by_call(kernel, facts, policy)])
    call = SizedCall(facts, kernel.layout, order, kind.outline.varying, plan.report.equal)
    varying = _without(reads, call)
    while True:
        if varying != call.varying:
            call = replace(call, varying=varying)
        outline = kind.outlines.get(varying)
        if outline is None:
            outline = kind.outlines[varying] = _outlined(kernel, call, made_good)
        demanded, more = _demanded(outline, plan, policy, call)
        reads |= more
        varying = _without(more, call)
        if varying == call.varying:
            break
    if NEGATED in reads:
        plan.reads_negated = False
    return outline, [*demanded, *strides_read(made_good.reads | reads, call)]


def _unexplained(facts: Facts) -> bool:
    """Whether a derived size follows from unknown sizes: its class, which verdicts belong to, is then unknown."""
    operation = facts.operation
    return any(type(facts.get(name)) is int for name in operation.derived if name not in operation.derived_from)


def _without(reads: Reads, call: SizedCall) -> frozenset[str]:
    """The axes of a call that are left to vary when what was read stays as it is."""
    if not reads:
        return call.varying
    axes = axes_read(reads, call)
    left = frozenset() if axes is None else call.varying - axes
    return left if left.issuperset(call.equal) else left.difference(call.equal)


def _built_for(kernel: Kernel, facts: Facts) -> Reads:
    """What was read to tell whether a compiled kernel is there: for one size of a class it may be, for another not."""
    reads: Reads = frozenset()
    if kernel.build_key is None and kernel.prebuilt is None:
        return reads
    seen = facts.seen_in(kernel.layout)
    if kernel.build_key is not None:
        reads |= reads_of(kernel.build_key, seen)
    if kernel.prebuilt is not None:
        reads |= reads_of(kernel.prebuilt, facts, moved=seen is not facts)
    return reads


def _by_call(kernel: Kernel, facts: Facts, policy: Policy) -> list[Callable[[Facts], bool]]:
    """The flags that decide whether a kernel may run, and that it declares for some calls only."""
    flags = [kernel.deterministic] if facts["deterministic"] else []
    flags += [kernel.batch_invariant, kernel.tp_invariant] if policy.invariant else []
    return [flag for flag in flags if not isinstance(flag, bool)]


def _outlined(kernel: Kernel, call: SizedCall, made_good: _MadeGood) -> _Outline:
    """Ask each limit once what of a call its conditions follow from, and those that have none what they read."""
    facts, seen = call.facts, call.facts.seen_in(call.layout)
    fixed: list[Condition] = []
    sized: list[Limit] = []
    watched: list[Limit] = []
    for limit in kernel.limits:
        if limit in made_good.limits:
            continue
        asked = Watched(facts)
        try:
            told = conditions(limit, SizedCall(asked, call.layout, call.order, call.varying))
            told = told if told is None else list(told)
        except Exception:  # noqa: BLE001  # it wants the facts themselves, and gets them for each call
            sized.append(limit)
            continue
        if not _fixed(asked.close(), facts):
            sized.append(limit)
        elif told is not None:
            fixed += told
        elif not _fixed(reads_of(limit.check, seen), facts):
            watched.append(limit)
    exact, same = _axes(call)
    conditions_kept = (*same, *fixed)
    return _Outline(call.varying, tuple(exact), tuple(_classes(call)), conditions_kept, tuple(sized), tuple(watched))


def _fixed(reads: Reads, facts: Facts) -> bool:
    """Whether all calls of the kind agree in what was read; they agree in the ranks of tensors."""
    return names_no_size(frozenset(read for read in reads if not read.endswith(RANK)), facts)


def _demanded(outline: _Outline, plan: Plan, policy: Policy, call: SizedCall) -> tuple[list[Condition], Reads]:
    """The conditions that follow from the sizes of this call, and what limits read that have none."""
    kernel, facts = plan.kernel, call.facts
    demanded: list[Condition] = []
    reads: Reads = frozenset()
    seen = facts.seen_in(call.layout)
    for limit in outline.watched:
        reads |= reads_of(limit.check, seen)
    for limit in outline.sized:
        told = conditions(limit, call)
        if told is None:
            reads |= reads_of(limit.check, seen)
        else:
            demanded += told
    may_need = kernel.workspace_bytes is not None or facts.device.platform != "cpu" or headroom.RAN_OUT
    if may_need and not _fits_in_memory(kernel, policy, call):
        asked = kernel.workspace_bytes
        reads |= {EVERYTHING} if asked is None else reads_of(asked, facts, moved=seen is not facts)
    return demanded, reads


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
            name = call.equal[0] if axis in call.equal else axis
            known = first.setdefault((name, place if axis == "..." else 0), operand)
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


def _fits_in_memory(kernel: Kernel, policy: Policy, call: SizedCall) -> bool:
    """Whether the largest call of the class would, since workspaces grow with sizes."""
    try:
        return headroom.fits(kernel, call.largest(), policy)
    except Exception:  # noqa: BLE001  # it answered for the call itself, whose sizes it reads
        return False
