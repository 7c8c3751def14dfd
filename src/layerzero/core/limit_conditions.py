"""What limits demand of the sizes and strides of calls that share a plan, where that is more than "as they were".

A limit without an entry here is run once on facts that remember what it reads
(:mod:`layerzero.core.fact_reads`), and that stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from layerzero.core import limit_kinds, limit_launch
from layerzero.core.reuse_conditions import ANY_OF, MULTIPLE, SAME, WITHIN, Condition, SizedCall, conditions


@conditions.register
def _dim(limit: limit_kinds.Dim, call: SizedCall) -> Iterable[Condition] | None:
    if not call.varies(limit.name):
        return ()
    if limit.name not in call.varying:
        return None
    where = (call.size(limit.name),)
    found: list[Condition] = []
    if limit.min is not None or limit.max is not None:
        found.append((WITHIN, where, (limit.min or 0, 2**62 if limit.max is None else limit.max)))
    if limit.multiple is not None:
        found.append((MULTIPLE, where, (limit.multiple,)))
    if limit.one_of:
        found.append((ANY_OF, where, limit.one_of))
    return found


@conditions.register
def _equal(limit: limit_kinds.Equal, call: SizedCall) -> Iterable[Condition] | None:
    return same_sizes(limit.left, limit.right, call)


def same_sizes(left: str, right: str, call: SizedCall) -> Iterable[Condition] | None:
    """What keeps two sizes the same, for limits that demand it; None where one is derived of others."""
    if not call.varies(left) and not call.varies(right):
        return ()
    if {left, right} & set(call.facts.operation.derived):  # no operand is a derived size
        return None
    return ((SAME, (call.size(left), call.size(right)), ()),)


@conditions.register(limit_kinds.OneOf)
@conditions.register(limit_kinds.Positive)
def _value(limit: limit_kinds.OneOf | limit_kinds.Positive, call: SizedCall) -> Iterable[Condition] | None:
    kind_of_tensor = limit.fact in call.facts.tensors  # whether it was given, and as what: dtypes are exact
    return () if kind_of_tensor or not call.varies(limit.fact) else None


@conditions.register(limit_kinds.LastStrideOne)
@conditions.register(limit_kinds.Aligned)
def _memory(limit: limit_kinds.LastStrideOne | limit_kinds.Aligned, call: SizedCall) -> Iterable[Condition]:
    return ()  # it reads memory in no other way than the coarse key tells it


@conditions.register
def _contiguous(limit: limit_kinds.Contiguous, call: SizedCall) -> Iterable[Condition]:
    for tensor in limit.tensors:
        if tensor in call.facts.tensors:
            yield from call.dense(tensor)


@conditions.register
def _grid(limit: limit_launch.Grid, call: SizedCall) -> Iterable[Condition] | None:
    return () if not limit.check(call.largest()) else None  # a grid grows with every size
