"""Questions about a selection: which kernel, why, which others, is this one valid; and what a question is about."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from layerzero.core.arguments import told
from layerzero.core.device import Device
from layerzero.core.errors import DropIn, InvalidCallError, Made, UnknownOperationError, bound
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation, Routed
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine import headroom, legality, probe
from layerzero.engine.config import CONFIGURATION, current_policy
from layerzero.engine.dispatch import ENGINE, Dispatcher
from layerzero.engine.functions import CALLS
from layerzero.engine.isolation import APART
from layerzero.engine.plain import PLAIN_CALLS, plain_facts
from layerzero.engine.policy import Policy, covers
from layerzero.engine.probe import Machine, check_requirement
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import nearest
from layerzero.engine.transforms import call_state
from layerzero.ops import (
    DROP_INS,
    FUNCTIONS,
    OPERATION_ALIASES,
    PLAIN_FUNCTIONS,
    current_name,
    function_of,
    plain_function_of,
)
from layerzero.ops.calls import facts_of, with_demanded


def explain(
    operation: Named | Facts,
    *args: Any,
    device: Device | str | None = None,
    libraries: Mapping[str, str] | None = None,
    capturing: bool = False,
    **kwargs: Any,
) -> Report:
    """Tell which kernel a call gets and why: every candidate, its score term by term, every reason. Nothing runs.

    Args:
        operation: a function (``lz.attention``) or its name, an operation or its name, or an alias
            (``attention.causal``). Or the facts of a call made by :func:`facts`. ``lz.scaled_dot_product_attention``
            means the call of ``lz.attention`` that it makes.
        args, kwargs: the function's arguments. Tensors on ``meta`` will do.
        device: ask about another device, by name (``"H100"``) or description.
        libraries: ask about other installed libraries: distribution name to version, in any spelling of the name.
        capturing: ask as if a CUDA graph were being captured.
    Raises: InvalidCallError for a call that means nothing, or one that ``lz.scaled_dot_product_attention`` leaves to
        torch's own function, with the reason; UnknownOperationError for an unknown operation; KeyError for an unknown
        device; ValueError for a library that no kernel needs; TypeError for what names no function.
    """
    if isinstance(device, str):
        device = described(device)
    machine = None if device is None else probe.with_device(device)
    machine = machine if libraries is None else Machine(device, named_libraries(libraries))
    if isinstance(operation, Facts):
        if args or kwargs:
            raise InvalidCallError("explain", ["facts stand for a whole call: wanted no further arguments, got some"])
        asked = operation.on(device or operation.device, capturing=capturing or bool(operation["capturing"]))
        return explain_facts(asked, machine or probe.this_machine(), current_policy())
    name = name_of(operation, "explain", FACTS_TOO)
    plain = plain_function_of(name)
    if plain is not None:
        return _explain_plain(plain, name, args, kwargs, machine)
    standing = DROP_INS.get(name)
    if standing is None:
        return _explain_call(name, args, kwargs, machine, capturing=capturing)
    call, notes = call_made(standing, args, kwargs, device)
    try:
        report = _explain_call(standing.function, (), call, machine, capturing=capturing)
    except InvalidCallError as error:
        raise refused(standing, error) from None
    return msgspec.structs.replace(report, notes=(*report.notes, *notes))


FACTS_TOO = ", or facts of lz.facts"
"""What else explain takes."""


def _explain_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], machine: Machine | None, *, capturing: bool
) -> Report:
    """The same for a call with tensors; ``machine`` is another one than this, if it is about another."""
    policy, device = current_policy(), None if machine is None else machine.device
    dispatcher, arguments = question(name, args, kwargs)
    state = None
    if capturing or device is not None:
        state = call_state(dispatcher.tensors(arguments), policy, dispatcher.function.state, device)
        state = msgspec.structs.replace(state, capturing=capturing)
    report, _ = dispatcher.explain(arguments, policy, machine=machine, call_state=state)
    check_operation(name, report)
    report = _with_workspaces(report)
    if state is not None or report.facts.device.platform != "cuda":
        return report
    from layerzero.backends.torch.cuda_attention import with_torchs_words  # a question alone loads it

    return with_torchs_words(report, arguments)


def _with_workspaces(report: Report) -> Report:
    """The report, with what each candidate needs besides its results, and how that is known."""
    before = report.candidates
    ranked = tuple(
        [msgspec.structs.replace(each, workspace=headroom.told_need(each.kernel, report.facts)) for each in before]
    )
    chosen = next((now for each, now in zip(before, ranked, strict=True) if each is report.chosen), None)
    return msgspec.structs.replace(report, ranked=ranked, chosen=chosen)


def _explain_plain(
    function: PlainFunction, wanted: str, args: tuple[Any, ...], kwargs: dict[str, Any], machine: Machine | None
) -> Report:
    """The same for a call without tensors."""
    given = bound(function.name, function.signature, args, kwargs)
    REGISTRY.ready()
    dispatcher, _ = PLAIN_CALLS[function.name]
    found = plain_facts(function.route(given), None if machine is None else machine.device)
    report, _ = dispatcher.explain(found, current_policy(), machine=machine)
    if wanted not in PLAIN_FUNCTIONS:
        check_operation(wanted, report)
    return report


def described(name: str) -> Device:
    """A device by name: ``cpu``, ``cuda``, ``cuda:1`` are this machine's, ``H100`` and the like need not be here."""
    return Device.detect(name) if name.partition(":")[0] in ("cpu", "cuda") else Device.named(name)


