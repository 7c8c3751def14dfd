"""Questions about a selection: which kernel, why, which others, is this one valid."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from layerzero.core.binding import misfit
from layerzero.core.device import Device
from layerzero.core.errors import InvalidCallError, LayerZeroLayoutWarning
from layerzero.core.facts import CallState, Facts
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Operation, Routed
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine import legality, probe, score
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE, Dispatcher
from layerzero.engine.functions import CALLS
from layerzero.engine.pick import NO_TIMES, pick
from layerzero.engine.plain import PLAIN_CALLS, plain_facts
from layerzero.engine.policy import covers
from layerzero.engine.probe import Machine
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import nearest
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, PLAIN_FUNCTIONS, function_of, plain_function_of


def explain(
    operation: str | Facts,
    *args: Any,
    device: Device | str | None = None,
    libraries: Mapping[str, str] | None = None,
    capturing: bool = False,
    **kwargs: Any,
) -> Report:
    """Tell which kernel a call gets and why: every candidate, its score term by term, every reason. Nothing runs.

    Args:
        operation: a function (``attention``), an operation, or an alias (``attention.causal``); or the facts of a call
            made by :func:`facts`.
        args, kwargs: the function's arguments. Tensors on ``meta`` will do.
        device: ask about another device, by name (``"H100"``) or description.
        libraries: ask about other installed libraries: distribution name to version.
        capturing: ask as if a CUDA graph were being captured.
    Raises: InvalidCallError for a call that means nothing; KeyError for an unknown operation or device.
    """
    machine = Machine(described(device) if isinstance(device, str) else device, libraries)
    policy = current_policy()
    if isinstance(operation, Facts):
        if args or kwargs:
            raise InvalidCallError("explain", ["facts stand for a whole call: wanted no further arguments, got some"])
        asked = operation.on(machine.device or operation.device, capturing=capturing or bool(operation["capturing"]))
        return _explain_facts(asked, machine if device or libraries is not None else probe.this_machine())
    plain = plain_function_of(operation)
    if plain is not None:
        return _explain_plain(plain, operation, args, kwargs, machine if device or libraries is not None else None)
    dispatcher, arguments, wanted = question(operation, args, kwargs)
    call_state = None
    if capturing or device is not None:
        call_state = _state(arguments, policy, dispatcher, capturing, machine.device if device is not None else None)
    with _quiet_layouts():
        report, _ = dispatcher.explain(
            arguments,
            policy,
            machine=machine if device or libraries is not None else None,
            call_state=call_state,
        )
    check_operation(wanted, report)
    return report


def _explain_plain(
    function: PlainFunction, wanted: str, args: tuple[Any, ...], kwargs: dict[str, Any], machine: Machine | None
) -> Report:
    """The same for a call without tensors."""
    signature = inspect.signature(function.signature)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise misfit(function.name, error, kwargs, signature.parameters) from None
    bound.apply_defaults()
    REGISTRY.ready()
    dispatcher, _ = PLAIN_CALLS[function.name]
    found = plain_facts(function.route(dict(bound.arguments)), None if machine is None else machine.device)
    report, _ = dispatcher.explain(found, current_policy(), machine=machine)
    if wanted not in PLAIN_FUNCTIONS:
        check_operation(wanted, report)
    return report


def described(name: str) -> Device:
    """A device by name: ``cpu``, ``cuda``, ``cuda:1`` are this machine's, ``H100`` and the like need not be here."""
    return Device.detect(name) if name.partition(":")[0] in ("cpu", "cuda") else Device.named(name)


def which(operation: str | Facts, *args: Any, **kwargs: Any) -> dict[str, object]:
    """Tell which kernel a call gets: ``{"kernel_id", "score", "operation"}``. Takes what explain takes."""
    report = explain(operation, *args, **kwargs)
    return {
        "kernel_id": report.kernel_id,
        "score": round(report.chosen.score, 3) if report.chosen else None,
        "operation": report.operation,
    }


