"""The words of an operation's schema: axes and what their sizes mean, tensors, parameters with a role."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch

from layerzero.core.handle import OfKind
from layerzero.core.reasons import ReasonCode


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters of code that is not ours. Raises: TypeError or ValueError where it says none.

    Python 3.14 would look up the names of its annotations, of which some are there for type checkers alone.
    """
    if sys.version_info >= (3, 14):
        form = importlib.import_module("annotationlib").Format.FORWARDREF
        return inspect.signature(function, annotation_format=form)
    return inspect.signature(function)


@functools.cache
def permutation(source: str, target: str, ndim: int = 4) -> tuple[int, ...]:
    """Say which source axis goes where: ``tensor.permute(permutation("BSHD", "BHSD"))``.

    A tensor of fewer axes has the last ones of its layout: one sequence alone has those of ``SHD`` in ``BSHD``.

    Raises: ValueError for layouts that do not have the same axes.
    """
    if sorted(source) != sorted(target) or len(set(source)) != len(source):
        raise ValueError(f"layout: wanted the axes of {source} in another order, got {target}")
    if ndim < len(source):
        source = source[len(source) - ndim :]
        target = "".join(letter for letter in target if letter in source)
    leading = ndim - len(source)
    return (*range(leading), *(leading + source.index(letter) for letter in target))


@functools.cache
def moving(source: str, target: str, ndim: int = 4) -> str:
    """The call of a tensor's method that moves its axes: ``.transpose(1, 2)``; empty where nothing moves."""
    order = permutation(source, target, ndim)
    moved = [axis for axis, place in enumerate(order) if axis != place]
    if not moved:
        return ""
    if len(moved) == 2:
        return f".transpose({moved[0]}, {moved[1]})"
    return f".permute({', '.join(map(str, order))})"


class SizeCodes(NamedTuple):
    """The reasons that a kernel which does not take a size is refused with.

    Attributes:
        invalid: it is too small, or none of those that the kernel takes, or not what another size is.
        too_large: it is too large.
        uneven: it is no multiple of what the kernel needs.
    """

    invalid: ReasonCode = ReasonCode.CONSTRAINT_FAILED
    too_large: ReasonCode = ReasonCode.CONSTRAINT_FAILED
    uneven: ReasonCode = ReasonCode.CONSTRAINT_FAILED


_NO_SIZE_CODES = SizeCodes()


_INT64 = 2**63


def out_of_range(value: object, *, floating: bool = False) -> bool:
    """Whether an integer, or one in a sequence, is none that a kernel can be given: beyond int64, or beyond floats."""
    if isinstance(value, int):
        if floating:
            return not -sys.float_info.max <= value <= sys.float_info.max
        return not -_INT64 <= value < _INT64
    return isinstance(value, (tuple, list)) and any(out_of_range(each) for each in value)


_LONGEST = 200
"""Characters of a value in a message: what is longer hides the sentence around it."""


def has_hash(name: object) -> bool:
    """Whether something can be a key: a tuple may be, and is none with a list in it."""
    try:
        hash(name)
    except TypeError:
        return False
    return True


def told(value: object) -> str:
    """A value for an error message, on one line of it: of a tensor what it is, not what it holds."""
    if isinstance(value, torch.Tensor):
        kind = f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
        return f"{kind}; .item() gives its number" if value.numel() == 1 else kind
    if isinstance(value, int) and out_of_range(value):  # Python refuses to write integers of many digits
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} of integers too large to write"
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy's
        return f"{text}; .item() gives its number"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({type(value).__name__})"


@dataclass(frozen=True, slots=True)
class Axis:
    """What a size means: an axis of tensors, or a size derived of several.

    Attributes:
        name: as tensors or ``Operation.derived`` name it.
        scales: whether a time changes smoothly along it; sizes that do not select code (``head_dim``).
        live: whether it changes while a program runs; a frozen choice holds a power of two of it, of others the size.
        tiled: whether kernels work through it in tiles, so that lengths between multiples take what the next one takes.
        beside: whether its entries run side by side, so that only the product of such axes counts for a time. For an
            axis that carries another: how many of the other go with each.
        apart: whether its entries are worked on apart from each other, so that a call may be cut along it.
        shared: whether ranks of tensor parallelism share it: each computes a part, which they put together or sum up.
        carries: axes that shrink and grow with it where a call is cut.
        leading: whether it stands for all leading axes of a tensor whose axes begin with ``...``.
        works: whether it changes how much there is to do.
        implied: whether it follows from other sizes, so that works which differ in it alone are of one family.
        codes: the reasons that a kernel which does not take its size is refused with.
    """

    name: str
    scales: bool = False
    live: bool = False
    tiled: bool = False
    beside: bool = False
    apart: bool = False
    shared: bool = False
    carries: tuple[str, ...] = ()
    leading: bool = False
    works: bool = True
    implied: bool = False
    codes: SizeCodes = _NO_SIZE_CODES


