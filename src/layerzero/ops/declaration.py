"""Declare an operation and its function once: what the reference and the schema imply is written nowhere else.

The reference is the public function: its signature and its docstring are what users see. For example, in a family::

    def scale_rows(input: Tensor, factor: float) -> Tensor:
        \"\"\"Multiply every number by a factor. Shapes: input (*, D) → (*, D). Dtype: ...\"\"\"
        return (input.to(wide(input.dtype)) * factor).to(input.dtype)

    SCALE_ROWS = operation(
        "example.scale_rows", "Every number times a factor", scale_rows,
        inputs=("input: ... features",), outputs=("output: ... features",),
        axes=(Axis("rows", scales=True, live=True, apart=True, leading=True), Axis("features", scales=True)),
        params=(Param("factor", float, role=Role.PASSED, example=0.5),),
        cases=cases("rows features", {"small": (33, 96), "decode": (1, 4096)}, {"factor": 0.5}),
        tolerance=TOLERANCE, tolerance_reason="twice the rounding of the output",
    )
    OPERATIONS, FUNCTIONS = (SCALE_ROWS,), (function("scale_rows", SCALE_ROWS),)

What follows unless it is said: the facts of the leading axes and ``input_ndim``, from ``axes``; shapes for compiled
code, from the reference on the meta device; torch's ``expression``, which is the reference; ``work``, every tensor
once; random calls, from the cases; the check that a written tensor has memory of its own. Other fields of
``Operation`` and ``Function`` are given by name. ``Kernel.of_expression`` makes torch's kernel of it.

Several operations may share one reference: where ``up`` is None, ``silu_mul(input, up=None)`` is the reference of the
joined operation, whose schema has no ``up``. A reference with arguments that its function lacks, or a route that is no
list of checks (layouts, page tables), is given to ``lz.Function`` itself; ``operation`` works with either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from layerzero.core.arguments import Axis, Param, TensorSchema, out_of_range, told
from layerzero.core.dtypes import FLOATING, dtype_name
from layerzero.core.errors import refuse
from layerzero.core.operation import Case, Function, Operation, Routed, Tolerance, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.calls import dtype_for

NDIM = Axis("input_ndim", works=False)
"""The number of axes of the tensor that has leading ones: dense rows are the same rows in any number of axes."""

Problems = Callable[[dict[str, Any]], list[str]]
"""What is wrong with a call's arguments, each ``name: wanted this, got that``."""


