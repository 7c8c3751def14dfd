"""What a plan demands of a call's sizes and strides so that calls of other sizes may share it: limits as data.

A coarse key (:func:`layerzero.engine.call_source.coarse_key`) tells the bit length of every size, of every stride
whether it is 0, 1 or what power of two up to 16 divides it, the address's low bits, and everything that is no size
exactly. Conditions say the rest. They are evaluated on the exact arguments, here or in ``_native/conditions.c``, which
knows the same codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from layerzero.core import layouts, limit_kinds, limit_launch
from layerzero.core.facts import Facts
from layerzero.core.limit import Limit

SAME, WITHIN, MULTIPLE, ANY_OF, CLASS, DENSE = range(6)

Condition = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Code, operands, numbers. An operand is ``tensor << 8 | axis << 1``, plus 1 for the stride of that axis.

SAME: the operands are equal. WITHIN: from one number to the other. MULTIPLE: of a number. ANY_OF: the numbers.
CLASS: the operands' product has this bit length. DENSE: sizes, then strides, of axes in row-major order without gaps.
"""

Conditions = tuple[Condition, ...]


def holds(conditions: Conditions, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> bool:
    """Whether a call satisfies all of them; shapes and strides by the tensor's number, empty where it is absent."""
    for code, operands, numbers in conditions:
        values = [(strides if each & 1 else shapes)[each >> 8][each >> 1 & 0x7F] for each in operands]
        if not _holds(code, values, numbers):
            return False
    return True


def _holds(code: int, values: list[int], numbers: tuple[int, ...]) -> bool:
    if code == WITHIN:
        return numbers[0] <= values[0] <= numbers[1]
    if code == SAME:
        return values.count(values[0]) == len(values)
    if code == MULTIPLE:
        return values[0] % numbers[0] == 0
    if code == ANY_OF:
        return values[0] in numbers
    if code == CLASS:
        return math.prod(values).bit_length() == numbers[0]
    expected, axes = 1, len(values) // 2
    for size, stride in zip(reversed(values[:axes]), reversed(values[axes:]), strict=True):
        if size != 1:
            if stride != expected and size != 0:
                return False
            expected *= size
    return True


@dataclass(frozen=True, slots=True)
class SizedCall:
    """A call some of whose sizes may vary within their bit length, as a kernel's limits see it.

    Attributes:
        facts: of the call as it is, in the caller's layout.
        layout: the kernel's.
        order: the function's tensors by number.
        varying: axes that may vary; ``...`` for all leading ones.
    """

    facts: Facts
    layout: str | None
    order: tuple[str, ...]
    varying: frozenset[str]
    _axes: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)

    def varies(self, name: str) -> bool:
        """Whether a fact may differ between the calls: an axis, a size derived of one, or a tensor's memory."""
        operation = self.facts.operation
        if name in operation.derived:
            return bool(self.varying.intersection(operation.derived_from.get(name, self.varying)))
        return name in self.varying or name in self.facts.tensors

    def axes(self, tensor: str) -> tuple[str, ...]:
        """Names of a tensor's axes as the caller passes it; ``...`` for each leading one, empty without a name."""
        known = self._axes.get(tensor)
        if known is None:
            whole = self.facts.operation.schema
            named, ndim = (
                whole.tensor(tensor).axes_in(self.facts.layout, whole.canonical),
                len(self.facts.tensors[tensor].shape),
            )
            known = named or ("",) * ndim
            if named and named[0] == "...":
                known = ("...",) * (ndim - len(named) + 1) + named[1:]
            self._axes[tensor] = known
        return known

    def operand(self, tensor: str, axis: int, *, stride: bool = False) -> int:
        """A size or stride by the caller's axis."""
        return self.order.index(tensor) << 8 | axis << 1 | stride

    def sizes(self, name: str) -> tuple[int, ...]:
        """The operands that are this axis, one for each tensor that has it; of ``...``, those of the first tensor."""
        found: list[int] = []
        for tensor in self.facts.tensors:
            places = [place for place, axis in enumerate(self.axes(tensor)) if axis == name]
            found += [self.operand(tensor, place) for place in places]
            if name == "..." and found:
                break
        return tuple(found)

    def size(self, name: str) -> int:
        """One operand that is this axis. Raises: IndexError for a derived size."""
        return self.sizes(name)[0]

    def kernel_axes(self, tensor: str) -> tuple[int, ...]:
        """The caller's axes of a tensor in the order in which the kernel sees them."""
        count, theirs, mine = len(self.facts.tensors[tensor].shape), self.facts.layout, self.layout
        schema = next(each for each in self.facts.operation.schema.inputs if each.name == tensor)
        if not schema.has_layout or theirs is None or mine is None or mine == theirs:
            return tuple(range(count))
        return layouts.permutation(theirs, mine, count)


