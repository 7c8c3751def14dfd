"""What a call tells once: a fallback, a slow reference, a departure, a split, memory beyond what policy allows."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from contextvars import ContextVar

from layerzero.core.errors import LayerZeroFallbackWarning, LayerZeroPerformanceWarning, LayerZeroWarning
from layerzero.core.plan import Plan
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import forking, log, warn
from layerzero.core.system.memory import FREE, mib
from layerzero.engine import headroom, proofs
from layerzero.engine.events import EVENTS
from layerzero.engine.frozen_choices import Frozen
from layerzero.engine.health import Health
from layerzero.engine.pick import PLACE
from layerzero.engine.policy import Policy

TRIED: ContextVar[bool] = ContextVar("layerzero_tried", default=False)
"""Whether calls are tries: what runs the slow reference is not taken for it, or tells so when it runs for good."""

_told: set[tuple[str, str]] = set()
_told_lock = forking.lock()


def tell_fallback(plan: Plan, another: Plan, error: Exception, health: Health) -> None:
    """Count and say that a kernel failed and another one ran: the first time by a warning, later in the log."""
    health.fell_back(plan.kernel, plan.report.operation)
    said = f"{type(error).__name__}: {error}"
    EVENTS.tell("fallback", plan.kernel, plan.report.facts, said, instead=another.kernel.id)
    key = (plan.kernel.id, plan.report.operation)
    text = (
        f"{plan.kernel.id} failed in {plan.report.operation} ({said}); "
        f"{another.kernel.id} ran in its place. lz.doctor() lists what rests in this process."
    )
    if _is_new(key):
        warn(text, LayerZeroFallbackWarning, stacklevel=4)
    else:
        log.warning("%s", text)


def tell_reference(plan: Plan) -> None:
    """Say once for each operation that the slow reference runs, and what kept the nearest kernel out."""
    if plan.report.locked or TRIED.get() or (plan.kernel.id, "reference") in _told:
        return  # it was requested, is a try, or is known
    nearest = min(plan.report.failures.items(), key=lambda item: _distance(item[1]), default=None)
    why = f"{nearest[0]}: {nearest[1][0]}" if nearest else "it has no other kernel"
    _once(
        (plan.kernel.id, "reference"),
        f"{plan.report.operation} runs its slow reference because nothing faster is legal ({why}). "
        "lz.explain lists every reason.",
    )


def tell_departure(plan: Plan, text: str) -> None:
    """Say once for each kernel and operation that a frozen choice could not be kept."""
    EVENTS.tell("departure", plan.kernel, plan.report.facts, reason=text)
    _once((plan.kernel.id, f"frozen {plan.report.operation}"), f"{text}. lz.frozen() lists it.")


def tell_choice(plan: Plan, policy: Policy, frozen: Frozen | None) -> None:
    """Say that a new plan departs from a frozen choice; and what it runs if that is wanted, and where, if it is known.

    Through logging where the program listens to it at INFO; else on the error stream, since asking for it in a shell
    must not need a line of code.
    """
    departed = None if frozen is None else frozen.chose(plan, policy)
    if departed is not None:
        tell_departure(plan, departed)
    if not policy.log_selections:
        return
    place = PLACE.get()
    changes = f" ({'; '.join(plan.transforms)})" if plan.transforms else ""
    text = f"{plan.report.operation} -> {plan.kernel.id}{changes}{f' in {place}' if place else ''}"
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("%s", text)
    else:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a service may have none, or a closed one
            sys.stderr.write(f"layerzero: {text}\n")


def tell_adaptations(plan: Plan, policy: Policy) -> None:
    """Say once for each kernel and operation that a batch runs in chunks, or takes more memory than policy allows."""
    operation, facts = plan.report.operation, plan.report.facts
    for adaptation in plan.adaptations:
        if adaptation.kind == "split":
            _once(
                (plan.kernel.id, f"split {operation}"),
                f"{operation} has to {adaptation.text} on {plan.kernel.id}: the whole is beyond its launch "
                "limits and no other kernel is legal. A smaller batch spares the copies.",
                LayerZeroPerformanceWarning,
            )
        elif adaptation.kind == "apart":
            _once(
                (plan.kernel.id, f"apart {operation}"),
                f"{operation} has to {adaptation.text} on {plan.kernel.id}: no kernel of it declares batch_invariant.",
                LayerZeroPerformanceWarning,
            )
        elif adaptation == headroom.BEYOND:
            room = headroom.room_for(facts, policy)
            free = FREE.of(facts.device, None).free
            there = "" if math.isinf(free) else f" {mib(free)} are free."
            more = f"; a larger {room.setting} ends this warning" if room.setting == headroom.SETTING else ""
            _once(
                (plan.kernel.id, f"beyond {operation}"),
                f"{operation} runs {plan.kernel.id}, which takes {mib(headroom.need_of(plan.kernel, facts).bytes)} "
                f"besides its results; {room.setting} allows {room.told}.{there} Every other kernel that may run takes "
                f"as much or more. A smaller batch takes less{more}.",
                LayerZeroPerformanceWarning,
            )


def tell_capture(plan: Plan) -> None:
    """Log once for each kernel and operation that a graph holds a kernel whose captures were not proved."""
    if proofs.UNPROVED in plan.report.notes and _is_new((plan.kernel.id, f"capture {plan.report.operation}")):
        hint = proofs.how_to_prove(plan.report.facts)
        log.info("%s in %s: %s. %s", plan.kernel.id, plan.report.operation, proofs.UNPROVED, hint)


def _distance(reasons: tuple[Reason, ...]) -> tuple[bool, bool, int]:
    """How far a kernel is from being legal: what is not here at all is farthest, what lacks memory alone nearest."""
    codes = {reason.code for reason in reasons}
    absent = {ReasonCode.NOT_INSTALLED, ReasonCode.PLATFORM_MISMATCH, ReasonCode.VERSION_UNSUPPORTED}
    return bool(absent & codes), codes != {ReasonCode.MEMORY_HEADROOM_EXCEEDED}, len(reasons)


def _once(key: tuple[str, str], message: str, kind: type[LayerZeroWarning] = LayerZeroFallbackWarning) -> None:
    if not _is_new(key):
        return
    log.warning("%s", message)
    warn(message, kind, stacklevel=5)


def _is_new(key: tuple[str, str]) -> bool:
    """Whether this was not reported before; from now on it was."""
    with _told_lock:
        new = key not in _told
        _told.add(key)
    return new


def forget_told() -> None:
    """Say everything again (for tests)."""
    with _told_lock:
        _told.clear()
