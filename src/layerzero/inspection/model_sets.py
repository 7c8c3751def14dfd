"""Whether a machine has optimised kernels for all that a kind of model calls, and what each operation falls back to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

import torch

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Case, Operation
from layerzero.core.plan import Report
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import nearest
from layerzero.inspection.answers import explain
from layerzero.ops.calls import accepted, arguments_of, function_for, is_call_of
from layerzero.ops.sets import SETS, OperationSet

_STOCK = "torch"
"""The library that is always there."""

_USUAL = {"cuda": torch.bfloat16, "cpu": torch.float32}
"""What models run in on a kind of device."""


class OperationSupport(StrEnum):
    """What an operation has on a machine."""

    OPTIMISED = "optimised"
    """A library's kernel may run every one of its named calls."""
    PREPARED = "optimised if prepared"
    """A library's kernel may run every one of them where the caller brings what it made once, as a packed weight."""
    PARTLY = "partly optimised"
    """A library's kernel may run some of them."""
    STOCK = "torch alone"
    """Nothing but torch's own operators, and expressions of them."""
    REFERENCE = "reference alone"
    """Nothing but the definition."""


@dataclass(frozen=True, slots=True)
class OperationFinding:
    """One operation of a set on this machine.

    Attributes:
        operation: its name.
        served: what it has.
        dtype: that of the calls in question.
        kernels: those of libraries that may run any of its named calls.
        chosen: what these calls get today.
        handles: arguments that kernels want which the caller makes once; empty where they run without.
        refused: a library's kernel that may run none of them as they are, and why; empty where there is none, or where
            others may.
    """

    operation: str
    served: OperationSupport
    dtype: str
    kernels: tuple[str, ...]
    chosen: tuple[str, ...]
    refused: str = ""
    handles: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        gets = f"calls get {', '.join(self.chosen)}" if self.chosen else "no call finds a kernel"
        others = [each for each in self.kernels if each not in self.chosen]
        given = f"with {', '.join(f'{each}=' for each in self.handles)}" if self.handles else "too"
        more = f"; {', '.join(others)} may run them, {given}" if others else ""
        return (
            f"{self.operation}: {self.served} ({self.dtype}): {gets}{more}{f'; {self.refused}' if self.refused else ''}"
        )


def served(name: str, device: Device | None = None) -> tuple[OperationFinding, ...]:
    """Tell for each operation of a set whether an optimised kernel may run its named calls here.

    Args:
        name: of the set: ``decoder``.
        device: another device than this machine's best.
    Raises: ValueError for a word that names no set, with the nearest.
    """
    found = set_named(name)
    if device is None:
        device = Device.detect("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(_finding(REGISTRY.operation(each), device) for each in found.operations)


def set_named(name: str) -> OperationSet:
    """A set by its name. Raises: ValueError for a word that names none, with the nearest."""
    if name not in SETS:
        raise ValueError(f"asked_for (--for): wanted one of {', '.join(SETS)}, got {name!r}{nearest(name, SETS)}")
    return SETS[name]


def usual_dtype(operation: Operation, device: Device) -> torch.dtype:
    """What models run an operation in on a device."""
    dtype = _USUAL.get(device.platform, torch.bfloat16)
    return dtype if dtype in operation.dtypes else operation.dtypes[0]


def _finding(operation: Operation, device: Device) -> OperationFinding:
    dtype = usual_dtype(operation, device)
    cases = [case for case in operation.cases if is_call_of(operation, case, dtype)]
    reports = [report for case in cases if (report := report_of(operation, case, dtype, device)) is not None]
    legal = [_of_libraries(report) for report in reports]
    handles: tuple[str, ...] = ()
    if not any(legal):  # a caller may keep more than weights for kernels
        promised = [each for case in cases if (each := report_of(operation, case, dtype, device, promised=True))]
        legal = [_of_libraries(report) for report in promised]
        handles = tuple(operation.schema.handles) if any(legal) else ()
    chosen = tuple(dict.fromkeys(report.kernel_id for report in reports if report.kernel_id))
    if legal and all(legal):
        state = OperationSupport.PREPARED if handles else OperationSupport.OPTIMISED
    elif any(legal):
        state = OperationSupport.PARTLY
    else:
        theirs = {each.kernel.backend.name for report in reports for each in report.candidates if each.legal}
        state = OperationSupport.STOCK if _STOCK in theirs else OperationSupport.REFERENCE
    kernels = tuple(sorted(set().union(*legal)))
    refused = "" if kernels and not handles else _why(reports)
    return OperationFinding(operation.name, state, dtype_name(dtype), kernels, chosen, refused, handles)


def _of_libraries(report: Report) -> set[str]:
    """The legal kernels that are neither torch's nor the reference."""
    legal = (each.kernel for each in report.candidates if each.legal)
    return {kernel.id for kernel in legal if kernel.backend.name not in (_STOCK, "reference")}


def report_of(
    operation: Operation,
    case: Case,
    dtype: torch.dtype,
    device: Device,
    *,
    promised: bool = False,
    libraries: Mapping[str, str] | None = None,
) -> Report | None:
    """What a named call gets on a device; None for one that the device's other rules forbid.

    ``promised`` brings what a caller makes once; ``libraries`` are others than those that are here.
    """
    function = function_for(operation)
    arguments = accepted(function, arguments_of(operation, case, dtype, "meta", promised=promised))
    try:
        return explain(function.name, **arguments, device=device, libraries=libraries)
    except InvalidCallError:
        return None


def _why(reports: list[Report]) -> str:
    """The first reason of a kernel that a library has for such calls: what to install, or what it lacks."""
    for report in reports:
        for each in report.candidates:
            backend = each.kernel.backend
            if backend.name not in (_STOCK, "reference") and report.facts.device.platform in backend.platforms:
                return f"{each.kernel.id}: {each.reasons[0]}"
    return ""