def validate(kernel_id: str, *args: Any, **kwargs: Any) -> tuple[bool, tuple[Reason, ...]]:
    """Tell whether one kernel may run a call: ``(valid, reasons)``. Takes what explain takes.

    A call that means nothing gives its code as a reason where the catalogue has one, else InvalidCallError is raised.
    Raises: KeyError for an unknown kernel.
    """
    kernel = REGISTRY.kernel(kernel_id)
    function = _function_of(kernel)
    try:
        report = explain(function, *args, **kwargs)
    except InvalidCallError as error:
        if error.code is None:
            raise
        return False, (Reason(error.code, function, "a call that means something", str(error)),)
    try:
        reasons = report.reasons(kernel.id)
    except KeyError:
        reasons = (_wrong_operation(kernel, report),)
    return not reasons, reasons


def _wrong_operation(kernel: Kernel, report: Report) -> Reason:
    operation = report.facts.operation
    if operation.unlike_sibling is not None and operation.sibling in kernel.operations:
        return operation.unlike_sibling(report.facts)
    return Reason(ReasonCode.CONSTRAINT_FAILED, "operation", " or ".join(kernel.operations), operation.name)


def list_kernels(operation: str = "*") -> list[Kernel]:
    """List the kernels of an operation, function, alias or glob, by priority.

    Raises: KeyError naming the nearest operation.
    """
    return REGISTRY.kernels(operation)


def list_operations() -> list[Operation]:
    """List every operation."""
    return sorted(REGISTRY.operations().values(), key=lambda operation: operation.name)


def facts(operation: str, *args: Any, device: Device | str | None = None, **kwargs: Any) -> Facts:
    """Name everything about a call; explain and which accept the result in place of tensors."""
    return explain(operation, *args, device=device, **kwargs).facts


def _explain_facts(call: Facts, machine: Machine) -> Report:
    policy = current_policy()
    kernels = REGISTRY.candidates(call.operation.name)
    judged = legality.judge(kernels, call, policy, machine, ENGINE.health, ENGINE.ledger)
    frozen = ENGINE.frozen
    ranked = score.rank(judged, call, policy, ENGINE.ledger if frozen is None else NO_TIMES)
    report = pick(ranked, Routed(call.operation, {}, call.layout), call, policy, REGISTRY.lock_for(policy, call))
    return report if frozen is None else frozen.held(report, policy)


def _state(
    arguments: Mapping[str, Any], policy: Any, dispatcher: Dispatcher, capturing: bool, device: Device | None
) -> CallState:
    from layerzero.engine.state import call_state

    state = call_state(dispatcher.tensors(arguments), policy, dispatcher.function.state, device)
    return msgspec.structs.replace(state, capturing=capturing)


def question(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Dispatcher, dict[str, Any], str]:
    """The dispatcher, bound arguments and wanted operation of a question."""
    operation = name
    if name in OPERATION_ALIASES:
        operations, implied = OPERATION_ALIASES[name]
        operation, kwargs = operations[0], {**implied, **kwargs}
    if name not in FUNCTIONS and function_of(operation) is None:
        REGISTRY.ready()  # a plugin may bring it
    function = FUNCTIONS.get(name) or function_of(operation)
    if function is None:
        known = [*FUNCTIONS, *PLAIN_FUNCTIONS, *REGISTRY.operations(), *OPERATION_ALIASES]
        raise KeyError(f"unknown operation {name!r}{nearest(name, known)}")
    call = CALLS[function.name]
    return call.dispatcher, call.function.bind(args, kwargs), name


def check_operation(wanted: str, report: Report) -> None:
    """Raise InvalidCallError where a call is not one of the operation that its question named."""
    if wanted not in FUNCTIONS and not covers(wanted, report.facts):
        problem = f"these arguments are a call of {report.operation}, wanted {wanted}"
        raise InvalidCallError(wanted, [problem])


def _function_of(kernel: Kernel) -> str:
    for operation in kernel.operations:
        function = function_of(operation) or plain_function_of(operation)
        if function is not None:
            return function.name
    raise KeyError(f"{kernel.id} belongs to no public function; its operations: {', '.join(kernel.operations)}")


@contextmanager
def _quiet_layouts() -> Iterator[None]:
    """A question is no call: the report's note says that the layout was assumed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LayerZeroLayoutWarning)
        yield
