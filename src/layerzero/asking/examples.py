"""Small calls of a kernel that its limits accept: to load it without running it, to see whether vetting is due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from layerzero.core.device import Device
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation
from layerzero.engine import legality
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.ops import function_of
from layerzero.ops.brought import with_demanded
from layerzero.ops.calls import facts_of


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
