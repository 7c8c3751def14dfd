"""Whether what a kernel declares fits the operations that it names; checked when it is registered."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch

from layerzero.core.dtypes import dtype_named
from layerzero.core.errors import RegistrationError, UnknownOperationError
from layerzero.core.facts import told_bytes
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Aligned, OneOf
from layerzero.core.operation import Operation
from layerzero.core.schema import OperationSchema
from layerzero.engine.settings import nearest


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
    for limit in (each for each in kernel.limits if isinstance(each, Aligned) and each.bytes > most):
        for name in counted.intersection(limit.tensors):
            wanted = f"wanted at most {most} bytes of {name}, which may be int64, got {limit.bytes}"
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
