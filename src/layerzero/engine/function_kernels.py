"""Kernels that are made of Python functions: an operation's own reference, and what a decorator registers.

A declaration is checked against the operations that it names when it is registered.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from layerzero.core import limits as limit
from layerzero.core.arguments import signature_of
from layerzero.core.device import PLATFORMS
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.errors import RegistrationError, UnknownOperationError
from layerzero.core.facts import Facts, told_bytes
from layerzero.core.kernel import REFERENCE_BACKEND, Backend, Kernel
from layerzero.core.limit_kinds import Aligned, Limit, OneOf
from layerzero.core.operation import Operation
from layerzero.core.schema import OperationSchema
from layerzero.engine.settings import nearest
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES


def check(kernel: Kernel, operations: Mapping[str, Operation]) -> None:
    """Raise RegistrationError if the kernel names an operation, argument or fact that does not exist."""
    for name in kernel.operations:
        if name not in operations:
            raise UnknownOperationError(f"{kernel.id}: unknown operation {name!r}{nearest(name, operations)}")
    accepted = {argument for name in kernel.operations for argument in operations[name].schema.arguments}
    unknown = set(kernel.accepts) - accepted
    if unknown:
        raise RegistrationError(
            f"{kernel.id}: accepts {sorted(unknown)}, which {', '.join(kernel.operations)} does not have"
        )
    _check_schemas(kernel, operations)
    for name in kernel.implies:
        if not any(isinstance(each, OneOf) and each.fact == name and len(each.values) == 1 for each in kernel.limits):
            raise RegistrationError(f"{kernel.id}: implies {name!r} without a limit that pins it to one value")
    known = {fact for name in kernel.operations for fact in operations[name].facts}
    for fact in {fact for each in kernel.limits for fact in each.facts_named()} - known:
        # a tensor that another operation has is passed over: limits may be shared
        if not any(each.name == fact for operation in operations.values() for each in operation.schema.inputs):
            raise RegistrationError(f"{kernel.id}: its operations have no fact {fact!r}{nearest(fact, known)}")
    _check_alignment(kernel, operations)


def _check_alignment(kernel: Kernel, operations: Mapping[str, Operation]) -> None:
    """Raise RegistrationError where a limit demands an alignment of int64 rows that facts do not hold."""
    tensors = [each for name in kernel.operations for each in operations[name].schema.inputs]
    counted = {each.name for each in tensors if torch.int64 in (each.dtype_constraint or ())}
    most = told_bytes(torch.int64)
    for aligned in (each for each in kernel.limits if isinstance(each, Aligned) and each.bytes > most):
        for name in counted.intersection(aligned.tensors):
            wanted = f"wanted at most {most} bytes of {name}, which may be int64, got {aligned.bytes}"
            raise RegistrationError(f"{kernel.id}: aligned: {wanted}")


def _check_folds(kernel: Kernel, operation: Operation) -> None:
    """Raise RegistrationError if what a kernel lets be folded is nothing that the operation can fold."""
    if not kernel.folds:
        return
    absorbing = [each for each in operation.adapters.values() if each.absorbs]
    if not absorbing:
        raise RegistrationError(f"{kernel.id}: folds {sorted(kernel.folds)}, but {operation.name} can fold nothing")
    able = list(dict.fromkeys(name for each in absorbing for name in each.absorbed))
    foreign = sorted(set(kernel.folds).difference(able))
    if foreign:
        raise RegistrationError(f"{kernel.id}: folds {foreign}; only {', '.join(able)} can be folded")
    for adapter in absorbing:
        if adapter.gives and adapter.gives not in kernel.accepts:
            raise RegistrationError(f"{kernel.id}: folds into {adapter.gives} without accepting it")


def _check_schemas(kernel: Kernel, operations: Mapping[str, Operation]) -> None:
    """Raise RegistrationError if what a kernel declares means nothing for one of its operations."""
    for name in kernel.operations:
        operation = operations[name]
        schema = operation.schema
        if kernel.layout is not None and kernel.layout not in operation.layouts:
            known = " or ".join(operation.layouts) or "none: its axes have no layout"
            raise RegistrationError(f"{kernel.id}: layout: {name} wants {known}, got {kernel.layout!r}")
        taken = {each.name for each in schema.required} | (set(kernel.accepts) - set(kernel.renames))
        for argument, renamed in kernel.renames.items():
            if renamed in taken and renamed in schema.arguments:
                raise RegistrationError(
                    f"{kernel.id}: renames {argument!r} to {renamed!r}, which is another argument of {name}"
                )
        _check_folds(kernel, operation)
    if len(set(kernel.renames.values())) != len(kernel.renames):
        raise RegistrationError(f"{kernel.id}: renames two arguments to one name: {dict(kernel.renames)}")
    for name in kernel.tolerance:
        if not any(dtype_named(name) in operations[each].dtypes for each in kernel.operations):
            raise RegistrationError(f"{kernel.id}: tolerance for {name}, a dtype that its operations do not have")


def check_shared(
    kernel_id: str, schema: OperationSchema, first: OperationSchema, optional: Sequence[inspect.Parameter]
) -> None:
    """Raise RegistrationError where a function that serves one operation cannot be called for another."""
    tensors, wanted = ([each.name for each in one.required] for one in (schema, first))
    if tensors != wanted:
        raise RegistrationError(
            f"{kernel_id}: {schema.operation} takes {', '.join(tensors)} and {first.operation} {', '.join(wanted)}: "
            "wanted a function for each of them, got one"
        )
    for parameter in optional:
        if parameter.name not in schema.arguments and parameter.default is inspect.Parameter.empty:
            raise RegistrationError(
                f"{kernel_id}: wanted a default for {parameter.name}, which {schema.operation} does not have, got none"
            )


USER_BACKEND = Backend(name="user", summary="Registered by @lz.register_kernel", origin="decorator")


def reference_kernel(operation: Operation) -> Kernel:
    """Make a kernel of an operation's reference: it takes everything, and has priority 0."""
    schema = operation.schema
    idle = schema.promises.difference(schema.bounds)  # handles that it has no use for
    taken = [name for name in (*schema.chosen, *schema.passed) if name not in idle]
    return Kernel(
        id=f"reference.{operation.name}",
        operations=(operation.name,),
        backend=REFERENCE_BACKEND,
        load=lambda _facts: operation.reference,
        layout=operation.layouts[0] if operation.layouts else None,
        accepts=(*(tensor.name for tensor in schema.optional), *taken),
        grad=True,
        deterministic=True,
        graph_safe=True,
        handles_empty=True,
        handles_negated=True,
        device_guard=True,
        workspace_bytes=None if operation.scratch is None else functools.partial(_reference_bytes, operation.scratch),
        priority=0,
    )