def named_libraries(libraries: Mapping[str, str], said: str = "libraries") -> dict[str, str]:
    """Libraries and versions by every name that kernels look for.

    Raises: ValueError for a library that no kernel needs, naming the nearest, or an unreadable version.
    """
    known, found = known_libraries(), dict[str, str]()
    for name, version in libraries.items():
        try:
            Version(version)
        except (InvalidVersion, TypeError):
            raise ValueError(f"{said} {name}: wanted a version like 3.0.0, got {version!r}") from None
        found |= dict.fromkeys(spellings(name, known, said), version)
    return found


def known_libraries() -> dict[str, set[str]]:
    """Every name that a kernel's library is looked for by, without dashes and capitals, to its spellings."""
    known: dict[str, set[str]] = {}
    for backend in REGISTRY.backends():
        required = [check_requirement(each)[0] for each in backend.demands]
        for name in {*backend.distributions, *required} - {"", "cuda", "rocm", "driver"}:  # the device says these
            known.setdefault(canonicalize_name(name), set()).add(name)
    return known


def spellings(name: str, known: Mapping[str, set[str]], said: str) -> set[str]:
    """The names of a library. Raises: ValueError for what no kernel needs, naming the nearest."""
    if canonicalize_name(str(name)) not in known:
        names = sorted({min(spellings) for spellings in known.values()})
        near = nearest(str(name), names) or f"; known: {', '.join(names)}"
        raise ValueError(f"{said}: no kernel needs a library {name!r}{near}")
    return known[canonicalize_name(name)]


def which(operation: Named | Facts, *args: Any, **kwargs: Any) -> dict[str, object]:
    """Tell which kernel a call gets: ``{"kernel_id", "score", "operation"}``. Takes what explain takes.

    Of a kernel that runs in a process of its own, ``process`` says which, and what that adds to a call.
    """
    asked = operation if isinstance(operation, Facts) else name_of(operation, "which", FACTS_TOO)
    report = explain(asked, *args, **kwargs)
    apart = [note for note in report.notes if note.startswith(APART)]
    return {
        "kernel_id": report.kernel_id,
        "score": round(report.chosen.score, 3) if report.chosen else None,
        "operation": report.operation,
        **({"process": apart[0]} if apart else {}),
    }


