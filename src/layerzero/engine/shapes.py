"""Calls on meta and fake tensors: nothing runs, but who watches calls is told what would."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from layerzero.core.device import Device
from layerzero.core.plan import Plan
from layerzero.engine.policy import Policy
from layerzero.engine.probe import Machine
from layerzero.engine.reference import fake_call

if TYPE_CHECKING:
    from layerzero.engine.dispatch import Dispatcher

log = logging.getLogger("layerzero")

NOTE = "shapes only: judged as on "


def judged_on(tensors: list[torch.Tensor]) -> Device:
    """The device that such a call is judged for: a fake tensor's own; of meta tensors, where warmup and tune work."""
    real = next((each.device for each in tensors if not each.is_meta), None)
    return Device.detect(real or ("cuda" if torch.cuda.is_available() else "cpu"))


def shapes_answer(dispatcher: Dispatcher, arguments: dict[str, Any], policy: Policy) -> Any:
    """Answer a call on meta tensors: its results have shapes only, and no kernel runs."""
    if dispatcher.engine.watchers:
        tell_shapes(dispatcher, arguments, policy)
    return fake_call(dispatcher.function.route(dict(arguments), policy.layout))


def tell_shapes(dispatcher: Dispatcher, arguments: dict[str, Any], policy: Policy) -> None:
    """Tell the watchers which kernel a call would get if its tensors had memory.

    Not while torch compiles or exports: what it traces is called later, and its sizes may be symbols.
    """
    tensors = dispatcher.tensors(arguments)
    if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None:
        return
    if any(type(size) is not int for each in tensors for size in each.shape):
        return
    device = judged_on(tensors)
    report, _ = dispatcher.explain(arguments, policy, machine=Machine(device))
    chosen = report.chosen
    if chosen is None:
        log.warning("%s on tensors without memory: no kernel is legal on %s", report.operation, device.name)
        return
    report = msgspec.structs.replace(report, notes=(*report.notes, NOTE + device.name))
    plan = Plan(chosen.kernel, report, "", _nothing, _nothing, chosen.adaptations)
    for watcher in dispatcher.engine.watchers:
        watcher(dispatcher.function, plan)


def _nothing(**_: Any) -> dict[str, Any]:
    """What has no memory is neither adapted nor run."""
    return {}