_AT_ONCE = 3
"""Of what a reference makes so many are in memory at once: scores, what hides some of them, and their softmax. One over
2048 x 2048 tokens of 8 heads took 441 MiB more, 13 bytes a score (AMD EPYC, torch 2.13, 2026-11-24)."""


def _reference_bytes(scratch: Callable[[Mapping[str, int]], int], facts: Facts) -> int:
    """What a reference needs besides its results, in float32 or wider."""
    dtype = facts["dtype"]
    wide = torch.promote_types(dtype, torch.float32) if isinstance(dtype, torch.dtype) else torch.float32
    return _AT_ONCE * wide.itemsize * scratch(facts.sizes())


def kernel_of_function(
    function: Callable[..., Any],
    *,
    operation: str,
    kernel_id: str,
    platform: str | Sequence[str] = "cpu",
    min_sm: int | tuple[int, int] | None = None,
    max_sm: int | tuple[int, int] | None = None,
    supported_dtypes: Iterable[torch.dtype | str] | None = None,
    max_head_dim: int | None = None,
    limits: Sequence[Limit] = (),
    known: dict[str, Operation],
    **declared: Any,
) -> Kernel:
    """Turn a decorated function into a kernel: what it takes by name is what it is offered.

    The first parameters are the operation's required tensors, under any name. Each further parameter is named like the
    operation's argument. Raises RegistrationError for anything else.
    """
    operations, implied = _operations_of(operation, known)
    _check_declared(kernel_id, declared, known)
    schema = known[operations[0]].schema
    arguments = list(dict.fromkeys(name for each in operations for name in known[each].schema.arguments))
    parameters = list(signature_of(function).parameters.values())
    required, optional = parameters[: len(schema.required)], parameters[len(schema.required) :]
    if len(required) < len(schema.required):
        wanted = ", ".join(tensor.name for tensor in schema.required)
        raise RegistrationError(f"{kernel_id}: wanted a function that takes {wanted}, got {signature_of(function)}")
    accepts = tuple(parameter.name for parameter in optional)
    unknown = [name for name in accepts if name not in arguments]
    if unknown:
        raise RegistrationError(
            f"{kernel_id}: {', '.join(unknown)} is no argument of {operation}; it has {', '.join(arguments)}"
        )
    for name in operations[1:]:  # those of one function take the same tensors, and not always the same parameters
        check_shared(kernel_id, known[name].schema, schema, optional)
    platforms = (platform,) if isinstance(platform, str) else tuple(platform)
    for name in platforms:
        if name not in PLATFORMS:
            problem = f"platform: wanted {', '.join(PLATFORMS)}, got {name!r}{nearest(str(name), PLATFORMS)}"
            raise RegistrationError(f"{kernel_id}: {problem}")
    rules: list[Limit] = [limit.platform(*platforms)]
    if min_sm is not None or max_sm is not None:
        rules.append(limit.arch(_sm(min_sm), _sm(max_sm)))
    if supported_dtypes is not None:
        rules.append(limit.dtype(*(dtype_name(dtype_named(each)) for each in supported_dtypes)))
    if max_head_dim is not None:
        rules.append(limit.dim("head_dim", max=max_head_dim))
    if known[operations[0]].layouts:
        declared.setdefault("layout", known[operations[0]].layouts[0])
    rules += [limit.one_of(fact, value) for fact, value in implied.items()]

    def load(facts: Facts) -> Callable[..., Any]:
        return function

    load.__module__ = function.__module__  # where a child process finds it
    return Kernel(
        id=kernel_id,
        operations=operations,
        backend=USER_BACKEND,
        load=load,
        accepts=accepts,
        implies=tuple(fact for fact in implied if fact not in accepts),
        limits=(*rules, *limits),
        **declared,
    )


