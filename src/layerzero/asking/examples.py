"""Small calls of a kernel that its limits accept: to load it without running it, to see whether vetting is due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layerzero.core.device import Device
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.engine import legality
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.ops import function_of
from layerzero.ops.calls import facts_of


def example_calls(kernel: Kernel, device: Device) -> Iterator[Facts]:
    """Facts of small calls that the kernel's limits accept, in its layout; to load it without running it."""
    for name in kernel.operations:
        operation = REGISTRY.operation(name)
        if function_of(name) is None or not operation.cases:
            continue
        for dtype in operation.dtypes:
            case = operation.cases[0]
            facts = facts_of(operation, case, dtype, device).seen_in(kernel.layout)
            if not [finding for finding in legality.limit_findings(kernel, facts) if finding.repair is None]:
                yield facts


def awaits_vetting(kernels: Sequence[Kernel], device: Device) -> bool:
    """Whether `layerzero vet` would find something to do: a kernel that waits for a verdict, on its first cases."""
    if not CONFIGURATION.policy.require_vetting:
        return False
    waiting = [kernel for kernel in kernels if kernel.trust.needs_verdict]
    calls = ((kernel, call) for kernel in waiting for call in example_calls(kernel, device))
    return any(ENGINE.ledger.judgement(*pair) is None for pair in calls)
