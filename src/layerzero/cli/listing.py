"""Kernels, operations and fuzz reports as plain values for ``--json``, and whether this machine has a kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from layerzero.cli import describe
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Operation
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.probe import this_machine
from layerzero.engine.registry import REGISTRY
from layerzero.testing.fuzz import FuzzReport


@dataclass(frozen=True, slots=True)
class Listed:
    """A kernel beside this machine: the version of its library, and why it cannot run here, None if it can.

    ``elsewhere``: it is made for other hardware.
    """

    kernel: Kernel
    version: str
    reason: Reason | None
    elsewhere: bool = False


def on_this_machine(kernels: Iterable[Kernel]) -> list[Listed]:
    """Look at each kernel's library and platforms; what a call must fulfil beside that is not asked."""
    devices = [Device.detect("cpu")]
    if torch.cuda.is_available():
        devices.append(Device.detect("cuda"))
    return [_listed(kernel, devices) for kernel in kernels]


def _listed(kernel: Kernel, devices: list[Device]) -> Listed:
    platforms = describe.platforms(kernel)
    device = next((each for each in reversed(devices) if each.platform in platforms), devices[-1])
    state = this_machine().state(kernel.backend, device)
    reason = state.reason
    if reason is None and device.platform not in platforms:
        reason = Reason(ReasonCode.PLATFORM_MISMATCH, "platform", " or ".join(platforms), device.platform)
    return Listed(kernel, state.version or "", reason, elsewhere=device.platform not in platforms)


def kernel_data(listed: Listed) -> dict[str, Any]:
    """One kernel for JSON."""
    kernel, reason, revision = listed.kernel, listed.reason, listed.kernel.revision
    return {
        "id": kernel.id,
        "operations": list(kernel.operations),
        "library": kernel.source,
        "version": listed.version or None,
        "usable": reason is None,
        "reason": str(reason.code) if reason else None,
        "message": reason.message if reason else None,
        "priority": kernel.priority,
        "priority_since": {f"{major}.{minor}": each for (major, minor), each in kernel.priority_since.items()},
        "platforms": list(describe.platforms(kernel)),
        "dtypes": list(describe.dtypes(kernel)),
        "layout": kernel.layout,
        "limits": [limit.describe() for limit in kernel.limits],
        "accepts": list(kernel.accepts),
        "aliases": list(kernel.aliases),
        "descriptor": {"name": revision.name, "sha256": revision.sha256} if revision else None,
        **{flag: getattr(kernel, flag) for flag in describe.FLAGS},
    }


def operation_data(operation: Operation) -> dict[str, Any]:
    """One operation for JSON."""
    schema = operation.schema
    return {
        "name": operation.name,
        "summary": operation.summary,
        "function": describe.function_of(operation.name) or None,
        "tensors": {each.name: {"axes": list(each.shape_vars), "required": each.required} for each in schema.inputs},
        "params": {each.name: describe.kind(each.types) for each in schema.params},
        "mutates": list(schema.mutated),
        "tolerance": {
            dtype_name(dtype): {"rtol": each.rtol, "atol": each.atol} for dtype, each in operation.tolerance.items()
        },
        "judges": {name: f"{judge}: {judge.reason}" for name, judge in operation.judges.items()},
        "properties": [each.name for each in operation.properties],
        "cases": {case.name: {"sizes": dict(case.sizes), "params": dict(case.params)} for case in operation.cases},
        "kernels": [kernel.id for kernel in REGISTRY.kernels(operation.name)],
    }


def fuzz_data(report: FuzzReport) -> dict[str, Any]:
    """A fuzz report for JSON."""
    return {
        "ok": report.ok,
        "seed": report.seed,
        "calls": report.calls,
        "comparisons": report.comparisons,
        "reused": report.reused,
        "seconds": round(report.seconds, 3),
        "kernels": dict(report.kernels.most_common()),
        "failures": [
            {
                "number": each.number,
                "kernel_id": each.kernel_id,
                "way": each.way,
                "problem": each.problem,
                "call": each.call,
                "reproducer": each.reproducer,
            }
            for each in report.failures
        ],
    }


def progress(report: FuzzReport, calls: int) -> str:
    """One line about a run that goes on."""
    return f"{report.calls} of {calls} calls, {len(report.failures)} wrong, {report.rate:.0f} calls a second"