def validate(kernel_id: str, *args: Any, **kwargs: Any) -> tuple[bool, tuple[Reason, ...]]:
    """Tell whether one kernel may run a call: ``(valid, reasons)``.

    Takes the arguments of the kernel's function and what else explain takes. Before them may stand the function itself
    (``lz.scaled_dot_product_attention``), where a call of another one than the kernel's own is meant.
    A call that means nothing gives its code as a reason where the catalogue has one, else InvalidCallError is raised.
    Raises: KeyError for an unknown kernel; TypeError for what is no id.
    """
    given_first: object = kernel_id  # without the id, a function or a tensor comes first
    if not isinstance(given_first, str):
        name = function_named(given_first)
        of = "" if name is None else repr(name)
        got = told(given_first) if name is None else f"the function {name}, which goes behind it"
        raise TypeError(f"validate: wanted the id of a kernel first, got {got}; lz.list_kernels({of}) has them")
    kernel = REGISTRY.kernel(kernel_id)
    given = function_named(args[0]) if args else None
    function = given or _function_of(kernel)
    args = args[given is not None :]
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


def list_kernels(operation: Named = "*") -> list[Kernel]:
    """List the kernels of an operation, function, alias or glob, by priority.

    Raises: UnknownOperationError naming the nearest; TypeError for what names nothing.
    """
    name = name_of(operation, "list_kernels", ", or a pattern of names")
    return REGISTRY.kernels(DROP_INS[name].function if name in DROP_INS else name)


def list_operations() -> list[Operation]:
    """List every operation, those of plugins among them."""
    REGISTRY.ready()
    return sorted(REGISTRY.operations().values(), key=lambda operation: operation.name)


def facts(operation: Named, *args: Any, device: Device | str | None = None, **kwargs: Any) -> Facts:
    """Name everything about a call; explain and which accept the result in place of tensors."""
    return explain(name_of(operation, "facts"), *args, device=device, **kwargs).facts


def explain_facts(call: Facts, machine: Machine, policy: Policy, *, alone: bool = False) -> Report:
    """Tell which kernel a call gets on a machine under a policy, or would get if nothing were frozen or agreed."""
    kernels = REGISTRY.candidates(call.operation.name)
    judged = legality.judge(kernels, call, policy, machine, ENGINE.health, ENGINE.ledger)
    routed = Routed(call.operation, {}, call.layout)
    return _with_workspaces(ENGINE.decide(judged, routed, call, policy, machine, alone=alone)[0])


def question(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Dispatcher, dict[str, Any]]:
    """The dispatcher and the bound arguments of a question."""
    operation = name
    if name in OPERATION_ALIASES:
        operations, implied = OPERATION_ALIASES[name]
        operation, kwargs = operations[0], {**implied, **kwargs}
    if name not in FUNCTIONS and function_of(operation) is None:
        REGISTRY.ready()  # a plugin may bring it
    function = FUNCTIONS.get(name) or function_of(operation)
    if function is None:
        raise unknown_operation(name)
    call = CALLS[function.name]
    return call.dispatcher, call.function.bind(args, kwargs)


def unknown_operation(name: str) -> UnknownOperationError:
    """The error for a name without operation or function."""
    if name in REGISTRY.operations():
        return UnknownOperationError(f"operation {name!r} has no public function; lz.register_function gives it one")
    known = [*FUNCTIONS, *DROP_INS, *PLAIN_FUNCTIONS, *REGISTRY.operations(), *OPERATION_ALIASES]
    near = nearest(name, known) or "; `layerzero operations` lists all"
    return UnknownOperationError(f"unknown operation {name!r}{near}")


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


def drop_in_named(asked: object) -> DropIn | None:
    """The one that is given as itself; its module is looked at only where it was imported."""
    if not callable(asked):
        return None
    homes = ((each, sys.modules.get(each.home)) for each in DROP_INS.values())
    return next((each for each, home in homes if asked is getattr(home, each.name, None)), None)