ROUNDED_TWICE = {
    torch.float64: Tolerance(1e-5, 1e-5),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-2, 1e-2),
}
"""Twice the rounding of a result that is computed in float32 or wider, by its dtype."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that references compute in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def tensor(text: str, dtypes: frozenset[torch.dtype] | None = FLOATING, **more: Any) -> TensorSchema:
    """``"input: ... heads head_dim"`` as a schema; ``more`` are the other fields of ``TensorSchema``."""
    name, _, axes = text.partition(":")
    return TensorSchema(name, tuple(axes.split()), dtypes, **more)


def cases(
    columns: str,
    rows: Mapping[str, tuple[object, ...]],
    params: Mapping[str, object] | None = None,
    given: tuple[str, ...] = (),
) -> tuple[Case, ...]:
    """Cases of a table: the columns name sizes and, behind a bar, parameters: ``"rows features | scale"``.

    Args:
        columns: names of the numbers of each row.
        rows: by the case's name.
        params: parameters that all of them have.
        given: optional tensors that all of them bring.
    """
    sizes, _, values = columns.partition("|")
    axes, names = sizes.split(), values.split()
    found = []
    for label, row in rows.items():
        named: dict[str, Any] = dict(zip((*axes, *names), row, strict=True))
        found.append(
            Case(label, {each: named[each] for each in axes}, {**(params or {}), **{n: named[n] for n in names}}, given)
        )
    return tuple(found)


def moved(axes: str, tensors: int, flops: int = 0) -> Callable[[Mapping[str, Any]], Work]:
    """So many tensors of this size read or written, so many operations an element; smaller tensors do not count."""
    names = axes.split()

    def work(facts: Mapping[str, Any]) -> Work:
        elements = math.prod(facts[name] for name in names)
        return Work(float(flops * elements), float(tensors * elements * facts["dtype"].itemsize))

    return work


def same_shape(name: str, other: str) -> Problems:
    """The check that a tensor, where there is one, has the shape of another."""

    def problems(arguments: dict[str, Any]) -> list[str]:
        if arguments.get(name) is None:
            return []
        wanted, got = tuple(arguments[other].shape), tuple(arguments[name].shape)
        return [] if got == wanted else [f"{name}: wanted shape {wanted} like {other}, got {got}"]

    return problems


def operation(
    name: str,
    summary: str,
    reference: Callable[..., Any],
    *,
    inputs: tuple[str | TensorSchema, ...],
    outputs: tuple[str | TensorSchema, ...] = (),
    axes: tuple[Axis, ...],
    cases: tuple[Case, ...],
    params: tuple[Param, ...] = (),
    layouts: tuple[str, ...] = (),
    dtype_of: str = "",
    derive: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, object]] | None = None,
    derived_from: Mapping[str, tuple[str, ...]] | None = None,
    expression: Callable[..., Any] | None = None,
    **more: Any,
) -> Operation:
    """Declare an operation.

    Args:
        name, summary, reference, cases: as of ``Operation``. The reference takes the function's arguments.
        inputs, outputs: as ``tensor`` reads them, or schemas.
        axes, params, layouts, dtype_of: as of ``OperationSchema``.
        derive: facts besides those of the leading axes, from the arguments and the sizes.
        derived_from: by their names, the axes that they follow from; it names those of ``derive``, and leading ones
            where they come in another order or follow from other axes.
        expression: torch's own way to the result where it is not the reference; ``stock=None`` where torch has none.
        more: the other fields of ``Operation``; ``work=None`` where it is unknown.
    """
    schema = OperationSchema(name, _schemas(inputs), _schemas(outputs), params, axes, layouts, dtype_of)
    led, facts = _of_leading(schema, derive)
    follows = {each: axes for each, axes in led.items() if each not in (derived_from or {})} | dict(derived_from or {})
    more.setdefault("work", _tensors_once(schema))
    if expression is not None or "stock" not in more:
        more["expression"] = expression or reference
    return Operation(
        schema=schema,
        summary=summary,
        reference=reference,
        cases=cases,
        derive=facts,
        derived=tuple(follows),
        derived_from=follows,
        **more,
    )


def _schemas(written: tuple[str | TensorSchema, ...]) -> tuple[TensorSchema, ...]:
    return tuple(tensor(each) if isinstance(each, str) else each for each in written)


def _of_leading(
    schema: OperationSchema, derive: Callable[..., Mapping[str, object]] | None
) -> tuple[dict[str, tuple[str, ...]], Callable[..., Mapping[str, object]] | None]:
    """The facts of the leading axes, with the axes that they follow from, and what derives them and all others."""
    leading, counted = schema.leading, NDIM.name in {each.name for each in schema.axes}
    first = next((each for each in schema.inputs if each.shape_vars[:1] == ("...",)), None)
    if first is None or not (leading or counted):
        return {}, derive
    lead, inner = first.name, len(first.shape_vars) - 1

    def facts(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, object]:
        shape = arguments[lead].shape
        found: dict[str, object] = {}
        if leading:
            found[leading] = math.prod(shape[: len(shape) - inner])
        if counted:
            found[NDIM.name] = len(shape)
        return found if derive is None else {**found, **derive(arguments, values)}

    follows: dict[str, tuple[str, ...]] = {leading: ("...",)} if leading else {}
    return follows | ({NDIM.name: ()} if counted else {}), facts


def _tensors_once(schema: OperationSchema) -> Callable[[Mapping[str, Any]], Work]:
    """Every tensor of a call once, those that are written into as well; the arithmetic is free compared with that."""

    def size(each: TensorSchema, facts: Any) -> int:
        named = facts.get(each.dtype_from)
        dtype = named if isinstance(named, torch.dtype) else dtype_for(each, facts["dtype"])
        axes = (schema.leading if axis == "..." else axis for axis in each.shape_vars or each.broadcast)
        return math.prod(int(axis) if axis.isdigit() else facts[axis] for axis in axes) * dtype.itemsize

    def work(facts: Any) -> Work:
        brought = [each for each in schema.inputs if each.required or each.name in facts.tensors]
        return Work(0.0, float(sum(size(each, facts) for each in (*brought, *schema.results(facts)))))

    return work


def function(
    name: str,
    *operations: Operation,
    varies: tuple[str, ...] = ("...",),
    choose: Callable[[dict[str, Any]], Operation] | None = None,
    values: Problems | None = None,
    fits: Problems | None = None,
    canonical: Callable[[dict[str, Any]], None] | None = None,
    **more: Any,
) -> Function:
    """Declare the public function of operations: the signature and the docstring are those of the first reference.

    A call is checked by the schema, then by ``values``, and only where both find nothing by ``fits``.

    Args:
        name: as users call it.
        operations: all that it may lead to.
        varies: as of ``Routed``.
        choose: the operation of a call, where there are several. Arguments that it does not have must be None.
        values: what is wrong with single arguments; what the schema refuses may be among them.
        fits: what is wrong with arguments that are right by themselves: shapes that differ.
        canonical: writes the arguments of equal calls the same way, such as a default that is spelled out.
        more: the other fields of ``Function``, ``signature`` among them where no reference has the public one.
    """

    def route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
        check_dense(name, arguments)
        operation = operations[0] if choose is None else choose(arguments)
        schema = operation.schema
        if choose is not None:
            arguments = {each: value for each, value in arguments.items() if value is not None or each in schema.known}
        problems = schema.validate(**arguments)
        if values is not None:
            problems += values(arguments)
        if not problems:
            problems = fits(arguments) if fits is not None else []
            if schema.mutated:
                read = tuple(each.name for each in schema.inputs if not each.mutated)
                problems += write_problems(arguments, schema.mutated, read)
        refuse(name, problems)
        if canonical is not None:
            canonical(arguments)
        return Routed(operation, arguments, varies=varies)

    return Function(
        name=name, signature=more.pop("signature", operations[0].reference), route=route, operations=operations, **more
    )


def check_dense(function: str, arguments: Mapping[str, object], instead: str = "") -> None:
    """Raise InvalidCallError for what no route can look at.

    Nested and sparse tensors have no strides, and some not even a shape; integers that no float holds make any
    comparison of numbers raise. ``instead`` says what to call with nested ones.
    """
    problems: list[str] = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided):
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            dense = "unbind() gives dense ones" if value.is_nested else "to_dense() gives one"
            hint = instead if instead and value.is_nested and not problems else dense
            problems.append(f"{name}: wanted a dense tensor, got a {kind} one; {hint}")
        elif type(value) is int and out_of_range(value, floating=True):
            problems.append(f"{name}: wanted a number that a float can hold, got {told(value)}")
    if problems:
        refuse(function, problems)


def shape_problems(arguments: Mapping[str, Any], names: tuple[str, ...], ndim: int = -1, wanted: str = "") -> list[str]:
    """Tensors that are none, or have another number of axes; ``wanted`` says in words what these are."""
    problems = []
    for name in names:
        tensor = arguments[name]
        if not isinstance(tensor, torch.Tensor):
            problems.append(f"{name}: wanted a tensor, got {type(tensor).__name__}")
        elif ndim not in (-1, tensor.ndim):
            shape = wanted or f"a {ndim}D tensor"
            problems.append(f"{name}: wanted {shape}, got {tensor.ndim}D {tuple(tensor.shape)}")
    return problems


def number_problems(name: str, tensor: object, ndim: int, shape: str) -> list[str]:
    """What is wrong with int32 numbers as a tensor; ``shape`` says in words what was wanted."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.int32 and tensor.ndim == ndim:
        return []
    got = type(tensor).__name__
    if isinstance(tensor, torch.Tensor):
        got = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
    return [f"{name}: wanted an int32 tensor {shape}, got {got}"]


