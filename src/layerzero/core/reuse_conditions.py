"""What a plan demands of a call's sizes and strides so that calls of other sizes may share it, as data.

A coarse key (:func:`layerzero.engine.call_source.coarse_key`) tells the bit length of every size, of every stride
whether it is 0, 1 or what power of two up to 16 bytes divides it (of int64: nothing more), the address's low bits,
and everything that is no size exactly. Conditions say the rest. They are evaluated on the exact arguments, here or in
``_native/conditions.c``, which knows the same codes. What was read of a call (:mod:`layerzero.core.fact_reads`) becomes
conditions here; the limits that can say more than "as it was" do so in :mod:`layerzero.core.reuse_conditions`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from layerzero.core import arguments, limit_kinds, limits
from layerzero.core.dtypes import INDEX
from layerzero.core.fact_reads import EVERYTHING
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import Limit

SAME, WITHIN, MULTIPLE, ANY_OF, CLASS, DENSE, LOOSE = range(7)

Condition = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Code, operands, numbers. An operand is ``tensor << 8 | axis << 1``, plus 1 for the stride of that axis.

SAME: the operands are equal. WITHIN: from one number to the other. MULTIPLE: of a number. ANY_OF: the numbers.
CLASS: the operands' product has this bit length. DENSE: sizes, then strides, of axes in row-major order without gaps.
LOOSE: the same, and they are not.
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
    return _dense(values) is (code == DENSE)


def _dense(values: list[int]) -> bool:
    """Whether sizes and strides are those of row-major order without gaps."""
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
        equal: two of them that stay as long as each other; or none.
    """

    facts: Facts
    layout: str | None
    order: tuple[str, ...]
    varying: frozenset[str]
    equal: tuple[str, ...] = ()
    _axes: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)

    def varies(self, name: str) -> bool:
        """Whether a fact may differ between the calls: an axis, a size derived of one, or a tensor's memory."""
        behind = self.facts.operation.behind.get(name, frozenset())
        return not self.varying.isdisjoint(behind) or name in self.facts.tensors

    def axes(self, tensor: str) -> tuple[str, ...]:
        """Names of a tensor's axes as the caller passes it; ``...`` for each leading one, empty without a name.

        Of what broadcasts, an axis has the name of the one that it is as long as; none where it has one element.
        """
        known = self._axes.get(tensor)
        if known is None:
            whole = self.facts.operation.schema
            schema, shape = whole.tensor(tensor), self.facts.tensors[tensor].shape
            named, ndim = schema.axes_in(self.facts.layout, whole.canonical), len(shape)
            known = named or ("",) * ndim
            if schema.broadcast:  # one element is for all of the axis, however long that is
                full = schema.broadcast[len(schema.broadcast) - ndim :]
                known = tuple([axis if size != 1 else "" for axis, size in zip(full, shape, strict=True)])
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
        """The first operand that is this axis. Raises: IndexError for a derived size."""
        for tensor in self.facts.tensors:
            axes = self.axes(tensor)
            if name in axes:
                return self.operand(tensor, axes.index(name))
        raise IndexError(f"wanted an axis of a tensor, got {name!r}")

    def kernel_axes(self, tensor: str) -> tuple[int, ...]:
        """The caller's axes of a tensor in the order in which the kernel sees them."""
        count, theirs, mine = len(self.facts.tensors[tensor].shape), self.facts.layout, self.layout
        if theirs is None or mine is None or mine == theirs:
            return tuple(range(count))
        if not self.facts.operation.schema.tensor(tensor).has_layout:
            return tuple(range(count))
        return arguments.permutation(theirs, mine, count)

    def is_dense(self, tensor: str) -> bool:
        return self.facts.tensors[tensor].permuted(self.kernel_axes(tensor)).contiguous

    def dense(self, tensor: str) -> Iterable[Condition]:
        """The condition under which a tensor is contiguous as the kernel sees it."""
        rows = self._rows(tensor)
        if rows:
            yield DENSE, rows, ()

    def loose(self, tensor: str) -> Condition:
        """The condition under which a tensor is not contiguous as the kernel sees it."""
        return LOOSE, self._rows(tensor), ()

    def _rows(self, tensor: str) -> tuple[int, ...]:
        """A tensor's sizes and then its strides, as the kernel sees it."""
        first = self.operand(tensor, 0)
        sizes = [first | axis << 1 for axis in self.kernel_axes(tensor)]
        return (*sizes, *[size | 1 for size in sizes])

    def largest(self) -> Facts:
        """Facts of which every size and shape is at least that of any call of the class."""
        facts = self.facts
        sizes = {name: size_above(size) for name, size in facts.sizes().items() if self.varies(name)}
        tensors = {}
        for name, fact in facts.tensors.items():
            axes = zip(self.axes(name), fact.shape, strict=True)
            shape = tuple([size_above(size) if axis in self.varying else size for axis, size in axes])
            tensors[name] = msgspec.structs.replace(fact, shape=shape)
        return facts.of_sizes(sizes, tensors)


