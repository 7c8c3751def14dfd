"""What every declared operation and function is, as text: schema, cases, derived facts, judges, signature, errors.

Callables count as present or absent, so that moving one between files changes nothing here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import layerzero as lz
from layerzero.core.facts import Facts
from layerzero.core.known_devices import KNOWN_DEVICES
from layerzero.core.operation import Case, Function, Operation
from layerzero.core.schema import OperationSchema
from layerzero.ops import FUNCTIONS, OPERATIONS
from layerzero.ops.calls import arguments_of, facts_of, sizes_of


def lines() -> Iterator[str]:
    """Every declaration, sorted by name."""
    for name in sorted(OPERATIONS):
        yield f"== operation {name}"
        yield from _operation(OPERATIONS[name])
    for name in sorted(FUNCTIONS):
        yield f"== function {name}"
        yield from _function(FUNCTIONS[name])


def _operation(operation: Operation) -> Iterator[str]:
    for field in dataclasses.fields(operation):
        value = getattr(operation, field.name)
        if field.name == "schema":
            yield from _schema(value)
        elif field.name == "cases":
            yield from (f"case {shown(case)}" for case in value)
        elif field.init and not callable(value) and value not in (None, "", ()) and value != {}:
            yield f"{field.name} {shown(value)}"
    for case in operation.cases:
        yield from _called(operation, case)


def _schema(schema: OperationSchema) -> Iterator[str]:
    for field in dataclasses.fields(schema):
        value = getattr(schema, field.name)
        if not field.init or value in (None, "", ()):
            continue
        if isinstance(value, tuple) and dataclasses.is_dataclass(value[0]):
            yield from (f"schema.{field.name} {shown(each)}" for each in value)
        else:
            yield f"schema.{field.name} {shown(value)}"


def _called(operation: Operation, case: Case) -> Iterator[str]:
    """What follows from a case: its derived facts, its work and what the reference needs, on a CPU."""
    if not operation.schema.inputs:
        return
    facts = next(_facts(operation, case), None)
    if facts is None:
        return
    yield f"facts of {case.name} {shown({name: facts[name] for name in operation.derived})}"
    if operation.work is not None:
        yield f"work of {case.name} {shown(operation.work(facts))}"
    if operation.scratch is not None:
        yield f"scratch of {case.name} {operation.scratch(sizes_of(operation, case))}"


def _facts(operation: Operation, case: Case) -> Iterator[Facts]:
    """The facts of a case, in each dtype in which it is a call."""
    for dtype in operation.dtypes:
        with contextlib.suppress(lz.InvalidCallError):
            yield facts_of(operation, case, dtype, KNOWN_DEVICES["CPU"])


def _function(function: Function) -> Iterator[str]:
    yield f"signature {inspect.signature(function.signature)}"
    yield f"docstring {inspect.getdoc(function.signature)!r}"
    for name, schema in sorted(function.torch_schemas.items()):
        yield f"torch {name} {schema}"
    yield f"operations {', '.join(each.name for each in function.operations)}"
    yield f"tensors {function.tensors} mutates {shown(function.mutates)} shares {shown(function.may_share_storage)}"
    for label, message in _errors(function):
        yield f"error {label}: {message!r}"


def _errors(function: Function) -> Iterator[tuple[str, str]]:
    """The text of three mistakes: a number for a tensor, a dtype that nothing takes, an argument that is not there."""
    operation = next((each for each in function.operations if each.cases), None)
    if operation is None:
        return
    arguments = arguments_of(operation, operation.cases[0], torch.float32, "meta")
    arguments = {
        name: value for name, value in arguments.items() if name in inspect.signature(function.signature).parameters
    }
    first = next(name for name, value in arguments.items() if isinstance(value, torch.Tensor))
    tensor = arguments[first]
    mistakes = {
        "number": {**arguments, first: 3},
        "dtype": {**arguments, first: tensor.to(torch.complex64)},
        "unknown": {**arguments, "not_an_argument": 1},
    }
    for label, wrong in mistakes.items():
        try:
            getattr(lz, function.name)(**wrong)
            yield label, "accepted"
        except Exception as error:  # noqa: BLE001  # whatever it is, its text is what counts here
            yield label, f"{type(error).__name__}: {error}"


def shown(value: Any) -> str:
    """A value as text without addresses: callables as ``yes``, mappings and sets in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (
            f"{field.name}={shown(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if field.repr and getattr(value, field.name) != field.default
        )
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{shown(key)}: {shown(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(shown(each) for each in value)) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(shown(each) for each in value) + ")"
    if isinstance(value, type):
        return value.__name__
    if callable(value):
        return "yes"
    return repr(value)