@dataclass(frozen=True, slots=True)
class TensorSchema:
    """One tensor argument or result.

    Attributes:
        name: the argument's name.
        shape_vars: names of the axes; a leading ``...`` takes any number of axes; equal names must have equal sizes;
            a numeral is a fixed size. For tensors that have a layout, in the order of the canonical one.
        dtype_constraint: allowed dtypes; None means any.
        required: whether the call must bring it.
        mutated: whether the operation writes into it.
        has_layout: whether its axes move with the call's layout.
        same_dtype: whether it must have the call's dtype.
        resident: whether it lives longer than the call and is large (a KV cache); a plan never copies it.
        broadcast: the axes that it broadcasts to, where it may have fewer or axes of one element; kernels see it with
            all of them.
        indexes: of integers, the axes whose product they are places in: from 0, below it.
        counts: of integers, the axes whose product they count up to: from 0 to it.
        holes: whether -1 among them stands for nothing.
        distinct: whether no place may be named twice in a row of the last axis, because it is written into.
        one_by_one: whether its values are few and read one by one, so that their dtype and how they lie change no time.
        dtype_from: of a result, the parameter or tensor whose dtype it has; the call's if empty.
        when: of a result, the flag that asks for it; always there if empty.
        given_as: of an optional tensor, the number that it takes the place of, and whose name callers give it by.
        seeds: whether its numbers decide which of the random results comes.
        code: of an optional tensor, the reason that a kernel which lacks it is refused with.
        ndim: number of axes; derived from ``shape_vars``, None where it is open.
    """

    name: str
    shape_vars: tuple[str, ...] = ()
    dtype_constraint: frozenset[torch.dtype] | None = None
    required: bool = True
    mutated: bool = False
    has_layout: bool = False
    same_dtype: bool = True
    resident: bool = False
    broadcast: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    holes: bool = False
    distinct: bool = False
    one_by_one: bool = False
    dtype_from: str = ""
    when: str = ""
    code: ReasonCode = ReasonCode.CONSTRAINT_FAILED
    given_as: str = ""
    seeds: bool = False

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether it may have this dtype."""
        return self.dtype_constraint is None or dtype in self.dtype_constraint

    @property
    def label(self) -> str:
        """The name that callers know it by."""
        return self.given_as or self.name

    @property
    def own_dtype(self) -> bool:
        """Whether, as a result, it has a dtype whatever that of the call is: a log-sum-exp is float32."""
        return bool(self.dtype_from) or len(self.dtype_constraint or ()) == 1

    @property
    def ndim(self) -> int | None:
        """Number of axes, None where it is open."""
        return None if not self.shape_vars or self.shape_vars[0] == "..." else len(self.shape_vars)

    @property
    def is_index(self) -> bool:
        """Whether its values are places or counts, which no random number stands for."""
        return bool(self.indexes or self.counts)

    def most(self, sizes: Mapping[str, int]) -> int:
        """The largest value that it may hold in a call of these sizes; -1 where there is no place."""
        if self.indexes:
            return math.prod(sizes[axis] for axis in self.indexes) - 1
        return math.prod(sizes[axis] for axis in self.counts)

    def axes_in(self, layout: str | None, canonical: str | None) -> tuple[str, ...]:
        """Names of the axes in the order of a layout, where the schema is written in the canonical one."""
        if not self.has_layout or canonical is None or layout in (None, canonical):
            return self.shape_vars
        order = permutation(canonical, layout, len(self.shape_vars))
        return tuple(self.shape_vars[axis] for axis in order)


class Role(StrEnum):
    """What a parameter is to a choice."""

    CHOSEN = "chosen"
    """Its value is in the key and in the plan: a kernel may be chosen by it."""
    PASSED = "passed"
    """It reaches the kernel as it is and chooses nothing but by being given: a seed, a temperature."""
    BOUND = "bound"
    """It promises an upper bound of values on the device. It changes no result; a choice depends on the power of two
    above it, and a kernel that accepts it gets the number itself."""
    HANDLE = "handle"
    """An object that the caller keeps. A choice depends on its kind, and a kernel that accepts it gets the object."""


REQUIRED: Any = type("_Required", (), {"__repr__": lambda _: "REQUIRED"})()
"""The neutral value of a parameter that every call brings."""


@dataclass(frozen=True, slots=True)
class Param:
    """One argument that is no tensor.

    Attributes:
        name: the argument's name.
        types: what it may be, apart from its neutral value; a float may be given as an int.
        neutral: the value at which it does nothing; a kernel that does not know it may run then. None for what is
            passed, bounds and handles.
        role: what it is to a choice.
        least, most: of a number; of a passed one tested on every call, since no key holds it, else on each new one.
        made_of: of a handle, the tensors of the call that it was made of; of a bound, the one whose values it bounds.
        kind: of a handle, what a choice depends on, given the handle and what it was made of; ``kind_for`` if None.
        make: of a handle, one for these arguments, with buffers that stay where they are if ``capturable``.
        changes_result: of a handle, whether a kernel that lacks it must not run without (a generator).
        example: a value that is not neutral, for checks; drawn where there is None.
        code: the reason that a kernel which lacks it is refused with.
        works: whether it changes how much there is to do.
        random: whether results are random where it is not neutral.
        seeds: whether it decides which of the random results comes: a seed, an offset, a generator.
        implied: whether it follows from sizes.
        kinds: its types as a tuple.
        plain: the types of values that need no closer look.
    """

    name: str
    types: type | tuple[type, ...]
    neutral: object = REQUIRED
    role: Role = Role.CHOSEN
    least: float = -math.inf
    most: float = math.inf
    made_of: tuple[str, ...] = ()
    kind: Callable[..., str] | None = None
    make: Callable[[Mapping[str, Any], bool], object] | None = None
    changes_result: bool = False
    example: object = None
    code: ReasonCode = ReasonCode.CONSTRAINT_FAILED
    works: bool = True
    random: bool = False
    seeds: bool = False
    implied: bool = False
    kinds: tuple[type, ...] = field(init=False, repr=False, compare=False)
    plain: frozenset[type] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = self.types if isinstance(self.types, tuple) else (self.types,)  # read for every call that is chosen for
        plain = {*kinds, int} if float in kinds else {*kinds}
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "plain", frozenset(plain | {type(None)} if self.neutral is None else plain))

    def kind_of(self, value: object, arguments: Mapping[str, Any]) -> str:
        """What a choice sees of a handle."""
        if value is None:
            return "none"
        if isinstance(value, OfKind):
            return value.kind
        made_of = [arguments.get(name) for name in self.made_of]
        return self.kind(value, *made_of) if self.kind is not None else value.kind_for(*made_of)  # type: ignore[attr-defined]

    def problem(self, value: object) -> str:
        """What is wrong with a value, with wanted and got; empty if nothing is."""
        if type(value) in self.plain and self.role in (Role.CHOSEN, Role.HANDLE):
            return self._range_problem(value) or self._size_problem(value)
        if self.role is Role.BOUND:
            least = max(1, self.least)
            fits = value is None or (type(value) is int and least <= value <= self.most and value < _INT64)
            hint = "; pass None where there is nothing to bound" if type(value) is int and value == 0 else ""
            return "" if fits else f"{self.name}: wanted a number of at least {least} or None, got {told(value)}{hint}"
        if value is None and self.neutral is None:
            return ""
        accepted = (*self.kinds, int) if float in self.kinds else self.kinds
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in self.kinds):
            wanted = " or ".join(each.__name__ for each in self.kinds)
            if self.role is Role.HANDLE:
                return f"{self.name}: wanted a {wanted} or None, got {type(value).__name__}"
            return f"{self.name}: wanted {wanted}, got {told(value)}"
        return self._range_problem(value) or self._size_problem(value)

    def _range_problem(self, value: object) -> str:
        if not isinstance(value, (int, float)) or self.least <= value <= self.most:
            return ""
        return f"{self.name}: wanted {_bound(self.least)} to {_bound(self.most)}, got {told(value)}"

    def _size_problem(self, value: object) -> str:
        floating = float in self.kinds
        if not out_of_range(value, floating=floating):
            return ""
        wanted = "a number that a float can hold" if floating else "integers of 64 bits"
        return f"{self.name}: wanted {wanted}, got {told(value)}"


def _bound(number: float) -> str:
    """A bound for a message: a whole number that is read at a glance has all its digits."""
    return str(number) if isinstance(number, int) and abs(number) < 10**10 else f"{number:g}"


class Write(Protocol):
    """Write the statements of an adaptation into a plan.

    They may name the function's arguments, which they assign anew, and what ``Adapter.names`` has. ``layout`` is that
    of the tensors at this place of the plan.
    """

    def __call__(self, arguments: Sequence[str], facts: Any, layout: str | None, /) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """Something that a plan may do to an operation's arguments so that a kernel becomes legal.

    Attributes:
        text: what happens, for people; ``{argument}`` stands for the argument that a limit found fault with.
        write: writes the statements, given all such arguments of one plan.
        names: what the statements may name besides the arguments.
        names_sizes: whether the statements name sizes, so that calls of other sizes have others.
        moved: whether they come after the tensors were moved to the kernel's layout.
        absorbs: whether the arguments are gone from the call afterwards, at their neutral values.
        absorbed: the arguments that it can absorb; those of a call that are there go along.
        gives: a tensor that the statements make, which the kernel gets in place of what they absorb.
        writes_anew: tensors that are dense afterwards, whatever they were before.
        gives_alone: arguments for whose sake it makes what it gives, and writes no other tensor.
    """

    text: str
    write: Write
    names: Mapping[str, Any] = field(default_factory=dict)
    names_sizes: bool = False
    moved: bool = False
    absorbs: bool = False
    absorbed: tuple[str, ...] = ()
    gives: str = ""
    writes_anew: tuple[str, ...] = ()
    gives_alone: frozenset[str] = frozenset()