def call_made(of: DropIn, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: Device | None) -> Made:
    """The call that it makes; ``device`` is the call's device, if that is not where the tensors lie.

    Raises: TypeError for a call that does not fit the signature; InvalidCallError where the library's own runs.
    """
    given = bound(of.name, getattr(importlib.import_module(of.home), of.name), args, kwargs)
    return of.call(given, "" if device is None else device.torch_type)


def refused(of: DropIn, error: InvalidCallError) -> InvalidCallError:
    """The error of a call that the public function does not take: the library's own answers it, or refuses it too."""
    why = f"{of.library}'s own function runs this call, since lz.{of.function} does not take it"
    return InvalidCallError(of.name, [f"{why}: {each}" for each in error.problems], error.code)


Named = str | Operation | Callable[..., Any]
"""How a function or an operation may be named."""


def function_named(asked: object) -> str | None:
    """The name of a public function that is given as itself, however it is called; None for anything else."""
    standing = drop_in_named(asked)
    if standing is not None:
        return standing.name
    ways = [(name, way) for name, call in list(CALLS.items()) for way in (call.fast, call.python)]
    ways += [(name, way) for name, (_, way) in list(PLAIN_CALLS.items())]
    return next((name for name, way in ways if way is asked), None)


def name_of(asked: object, question: str, also: str = "") -> str:
    """The name that a question means; a text is one itself, whether or not there is such a thing.

    Raises: TypeError with what was wanted and got, and what to do.
    """
    if isinstance(asked, str):
        return current_name(asked, stacklevel=3)
    name = asked.name if isinstance(asked, Operation) else function_named(asked)
    if name is None:
        got = repr(asked) if callable(asked) else told(asked)
        wanted = f"wanted a function of LayerZero or its name, an operation or an alias{also}, got {got}"
        raise TypeError(f"{question}: {wanted}; lz.list_operations() lists the operations")
    return name


def example_calls(kernel: Kernel, device: Device) -> Iterator[Facts]:
    """Facts of small calls that the kernel's limits accept, in its layout; to load it without running it."""
    for name in kernel.operations:
        operation = REGISTRY.operation(name)
        if function_of(name) is None or not operation.cases:
            continue
        for dtype in operation.dtypes:
            facts = taken(kernel, operation, operation.cases[0], dtype, device)
            if facts is not None:
                yield facts.seen_in(kernel.layout)


def taken(
    kernel: Kernel,
    operation: Operation,
    case: Case,
    dtype: torch.dtype,
    device: Device,
    layout: str | None = None,
    *,
    capturable: bool = False,
) -> Facts | None:
    """The facts of a case that a kernel's limits allow, adapted where they say how, with what it takes no call without.

    ``capturable``: its handles are such as a captured graph can go on reading.

    Raises: InvalidCallError for a case that is no call in this dtype.
    """
    facts = facts_of(operation, case, dtype, device, layout, capturable=capturable)
    found = legality.limit_findings(kernel, facts.seen_in(kernel.layout))
    reasons = [finding.reason for finding in found if finding.repair is None]
    fuller = with_demanded(operation, case, kernel, reasons)
    if fuller is not None:
        return taken(kernel, operation, fuller, dtype, device, layout, capturable=capturable)
    return None if reasons else facts


def awaits_vetting(kernels: Sequence[Kernel], device: Device) -> bool:
    """Whether `layerzero vet` would find something to do: a kernel that waits for a verdict, on its first cases."""
    if not CONFIGURATION.policy.require_vetting:
        return False
    waiting = [kernel for kernel in kernels if kernel.trust.needs_verdict]
    calls = ((kernel, call) for kernel in waiting for call in example_calls(kernel, device))
    return any(ENGINE.ledger.judgement(*pair) is None for pair in calls)
