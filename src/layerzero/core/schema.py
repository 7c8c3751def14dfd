"""What an operation takes and returns, as one contract, and the check of a call against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from layerzero.core.arguments import REQUIRED, Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import dtype_name, names_of
from layerzero.core.eager_state import STATE_FACTS
from layerzero.core.errors import RegistrationError
from layerzero.core.reasons import ReasonCode

__all__ = ["REQUIRED", "Axis", "OperationSchema", "Param", "Role", "TensorSchema"]

_WRITABLE = {bool, int, float, str, tuple, torch.dtype}
"""Types of values that a key can hold and a plan can write."""

_OF_THE_STATE = (
    *("platform", "sm", "dtype"),
    *("requires_grad", "deterministic", "capturing", "autocast", *STATE_FACTS),
)


@dataclass(frozen=True, slots=True)
class OperationSchema:
    """The contract of one operation's call.

    Attributes:
        operation: the operation's name.
        inputs: its tensors, in the order in which kernels take them.
        outputs: what it returns.
        params: its arguments that are no tensors, each with its role.
        axes: what sizes mean. An axis without an entry selects code: times do not carry over along it.
        layouts: layouts that a call may have, the one of this schema first; empty where axes have no layout.
        dtype_of: the tensor whose dtype is the call's; the first if empty.
        codes: derived facts, each with the reason code of a value that a kernel lacks; arguments have their own.
        required, optional: the tensors that every call brings, and those that it may leave out.
        mutated: names of the tensors that the operation writes into.
        chosen, scalars, bounds, handles: names of the parameters of each role; scalars are what is passed.
        promises: arguments that change no result, so that a kernel may leave them be: bounds, and most handles.
        neutral: by name, the value at which an optional parameter does nothing.
        passed: arguments that reach a kernel as they are, without their value being part of what is chosen.
        arguments, known: every argument, tensors first, and the same as a set.
        sizeless: the facts of a call that are no sizes and do not follow from them, but for those that ``derive`` adds.
        scaling: sizes along which a time changes smoothly; others (``head_dim``, ``page_size``) select code.
        implied: facts that sizes imply: works that differ in them alone are of one family.
        one_by_one: tensors that no kernel reads by vectors, apart from tables of places and counts.
        idle: facts that change which kernels are legal, or a number that they read, but not how much there is to do.
    """

    operation: str
    inputs: tuple[TensorSchema, ...]
    outputs: tuple[TensorSchema, ...]
    params: tuple[Param, ...] = ()
    axes: tuple[Axis, ...] = ()
    layouts: tuple[str, ...] = ()
    dtype_of: str = ""
    codes: tuple[tuple[str, ReasonCode], ...] = ()
    required: tuple[TensorSchema, ...] = field(init=False, repr=False, compare=False)
    optional: tuple[TensorSchema, ...] = field(init=False, repr=False, compare=False)
    mutated: tuple[str, ...] = field(init=False, repr=False, compare=False)
    chosen: tuple[str, ...] = field(init=False, repr=False, compare=False)
    scalars: tuple[str, ...] = field(init=False, repr=False, compare=False)
    bounds: tuple[str, ...] = field(init=False, repr=False, compare=False)
    handles: tuple[str, ...] = field(init=False, repr=False, compare=False)
    promises: frozenset[str] = field(init=False, repr=False, compare=False)
    neutral: Mapping[str, object] = field(init=False, repr=False, compare=False)
    passed: tuple[str, ...] = field(init=False, repr=False, compare=False)
    arguments: tuple[str, ...] = field(init=False, repr=False, compare=False)
    known: frozenset[str] = field(init=False, repr=False, compare=False)
    sizeless: tuple[str, ...] = field(init=False, repr=False, compare=False)
    scaling: frozenset[str] = field(init=False, repr=False, compare=False)
    implied: frozenset[str] = field(init=False, repr=False, compare=False)
    idle: frozenset[str] = field(init=False, repr=False, compare=False)
    one_by_one: frozenset[str] = field(init=False, repr=False, compare=False)
    indexed: tuple[TensorSchema, ...] = field(init=False, repr=False, compare=False)
    _axes: dict[str | None, tuple[tuple[TensorSchema, tuple[str, ...]], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _params: dict[str, Param] = field(default_factory=dict, init=False, repr=False, compare=False)
    _meanings: dict[str, Axis] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_role = {role: tuple(each.name for each in self.params if each.role is role) for role in Role}
        handles = [each for each in self.params if each.role is Role.HANDLE]
        passed = (*by_role[Role.PASSED], *by_role[Role.BOUND], *by_role[Role.HANDLE])
        arguments = (*(tensor.name for tensor in self.inputs), *by_role[Role.CHOSEN], *passed)
        optional = tuple(tensor for tensor in self.inputs if not tensor.required)
        derived: dict[str, object] = {  # read for every candidate of every choice
            "required": tuple(tensor for tensor in self.inputs if tensor.required),
            "optional": optional,
            "indexed": tuple(tensor for tensor in self.inputs if tensor.is_index),
            "mutated": tuple(tensor.name for tensor in self.inputs if tensor.mutated),
            "chosen": by_role[Role.CHOSEN],
            "scalars": by_role[Role.PASSED],
            "bounds": by_role[Role.BOUND],
            "handles": by_role[Role.HANDLE],
            "promises": frozenset(
                (*by_role[Role.BOUND], *(each.name for each in handles if not each.changes_result))
            ),
            "neutral": MappingProxyType({
                each.name: each.neutral
                for each in self.params
                if each.role is Role.CHOSEN and each.neutral is not REQUIRED
            }),
            "passed": passed,
            "arguments": arguments,
            "known": frozenset(arguments),
            "sizeless": (*(tensor.name for tensor in optional), *by_role[Role.CHOSEN], *passed, *_OF_THE_STATE),
            "scaling": frozenset(each.name for each in self.axes if each.scales),
            "implied": frozenset({
                *(each.name for each in self.axes if each.implied),
                *(each.name for each in self.params if each.implied),
            }),
            "one_by_one": frozenset(each.name for each in self.inputs if each.one_by_one),
            "idle": frozenset({
                *(each.name for each in self.axes if not each.works),
                *(each.name for each in self.params if not each.works),
            }),
        }  # fmt: skip
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._params.update({each.name: each for each in self.params})
        self._meanings.update({each.name: each for each in self.axes})
        problems = schema_problems(self)
        if problems:
            raise RegistrationError(f"operation {self.operation!r}: {'; '.join(problems)}")

    @property
    def canonical(self) -> str | None:
        """The layout that the schema is written in, None where it has none."""
        return self.layouts[0] if self.layouts else None

    def param(self, name: str) -> Param:
        """A parameter by name. Raises: KeyError."""
        return self._params[name]

    def tensor(self, name: str) -> TensorSchema:
        """A tensor argument by name. Raises: KeyError."""
        for each in self.inputs:
            if each.name == name:
                return each
        raise KeyError(name)

    def code(self, argument: str) -> ReasonCode:
        """The reason that a kernel which lacks an argument, or a value of it, is refused with."""
        found = self._params.get(argument) or next((each for each in self.inputs if each.name == argument), None)
        return dict(self.codes).get(argument, ReasonCode.CONSTRAINT_FAILED) if found is None else found.code

    def axis(self, name: str) -> Axis:
        """What a size means; nothing in particular where the schema does not say."""
        return self._meanings.get(name) or Axis(name)

    @property
    def leading(self) -> str:
        """The size that stands for all leading axes, empty where there is none."""
        return next((each.name for each in self.axes if each.leading), "")

    @property
    def dtype_tensor(self) -> TensorSchema:
        """The tensor whose dtype is the call's."""
        return self.tensor(self.dtype_of) if self.dtype_of else self.inputs[0]

    def results(self, values: Mapping[str, object]) -> tuple[TensorSchema, ...]:
        """What a call with these arguments or facts returns."""
        return tuple([each for each in self.outputs if not each.when or values.get(each.when)])

    def axes_in(self, layout: str | None) -> tuple[tuple[TensorSchema, tuple[str, ...]], ...]:
        """The tensors, each with the names of its axes in the order of a layout."""
        found = self._axes.get(layout)
        if found is None:
            found = self._axes[layout] = tuple(
                [(tensor, tensor.axes_in(layout, self.canonical)) for tensor in self.inputs]
            )
        return found

    def validate(self, *args: object, layout: str | None = None, **kwargs: object) -> list[str]:
        """List what is wrong with a call, with wanted and got; an empty list means nothing.

        Checks missing and unknown arguments, types, ranks, dtypes, one device for all tensors, and that equal axis
        names have equal sizes. Tensors may come by position (in schema order) or by name.
        """
        values = kwargs
        if args:
            names = [tensor.name for tensor in self.inputs]
            if len(args) > len(names):
                wanted = f"wanted at most {len(names)} tensors ({', '.join(names)})"
                return [f"{wanted}, got {len(args)} positional arguments"]
            values = dict(zip(names, args, strict=False)) | kwargs
        problems = [
            f"unknown argument {name!r}; this operation takes {', '.join(self.arguments)}"
            for name in values
            if name not in self.known
        ]
        problems += self._tensor_problems(values, layout)
        problems += self._param_problems(values)
        return problems

    def _tensor_problems(self, values: Mapping[str, object], layout: str | None) -> list[str]:
        problems: list[str] = []
        sizes: dict[str, tuple[int, str]] = {}
        lead = values.get(self.dtype_tensor.name)
        first = lead if isinstance(lead, torch.Tensor) else None
        first_name = self.dtype_tensor.name
        for schema, axes in self.axes_in(layout):
            value = values.get(schema.name)
            if value is None:
                if schema.required:
                    problems.append(f"{schema.name}: wanted a tensor, got nothing")
                continue
            if not isinstance(value, torch.Tensor):
                problems.append(f"{schema.label}: wanted a tensor, got {type(value).__name__}")
                continue
            if first is None:
                first, first_name = value, schema.name
            problems += _tensor_problem(schema, axes, value, first, first_name, sizes)
        return problems

    def _param_problems(self, values: Mapping[str, object]) -> list[str]:
        problems = []
        for param in self.params:
            value = values.get(param.name, None if param.neutral is REQUIRED else param.neutral)
            if type(value) not in param.plain or param.role is not Role.CHOSEN or type(value) in _SIZED:
                problem = param.problem(value)
                if problem:
                    problems.append(problem)
        return problems


