"""What an operation takes and returns: tensors with named axes, scalar parameters, and the check of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from layerzero.core.dtypes import dtype_name, names_of
from layerzero.core.layouts import CANONICAL, canonical, permutation


@dataclass(frozen=True, slots=True)
class TensorSchema:
    """One tensor argument or result.

    Attributes:
        name: the argument's name.
        shape_vars: names of the axes; a leading ``...`` takes any number of axes; equal names must have equal sizes;
            a numeral is a fixed size. For tensors that have a layout, in the order of the canonical one (BSHD).
        dtype_constraint: allowed dtypes; None means any.
        required: whether the call must bring it.
        mutated: whether the operation writes into it.
        has_layout: whether its axes move with the call's layout.
        same_dtype: whether it must have the dtype of the first tensor.
        resident: whether it lives longer than the call and is large (a KV cache); a plan never copies it.
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

    @property
    def ndim(self) -> int | None:
        """Number of axes, None where it is open."""
        return None if not self.shape_vars or self.shape_vars[0] == "..." else len(self.shape_vars)

    def axes_in(self, layout: str | None) -> tuple[str, ...]:
        """Names of the axes in the order of a layout."""
        if not self.has_layout or layout in (None, CANONICAL):
            return self.shape_vars
        return tuple(self.shape_vars[axis] for axis in permutation(canonical(layout), layout))


_OF_THE_STATE = (
    *("platform", "sm", "dtype"),
    *("requires_grad", "deterministic", "capturing", "autocast", "sdpa_disabled"),
)


