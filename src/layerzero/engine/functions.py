"""The public functions of this process: those of the families in ``ops/``, and those that others register."""

from __future__ import annotations

import atexit
import traceback
from collections.abc import Callable
from typing import Any

import torch

from layerzero.core import graph_capture
from layerzero.core.arguments import TensorSchema
from layerzero.core.errors import RegistrationError
from layerzero.core.operation import Case, Function, Operation, Routed
from layerzero.core.system import forking
from layerzero.engine import operators
from layerzero.engine.call import Call
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.reference import as_tuple, fake_call, reference_call
from layerzero.engine.registry import REGISTRY
from layerzero.ops import FUNCTIONS
from layerzero.ops.calls import accepted, arguments_of, routed


class _Calls(dict[str, Call]):
    """The ways of each function, made when they are first wanted.

    27 functions took 20 ms of the first call of a process, of which it needs one (2 CPU cores, 2026-11-22).
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = forking.rlock()

    def __missing__(self, name: str) -> Call:
        with self._lock:
            if name not in self:
                self[name] = Call(FUNCTIONS[name])
            return self[name]


CALLS = _Calls()

graph_capture.KEEPERS.append(lambda: [plan for cache in ENGINE.caches for _, plan in cache.plans()])


def _count_anew() -> None:
    for cache in ENGINE.caches:
        cache.misses = 0


forking.in_child(_count_anew)


def _let_plans_go() -> None:
    """End plans before the libraries that they hold things of, which tell what outlives them as leaked."""
    if any(cache.plans() for cache in ENGINE.caches):
        ENGINE.bump()


atexit.register(_let_plans_go)


def register_function(function: Function) -> Callable[..., Any]:
    """Give operations a public function: what users call, routed, chosen for and explained like every other.

    Register the operations first. Each is tried once on its smallest case, on the CPU. So a schema, a reference and a
    shape function that do not agree are found here, and not in a user's call.

    Returns: the function to call; ``lz.NAME`` and ``torch.ops.layerzero.NAME`` are the same.
    Raises: RegistrationError for a name that is taken or no identifier, an operation that is not registered, a
        signature that no torch operator can have, or an operation whose parts do not agree, with the line at fault.
    """
    if not function.name.isidentifier():
        raise RegistrationError(f"function {function.name!r}: wanted a Python identifier")
    if function.name in FUNCTIONS:
        raise RegistrationError(f"function {function.name!r} is registered already")
    known = REGISTRY.operations()
    for operation in function.operations:
        if known.get(operation.name) is not operation:
            problem = f"wanted operations that are registered, got {operation.name!r}; lz.register_operation adds it"
            raise RegistrationError(f"function {function.name!r}: {problem}")
    FUNCTIONS[function.name] = function
    try:
        for operation in function.operations:
            _try(function, operation)
        CALLS[function.name] = Call(function)
        operators.register_apart(function)
    except BaseException:
        FUNCTIONS.pop(function.name)
        CALLS.pop(function.name, None)
        raise
    return CALLS[function.name].fast


def unregister_function(function: Function) -> None:
    """Take a registered function back, with its operators. Raises: RegistrationError for one that is not registered."""
    if FUNCTIONS.get(function.name) is not function or not operators.is_apart(function):
        raise RegistrationError(f"function {function.name!r}: wanted one that was registered")
    del FUNCTIONS[function.name]
    call = CALLS.pop(function.name, None)
    if call is not None:
        ENGINE.forget(function.name, call.dispatcher.cache)
    operators.unregister(function)


def _try(function: Function, operation: Operation) -> None:
    """Make the smallest call of an operation by its reference and by shapes alone, and compare what they give."""
    if not operation.cases:
        raise RegistrationError(f"operation {operation.name!r}: cases: wanted at least one, got none")
    where = f"operation {operation.name!r}"
    case = min(operation.cases, key=lambda each: sum(each.sizes.values()))
    dtype = next(iter(operation.dtypes), torch.float32)
    try:
        step = "its case makes no call of the function"
        arguments = accepted(function, arguments_of(operation, case, dtype))
        found = routed(function, arguments)
        _check_routed(function, found)
        _check_route(found.operation, operation, case)
        step = "its shape function (fake) raised"
        shapes = as_tuple(fake_call(found))
        step = "its reference raised"
        values = as_tuple(reference_call(found))
    except RegistrationError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{last.filename}:{last.lineno}"
        raise RegistrationError(f"{where}: {step}: {type(error).__name__}: {error} ({at})") from error
    outputs = operation.schema.results(found.arguments)
    if not len(values) == len(shapes) == len(outputs):
        got = f"{len(values)} of the reference and {len(shapes)} of fake"
        raise RegistrationError(f"{where}: wanted {len(outputs)} results as the schema says, got {got}")
    for output, value, shape in zip(outputs, values, shapes, strict=True):
        problem = _difference(output, value, shape)
        if problem:
            raise RegistrationError(f"{where}: result {output.name}: {problem}")


def _check_routed(function: Function, found: object) -> None:
    if not isinstance(found, Routed):
        got = type(found).__name__
        raise RegistrationError(f"function {function.name!r}: route: wanted an lz.Routed, got {got}")


def _check_route(found: Operation, operation: Operation, case: Case) -> None:
    if found is not operation:
        where = f"operation {operation.name!r}"
        raise RegistrationError(f"{where}: the route sends its case {case.name!r} to {found.name!r}")


def _difference(output: TensorSchema, value: Any, shape: Any) -> str:
    for part, each in (("the reference", value), ("fake", shape)):
        if not isinstance(each, torch.Tensor):
            return f"wanted a tensor of {part}, got {type(each).__name__}"
    if value.shape != shape.shape or value.dtype != shape.dtype:
        return f"fake says {shape.dtype} {tuple(shape.shape)}, the reference gives {value.dtype} {tuple(value.shape)}"
    allowed = output.dtype_constraint
    if allowed is not None and value.dtype not in allowed:
        return f"the schema does not allow {value.dtype}"
    return ""