def eps_problems(arguments: Mapping[str, Any]) -> list[str]:
    """What is wrong with the number that a norm adds under its root; its type is the schema's business."""
    eps = arguments["eps"]
    if isinstance(eps, (int, float)) and not (math.isfinite(eps) and eps >= 0):
        return [f"eps: wanted a finite number of at least 0, got {eps}"]
    return []


def out_dtype_problems(arguments: Mapping[str, Any]) -> list[str]:
    """What is wrong with the dtype of a result that is computed in it; its type is the schema's business."""
    wanted = arguments.get("out_dtype")
    if not isinstance(wanted, torch.dtype) or wanted in FLOATING:
        return []
    return [f"out_dtype: wanted a floating dtype of at least 16 bits, got {dtype_name(wanted)}"]


def given_twice(arguments: Mapping[str, Any], *names: str) -> list[str]:
    """Numbers that are given for all rows, and one for each row as well."""
    return [
        f"{name}: wanted a number or a tensor with one for each row, got both"
        for name in names
        if arguments.get(name) is not None and arguments.get(f"{name}_by_row") is not None
    ]


def overlaps(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors may touch the same memory: they lie in one storage and their ranges meet."""
    if torch.compiler.is_compiling():  # storages are not there yet
        return False
    if left.numel() == 0 or right.numel() == 0:
        return False
    try:
        if left.untyped_storage()._cdata != right.untyped_storage()._cdata:
            return False
    except NotImplementedError:  # a transform's tensors hide their memory; torch itself refuses what it cannot write
        return False
    one, other = reach(left), reach(right)
    return one[0] <= other[1] and other[0] <= one[1]


def reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The places of a tensor's first and last element in its storage."""
    first = int(tensor.storage_offset())
    return first, first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def write_problems(arguments: Mapping[str, Any], written: tuple[str, ...], read: tuple[str, ...]) -> list[str]:
    """What forbids writing into these tensors."""
    problems = []
    for name in written:
        tensor = arguments[name]
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            problems.append(f"{name}: wanted a tensor that may be updated in place, got a leaf that requires gradients")
        expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if expanded and tensor.numel():
            problems.append(f"{name}: wanted memory of its own, got an expanded view with strides {tensor.stride()}")
        compiling = torch.compiler.is_compiling()  # Dynamo cannot ask what follows, and compiles outside that mode
        if not compiling and tensor.is_inference() and not torch.is_inference_mode_enabled():
            problems.append(f"{name}: wanted a tensor that may be updated in place, got one made in inference mode")
        shared = [
            each for each in read if isinstance(arguments[each], torch.Tensor) and overlaps(tensor, arguments[each])
        ]
        problems += [f"{name}: wanted memory of its own, got memory that it shares with {each}" for each in shared]
    return problems