@dataclass(frozen=True, slots=True)
class OperationSchema:
    """The contract of one operation's call.

    Attributes:
        operation: the operation's name.
        inputs: its tensors, in the order in which kernels take them.
        outputs: what it returns.
        params: its scalar parameters and their types.
        neutral: the values at which an optional argument does nothing; a kernel that does not know the argument may
            run when it has this value. Tensors that are not required are neutral when absent.
        bounds: parameters that promise an upper bound of values on the device, ``max_x`` of the tensor ``xs``. They
            change no result; a choice depends on the power of two above them, and a kernel that accepts one gets the
            number itself.
        handles: objects that a call may bring for a kernel's use (a StepMetadata), and their types. They change no
            result; a choice depends on their ``kind``, and a kernel that accepts one gets the object itself.
        required, optional: the tensors that every call brings, and those that it may leave out.
        mutated: names of the tensors that the operation writes into.
        passed: arguments that reach a kernel as they are, without being part of what is chosen: bounds and handles.
        arguments, known: every argument, tensors first, and the same as a set.
        sizeless: the facts of a call that are no sizes and do not follow from them.
        kinds: of each parameter, the types that it may have, and those, None among them, that need no closer look.
    """

    operation: str
    inputs: tuple[TensorSchema, ...]
    outputs: tuple[TensorSchema, ...]
    params: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    neutral: Mapping[str, object] = field(default_factory=dict)
    bounds: tuple[str, ...] = ()
    handles: Mapping[str, type] = field(default_factory=dict)
    required: tuple[TensorSchema, ...] = field(init=False, repr=False, compare=False)
    optional: tuple[TensorSchema, ...] = field(init=False, repr=False, compare=False)
    mutated: tuple[str, ...] = field(init=False, repr=False, compare=False)
    passed: tuple[str, ...] = field(init=False, repr=False, compare=False)
    arguments: tuple[str, ...] = field(init=False, repr=False, compare=False)
    known: frozenset[str] = field(init=False, repr=False, compare=False)
    sizeless: tuple[str, ...] = field(init=False, repr=False, compare=False)
    kinds: tuple[tuple[str, tuple[type, ...], frozenset[type]], ...] = field(init=False, repr=False, compare=False)
    _axes: dict[str | None, tuple[tuple[TensorSchema, tuple[str, ...]], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("params", "neutral", "handles"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        derived: dict[str, object] = {  # read for every candidate of every choice
            "required": tuple(tensor for tensor in self.inputs if tensor.required),
            "optional": tuple(tensor for tensor in self.inputs if not tensor.required),
            "mutated": tuple(tensor.name for tensor in self.inputs if tensor.mutated),
        }
        passed = (*self.bounds, *self.handles)
        arguments = (*(tensor.name for tensor in self.inputs), *self.params, *passed)
        derived |= {"passed": passed, "arguments": arguments, "known": frozenset(arguments)}
        optional = (tensor.name for tensor in self.inputs if not tensor.required)
        derived["sizeless"] = (*optional, *self.params, *passed, *_OF_THE_STATE)
        derived["kinds"] = tuple(_kinds(name, kind, self.neutral) for name, kind in self.params.items())
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def axes_in(self, layout: str | None) -> tuple[tuple[TensorSchema, tuple[str, ...]], ...]:
        """The tensors, each with the names of its axes in the order of a layout."""
        found = self._axes.get(layout)
        if found is None:
            found = self._axes[layout] = tuple((tensor, tensor.axes_in(layout)) for tensor in self.inputs)
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
        first: torch.Tensor | None = None
        for schema, axes in self.axes_in(layout):
            value = values.get(schema.name)
            if value is None:
                if schema.required:
                    problems.append(f"{schema.name}: wanted a tensor, got nothing")
                continue
            if not isinstance(value, torch.Tensor):
                problems.append(f"{schema.name}: wanted a tensor, got {type(value).__name__}")
                continue
            first = value if first is None else first
            problems += _tensor_problem(schema, axes, value, first, sizes)
        return problems

    def _param_problems(self, values: Mapping[str, object]) -> list[str]:
        problems = []
        for name, kinds, plain in self.kinds:
            value = values.get(name, self.neutral.get(name))
            if type(value) in plain:
                continue
            accepted = (*kinds, int) if float in kinds else kinds
            if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
                wanted = " or ".join(each.__name__ for each in kinds)
                problems.append(f"{name}: wanted {wanted}, got {value!r}")
        for name in self.bounds:
            bound = values.get(name)
            if bound is not None and (type(bound) is not int or bound < 1):
                problems.append(f"{name}: wanted a number of at least 1 or None, got {bound!r}")
        for name, handle in self.handles.items():
            value = values.get(name)
            if value is not None and not isinstance(value, handle):
                problems.append(f"{name}: wanted a {handle.__name__} or None, got {type(value).__name__}")
        return problems


def _kinds(
    name: str, kind: type | tuple[type, ...], neutral: Mapping[str, object]
) -> tuple[str, tuple[type, ...], frozenset[type]]:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    plain = {*kinds, int} if float in kinds else {*kinds}
    if neutral.get(name, ...) is None:
        plain.add(type(None))
    return name, kinds, frozenset(plain)


def _tensor_problem(
    schema: TensorSchema,
    axes: tuple[str, ...],
    value: torch.Tensor,
    first: torch.Tensor,
    sizes: dict[str, tuple[int, str]],
) -> list[str]:
    problems = []
    shape = tuple(value.shape)
    if axes and not _rank_fits(axes, shape):
        wanted = f"a {len(axes)}D tensor" if axes[0] != "..." else f"at least a {len(axes) - 1}D tensor"
        return [f"{schema.name}: wanted {wanted} ({', '.join(axes)}), got {value.ndim}D {shape}"]
    if schema.dtype_constraint is not None and value.dtype not in schema.dtype_constraint:
        problems.append(
            f"{schema.name}: wanted dtype {names_of(schema.dtype_constraint)}, got {dtype_name(value.dtype)}"
        )
    elif schema.same_dtype and value.dtype != first.dtype:
        wanted, got = dtype_name(first.dtype), dtype_name(value.dtype)
        problems.append(f"{schema.name}: wanted dtype {wanted} like the first tensor, got {got}")
    if value is not first and value.device != first.device:
        problems.append(f"{schema.name}: wanted device {first.device} like the first tensor, got {value.device}")
    named = axes[1:] if axes and axes[0] == "..." else axes
    for axis, size in zip(named, shape[len(shape) - len(named) :], strict=True):
        known = sizes.get(axis)
        if known is None:
            known = sizes[axis] = (int(axis), "the schema") if axis.isdigit() else (size, schema.name)
        wanted_size, owner = known
        if size != wanted_size:
            problems.append(f"{schema.name}: wanted {axis} {wanted_size} as in {owner}, got {size} in {shape}")
    return problems


def _rank_fits(axes: Sequence[str], shape: Sequence[int]) -> bool:
    return len(shape) >= len(axes) - 1 if axes[0] == "..." else len(shape) == len(axes)