_SIZED = frozenset({int, tuple, list})
"""Types of values that may be too large."""


def _tensor_problem(
    schema: TensorSchema,
    axes: tuple[str, ...],
    value: torch.Tensor,
    first: torch.Tensor,
    first_name: str,
    sizes: dict[str, tuple[int, str]],
) -> list[str]:
    problems = []
    shape = tuple(value.shape)
    if axes and not (len(shape) >= len(axes) - 1 if axes[0] == "..." else len(shape) == len(axes)):
        wanted = f"a {len(axes)}D tensor" if axes[0] != "..." else f"at least a {len(axes) - 1}D tensor"
        return [f"{schema.label}: wanted {wanted} ({', '.join(axes)}), got {value.ndim}D {shape}"]
    if schema.dtype_constraint is not None and value.dtype not in schema.dtype_constraint:
        problems.append(
            f"{schema.label}: wanted dtype {names_of(schema.dtype_constraint)}, got {dtype_name(value.dtype)}"
        )
    elif schema.same_dtype and value.dtype != first.dtype and schema.takes(first.dtype):  # else the first is at fault
        wanted, got = dtype_name(first.dtype), dtype_name(value.dtype)
        problems.append(f"{schema.label}: wanted dtype {wanted} like {first_name}, got {got}")
    elif value.dtype.itemsize == 1 and value.is_neg() and value.is_floating_point():
        problems.append(f"{schema.label}: wanted no negated view of float8, whose sign torch cannot resolve, got one")
    if value is not first and value.device != first.device:
        problems.append(f"{schema.label}: wanted device {first.device} like {first_name}, got {value.device}")
    named = axes[1:] if axes and axes[0] == "..." else axes
    for axis, size in zip(named, shape[len(shape) - len(named) :], strict=True):
        known = sizes.get(axis)
        if known is None:
            known = sizes[axis] = (int(axis), "the schema") if axis.isdigit() else (size, schema.name)
        wanted_size, owner = known
        if size != wanted_size:
            problems.append(f"{schema.label}: wanted {axis} {wanted_size} as in {owner}, got {size} in {shape}")
    return problems