@functools.singledispatch
def conditions(limit: Limit, call: SizedCall) -> Iterable[Condition] | None:
    """What keeps a limit that finds nothing finding nothing; None where only the exact call is known to be legal.

    Register one for a limit of your own; a limit without keeps the plans of its kernels to exact calls.
    """
    return None


def all_conditions(limits: Iterable[Limit], call: SizedCall) -> list[Condition] | None:
    """The conditions of all limits; None where one of them knows none."""
    found: list[Condition] = []
    for limit in limits:
        if type(limit) not in _TOLD:
            demanded = conditions(limit, call)
            if demanded is None:
                return None
            found += demanded
    return found


_TOLD = frozenset({
    # what reads no size
    *(limit_kinds.Platform, limit_kinds.Arch, limit_kinds.Instruction, limit_kinds.Dtype),
    *(limit_kinds.LseWithoutGradient, limit_kinds.SdpaEnabled, limit_launch.Generation, limit_launch.TensorCore),
    # what reads memory in no other way than the coarse key tells it
    *(limit_kinds.LastStrideOne, limit_kinds.Aligned),
})  # fmt: skip
"""Kinds of limits without conditions."""

_NAMES_NO_SIZE = _TOLD | {
    *(limit_kinds.Dim, limit_kinds.Equal, limit_kinds.SameHeads, limit_kinds.SquareCausal, limit_kinds.OneOf),
    *(limit_kinds.Positive, limit_kinds.Contiguous, limit_kinds.Custom),
}


def names_no_size(limit: Limit) -> bool:
    """Whether calls that differ in sizes only get the same conditions; unknown kinds may look at the sizes."""
    return type(limit) in _NAMES_NO_SIZE


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
    return _same(limit.left, limit.right, call)


@conditions.register
def _same_heads(limit: limit_kinds.SameHeads, call: SizedCall) -> Iterable[Condition] | None:
    return _same("heads", "kv_heads", call)


@conditions.register
def _square_causal(limit: limit_kinds.SquareCausal, call: SizedCall) -> Iterable[Condition] | None:
    return _same("seq_q", "seq_k", call) if call.facts.get("causal") is True else ()


def _same(left: str, right: str, call: SizedCall) -> Iterable[Condition] | None:
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


@conditions.register
def _contiguous(limit: limit_kinds.Contiguous, call: SizedCall) -> Iterable[Condition]:
    for tensor in limit.tensors:
        if tensor in call.facts.tensors:
            axes = call.kernel_axes(tensor)
            sizes = [call.operand(tensor, axis) for axis in axes]
            strides = [call.operand(tensor, axis, stride=True) for axis in axes]
            if axes:
                yield (DENSE, (*sizes, *strides), ())


@conditions.register
def _grid(limit: limit_launch.Grid, call: SizedCall) -> Iterable[Condition] | None:
    facts = call.facts
    largest = {name: (1 << size.bit_length()) - 1 for name, size in facts.sizes().items() if call.varies(name)}
    upper = Facts(facts.operation, facts.device, facts.layout, facts.tensors, {**facts, **largest})
    return () if not limit.check(upper) else None  # a grid grows with every size


@conditions.register
def _custom(limit: limit_kinds.Custom, call: SizedCall) -> Iterable[Condition] | None:
    return None if any(call.varies(name) for name in limit.reads) else ()
