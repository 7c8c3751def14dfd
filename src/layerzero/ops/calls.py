"""Calls of any operation, made from its schema: of a case, of shapes, of facts; for tests, tuning, warmup, questions.

Nothing here knows an operation. What a schema cannot tell how to draw (tables whose pages must not meet) an operation
gives itself, as ``examples``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import TensorSchema, permutation, told
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError
from layerzero.core.facts import Facts, FactsBuilder
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Function, Operation, Random, Routed
from layerzero.core.reasons import Reason
from layerzero.ops import function_of


def function_for(operation: Operation | str) -> Function:
    """The function whose calls are routed to an operation. Raises: KeyError where there is none."""
    name = operation if isinstance(operation, str) else operation.name
    function = function_of(name)
    if function is None:
        raise KeyError(f"{name} belongs to no public function, so nothing calls it; lz.register_function gives it one")
    return function


def sizes_of(operation: Operation, case: Case) -> dict[str, int]:
    """Every size of a case, with those that follow from others."""
    sizes = dict(case.sizes)
    return {**operation.complete(sizes), **sizes} if operation.complete is not None else sizes


def arguments_of(
    operation: Operation,
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    layout: str | None = None,
    generator: Random = None,
    promised: bool = False,
    capturable: bool = False,
) -> dict[str, Any]:
    """What the function is called with in a case: random tensors, the case's parameters, the layout.

    Args:
        dtype: that of the call.
        device: where the tensors lie; ``meta`` gives shapes alone.
        layout: of tensors that have one; the schema's if None.
        generator: draws the numbers on its device; one of the CPU draws the same everywhere. The device's own if None.
        promised: also bring the bounds and handles that a serving engine brings, so that kernels plan once.
        capturable: these handles are such as a captured graph can go on reading.
    """
    schema, target = operation.schema, torch.device(device)
    sizes = sizes_of(operation, case)
    made: dict[str, Any] = {}
    for tensor in schema.inputs:
        if tensor.required or tensor.name in case.given:
            shape = shape_of(tensor, sizes, schema.leading)
            if shape is not None:
                made[tensor.name] = drawn(tensor, shape, dtype_for(tensor, dtype), target, sizes, generator)
    if operation.examples is not None:
        made |= operation.examples(case, dtype, target, generator)
    made |= {**operation.fixed, **case.params}
    if schema.layouts:
        made["layout"] = layout or schema.layouts[0]
        moving = [each.name for each in schema.inputs if each.has_layout and isinstance(made.get(each.name), Tensor)]
        made |= {name: in_layout(made[name], made["layout"], operation) for name in moving}
    if promised:
        for name in schema.bounds:
            for bounded in schema.param(name).made_of:  # of a bound of anything else the examples tell
                made.setdefault(name, schema.tensor(bounded).most(sizes))
        made |= handles_of(operation, made, capturable=capturable)
    return made


def in_layout(tensor: Tensor, layout: str, operation: Operation) -> Tensor:
    """A tensor of the schema's layout as a dense one of another."""
    canonical = operation.schema.canonical
    if canonical is None or layout == canonical:
        return tensor
    return tensor.permute(permutation(canonical, layout, tensor.ndim)).contiguous()


def handles_of(operation: Operation, arguments: Mapping[str, Any], *, capturable: bool = False) -> dict[str, Any]:
    """A handle of each kind for these arguments; none that changes the result, which no caller promises."""
    params = [operation.schema.param(name) for name in operation.schema.handles if name in operation.schema.promises]
    return {each.name: each.make(arguments, capturable) for each in params if each.make is not None}


def shape_of(tensor: TensorSchema, sizes: Mapping[str, int], leading: str = "") -> tuple[int, ...] | None:
    """The shape of a tensor in the schema's layout; None where the sizes do not say."""
    axes = tensor.shape_vars or tensor.broadcast
    if not axes:
        return None
    shape: list[int] = []
    for axis in axes:
        if axis == "...":
            shape += [sizes[leading]] if leading in sizes else []
        elif axis.isdigit():
            shape.append(int(axis))
        elif axis in sizes:
            shape.append(sizes[axis])
        else:
            return None
    return tuple(shape)