def size_above(size: int) -> int:
    """The largest size of the same bit length."""
    return (1 << size.bit_length()) - 1


@functools.singledispatch
def conditions(limit: Limit, call: SizedCall) -> Iterable[Condition] | None:
    """What keeps a limit that finds nothing finding nothing; None where it cannot say, and what it reads stays.

    Register one for a limit of your own, so that calls which differ in what it reads may share a plan.
    """
    return None


def axes_read(reads: Iterable[str], call: SizedCall) -> set[str] | None:
    """The axes of whose sizes more than the class was read; None where that is all of them."""
    behind, found = call.facts.operation.behind, set[str]()
    for read in reads:
        name, dot, part = read.partition(".")
        if read == EVERYTHING or (not dot and name not in behind and name in call.facts):
            return None  # a fact that its operation does not declare may follow from anything
        if not dot:
            found |= behind.get(name, frozenset())
        elif part == "shape" or (part == "contiguous" and not call.is_dense(name)):
            found.update(call.axes(name))
    return found


def strides_read(reads: Iterable[str], call: SizedCall) -> Iterable[Condition]:
    """The conditions under which strides that were read are what they were; the coarse key tells 0, 1 and alignment."""
    for read in sorted(reads):
        name, _, part = read.partition(".")
        if part == "contiguous" and call.is_dense(name):
            yield from call.dense(name)
        elif part in ("strides", "contiguous"):
            yield from _stepping(name, range(call.facts.tensors[name].ndim), call)
        elif part == "last_stride":
            last = call.kernel_axes(name)[-1:]
            yield from _stepping(name, [axis for axis in last if call.facts.tensors[name].shape[axis] > 1], call)


def orders(call: SizedCall, *, timed: bool) -> Iterable[Condition]:
    """The conditions under which the data lies as it does: dense in the caller's order, in a layout's, or in none.

    ``call`` is in the caller's layout.

    Times are kept apart by that (:func:`layerzero.core.evidence.call_work`), and the coarse key holds it for vectors
    alone. What is dense in no order is one class, as the views of a cache that grows are: a kernel that refuses such
    memory may be the best one for dense memory, with or without times.
    """
    schema = call.facts.operation.schema
    seen: list[SizedCall] = []
    for name, tensor in call.facts.tensors.items():
        if tensor.dtype in INDEX or name in schema.one_by_one or sum([size > 1 for size in tensor.shape]) < 2:
            continue
        if tensor.contiguous:
            if timed:
                yield from call.dense(name)
            continue
        seen = seen or [replace(call, layout=layout) for layout in (None, *schema.layouts)]
        lying = next((each for each in seen if each.is_dense(name)), None)
        if lying is None:
            yield from dict.fromkeys([each.loose(name) for each in seen])
        elif timed:
            yield from lying.dense(name)


def _stepping(name: str, axes: Iterable[int], call: SizedCall) -> Iterable[Condition]:
    for axis in axes:
        step = call.facts.tensors[name].strides[axis]
        if step not in (0, 1):
            yield WITHIN, (call.operand(name, axis, stride=True),), (step, step)


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
def _grid(limit: limits.Grid, call: SizedCall) -> Iterable[Condition] | None:
    return () if not limit.check(call.largest()) else None  # a grid grows with every size
