"""What a question is about: a public function, as itself or by its name, an operation, or an alias.

Of a kernel: small calls that its limits accept.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from layerzero.core.argument_errors import DropIn, Made, bound
from layerzero.core.arguments import told
from layerzero.core.device import Device
from layerzero.core.errors import InvalidCallError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation
from layerzero.engine import legality
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.plain import PLAIN_CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.ops import DROP_INS, current_name, function_of
from layerzero.ops.calls import facts_of, with_demanded


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