def dtype_for(tensor: TensorSchema, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in a call of this dtype: the call's where it may have that, else the first by name."""
    allowed = tensor.dtype_constraint
    if allowed is None or dtype in allowed:
        return dtype
    return min(allowed, key=dtype_name)


def drawn(
    tensor: TensorSchema,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    sizes: Mapping[str, int],
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random values that mean something: unit normal numbers, places that exist, full counts."""
    shape = tuple(shape)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    where = generator.device if generator is not None else device
    if tensor.mutated and tensor.resident:
        made = torch.zeros(shape, dtype=dtype, device=device)
    elif tensor.counts:
        made = torch.full(shape, tensor.most(sizes), dtype=dtype)
    elif tensor.indexes:
        made = _places(tensor, shape, tensor.most(sizes) + 1, where, generator)
    elif dtype is torch.bool:
        made = torch.rand(shape, generator=generator, device=where) < 0.9
    elif dtype.is_floating_point:
        wide = dtype if generator is None and dtype.itemsize > 1 else torch.float32
        made = torch.randn(shape, generator=generator, device=where, dtype=wide)
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        made = torch.randint(max(low, -(2**15)), min(high, 2**15) + 1, shape, generator=generator, device=where)
    return made.to(device, dtype)


def _places(
    tensor: TensorSchema, shape: tuple[int, ...], count: int, where: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Places that exist; where there are too few of them, what needs none has none."""
    asked = math.prod(shape)
    if tensor.holes and (count == 0 or (tensor.distinct and asked > count)):
        places = torch.full((asked,), -1, device=where)
        places[:count] = torch.randperm(count, generator=generator, device=where)
        return places.view(shape)
    if tensor.distinct and len(shape) > 1 and 0 < shape[-1] <= count:  # each row by itself
        rows = [
            torch.randperm(count, generator=generator, device=where)[: shape[-1]] for _ in range(asked // shape[-1])
        ]
        return torch.stack(rows).view(shape) if rows else torch.empty(shape, dtype=torch.int64, device=where)
    if tensor.distinct and asked <= count:
        return torch.randperm(count, generator=generator, device=where)[:asked].view(shape)
    return torch.randint(0, max(count, 1), shape, generator=generator, device=where)


def routed(function: Function, arguments: Mapping[str, Any], default_layout: str | None = None) -> Routed:
    """What a call is routed to. Raises: InvalidCallError for a call that means nothing."""
    return function.route(function.bind((), arguments), default_layout)


def accepted(function: Function, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function has; one that every call brings and that no case names has its example."""
    found = {each.name: arguments[each.name] for each in function.parameters if each.name in arguments}
    for each in function.parameters:
        param = function.param(each.name) if each.default is each.empty and each.name not in found else None
        if param is not None and param.example is not None:
            found[each.name] = param.example
    return found


def is_call_of(operation: Operation, case: Case, dtype: torch.dtype, layout: str | None = None) -> bool:
    """Whether a case is a call of this operation, and not of a sibling or of none."""
    function = function_for(operation)
    try:
        found = routed(function, accepted(function, arguments_of(operation, case, dtype, "meta", layout=layout)))
    except (InvalidCallError, KeyError, TypeError, ValueError):
        return False
    return found.operation.name == operation.name


def facts_of(
    operation: Operation,
    case: Case,
    dtype: torch.dtype,
    device: Device,
    layout: str | None = None,
    *,
    capturable: bool = False,
) -> Facts:
    """The facts of a case on a device, which need not be here; no data is made. Its handles as :func:`arguments_of`."""
    function = function_for(operation)
    made = arguments_of(operation, case, dtype, "meta", layout=layout, promised=capturable, capturable=capturable)
    found = routed(function, accepted(function, made))
    return FactsBuilder(found.operation).of_valid(found.arguments, device=device, layout=found.layout)


def listed(shapes: Any) -> Sequence[Any]:
    """Shapes as a list. Raises: TypeError for what is none, as one number."""
    if not isinstance(shapes, (tuple, list)):
        raise TypeError(f"shapes: wanted a list of shapes, such as [(4, 64)], got {told(shapes)}")
    return shapes


def as_shapes(shape: Sequence[int] | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The shape of one tensor, or of several, as a list of shapes. Raises: ValueError for what is neither."""
    given: Any = shape if isinstance(shape, (tuple, list)) else ("no sequence",)
    found = [*map(tuple, given)] if given and all(isinstance(each, (tuple, list)) for each in given) else [tuple(given)]
    if not all(isinstance(size, int) and size >= 0 for each in found for size in each):
        raise ValueError(f"shapes: wanted a list of shapes, such as [(4, 64)], got {told(shape)} as one of them")
    return found


def case_of_shapes(
    operation: Operation,
    shapes: Sequence[Sequence[int]],
    layout: str | None = None,
    params: Mapping[str, Any] | None = None,
) -> Case | None:
    """The case of a call by the shapes of its first required tensors; None where they do not make one.

    A tensor whose shape is not given is like the last one that was, where it has as many axes and the sizes do not say
    otherwise: keys are like queries, values like keys.
    """
    schema = operation.schema
    if layout not in (None, *schema.layouts):
        return None
    sizes: dict[str, int] = {}
    given = {name: value for name, value in (params or {}).items() if name in schema.chosen or name in schema.scalars}
    for number, tensor in enumerate(schema.required):
        shape = tuple(shapes[number]) if number < len(shapes) else None
        axes = tensor.axes_in(layout, schema.canonical)
        if shape is not None:
            if not _bind(sizes, axes, shape, schema.leading):
                return None
        elif shape_of(tensor, {**_completed(operation, sizes), **sizes}, schema.leading) is None:
            if len(axes) != len(shapes[-1]):
                return None
            for axis, size in zip(axes, shapes[-1], strict=True):
                sizes.setdefault(axis, size)
    sizes = {**_completed(operation, sizes), **sizes}
    every = {axis for case in operation.cases for axis in case.sizes}
    if not every <= sizes.keys():
        return None
    text = ":".join("x".join(map(str, shape)) for shape in shapes)
    case = Case(text, {axis: sizes[axis] for axis in sizes if axis in every}, given, operation.cases[0].given)
    return case if is_call_of(operation, case, next(iter(operation.dtypes), torch.float32), layout) else None


def _completed(operation: Operation, sizes: Mapping[str, int]) -> Mapping[str, int]:
    try:
        return operation.complete(sizes) if operation.complete is not None else {}
    except KeyError:  # too little is known yet
        return {}


def _bind(sizes: dict[str, int], axes: Sequence[str], shape: tuple[int, ...], leading: str) -> bool:
    """Name the sizes of a shape; False where it contradicts what is known."""
    if axes and axes[0] == "...":
        axes = axes[1:]
        if len(shape) < len(axes):
            return False
        rows = math.prod(shape[: len(shape) - len(axes)])
        if leading and sizes.setdefault(leading, rows) != rows:
            return False
        shape = shape[len(shape) - len(axes) :]
    if len(shape) != len(axes):
        return False
    for axis, size in zip(axes, shape, strict=True):
        if (int(axis) if axis.isdigit() else sizes.setdefault(axis, size)) != size:
            return False
    return True


def case_of_sizes(operation: Operation, name: str, sizes: Mapping[str, int], params: Mapping[str, Any]) -> Case | None:
    """The case that the facts of a call describe; None if they do not name every axis."""
    axes = operation.cases[0].sizes
    if not set(axes) <= set(sizes):
        return None
    schema = operation.schema
    given = {
        name: value
        for name in schema.chosen
        if name in params and name not in schema.implied
        if (value := read(params[name])) != schema.neutral.get(name)
    }
    given |= {name: schema.param(name).example for name in schema.scalars if params.get(name) not in (None, "none")}
    return Case(name, {axis: sizes[axis] for axis in axes}, given, operation.cases[0].given)


def read(value: Any) -> Any:
    """A parameter as it was before it was written as JSON: a list is a tuple, a dtype has its name."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def with_demanded(operation: Operation, case: Case, kernel: Kernel, reasons: Iterable[Reason]) -> Case | None:
    """The case with the optional tensors that a kernel accepts and refuses the case for lacking.

    None where it lacks none: the kernel refuses the case for something else, or takes it.
    """
    lacking = {reason.fact for reason in reasons if reason.got in ("none", None)}
    able = [each.name for each in operation.schema.optional if each.name in kernel.accepts]
    names = tuple(name for name in able if name in lacking and name not in case.given)
    return replace(case, given=(*case.given, *names)) if names else None