def schema_problems(schema: OperationSchema) -> list[str]:
    """List what is wrong with a schema itself: names that stand for nothing, or for two things."""
    problems = []
    names = [*(each.name for each in schema.inputs), *(each.name for each in schema.params)]
    problems += [f"{name}: wanted a name once, got it twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    tensors = {each.name for each in schema.inputs}
    axes = {axis for each in schema.inputs for axis in each.shape_vars}
    for each in schema.inputs:
        wrong = [axis for axis in (*each.indexes, *each.counts) if axis not in axes]
        problems += [f"{each.name}: wanted places or counts along axes of the tensors, got {axis!r}" for axis in wrong]
        if each.given_as and (each.required or each.given_as not in schema.scalars):
            problems.append(
                f"{each.name}: given_as: wanted what is passed, of an optional tensor, got {each.given_as!r}"
            )
        if each.has_layout and not schema.layouts:
            problems.append(f"{each.name}: has a layout, and the schema names no layouts")
    for output in schema.outputs:
        if output.when and output.when not in schema.chosen:
            problems.append(f"{output.name}: when: wanted a chosen parameter, got {output.when!r}")
        if output.dtype_from and output.dtype_from not in schema.known:
            problems.append(f"{output.name}: dtype_from: wanted an argument, got {output.dtype_from!r}")
    for param in schema.params:
        strangers = [name for name in param.made_of if name not in tensors]
        problems += [f"{param.name}: made_of: wanted tensors of the operation, got {name!r}" for name in strangers]
        if param.role is Role.CHOSEN and not set(param.kinds) <= _WRITABLE:
            wanted = ", ".join(sorted(each.__name__ for each in _WRITABLE))
            problems.append(f"{param.name}: types: wanted some of {wanted} for what is chosen by, got {param.types}")
        if param.role is not Role.CHOSEN and param.neutral is not REQUIRED and param.neutral is not None:
            problems.append(f"{param.name}: neutral: wanted None for what is {param.role}, got {param.neutral!r}")
    if schema.dtype_of and schema.dtype_of not in tensors:
        problems.append(f"dtype_of: wanted a tensor, got {schema.dtype_of!r}")
    return problems