def _check_declared(kernel_id: str, declared: dict[str, Any], known: dict[str, Operation]) -> None:
    derived = {"id", "operations", "backend", "load", "accepts", "implies", "revision"}
    own = inspect.signature(kernel_of_function).parameters.keys() - {"function", "operation", "kernel_id", "known"}
    fields = ({each.name for each in dataclasses.fields(Kernel)} | own - {"declared"}) - derived
    for name in declared:
        if name in ("supports_gqa", "supports_mqa"):
            grouped = ", ".join(sorted(each.name for each in known.values() if each.sibling))
            raise RegistrationError(f"{kernel_id}: {name} does not exist; register for {grouped} instead")
        if name not in fields:
            raise RegistrationError(f"{kernel_id}: a kernel has no {name!r}{nearest(name, fields)}")


def _operations_of(name: str, known: dict[str, Operation]) -> tuple[tuple[str, ...], dict[str, object]]:
    if name in OPERATION_ALIASES:
        # The flat names meant equal head counts; a kernel that groups heads says so by naming a gqa operation.
        operations, implied = OPERATION_ALIASES[name]
        return operations[:1], implied
    if name in FUNCTIONS:
        return tuple(each.name for each in FUNCTIONS[name].operations), {}
    if name not in known:
        near = nearest(name, [*known, *OPERATION_ALIASES, *FUNCTIONS])
        raise UnknownOperationError(f"unknown operation {name!r}{near}")
    return (name,), {}


def _sm(version: int | tuple[int, int] | None) -> tuple[int, int] | None:
    return divmod(version, 10) if isinstance(version, int) else version
