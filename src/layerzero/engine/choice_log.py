"""What is said of a choice as it is made, for who asked: ``log_selections``, or ``LAYERZERO_VERBOSE=1``."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

from layerzero.core.plan import Plan

log = logging.getLogger("layerzero")

PLACE: ContextVar[str] = ContextVar("layerzero_place", default="")
"""The path of the module that a call is made in, as far as somebody follows a model (``lz.trace``)."""


def tell_choice(plan: Plan) -> None:
    """Say what a new plan runs, and where, if that is known.

    Through logging where the program listens to it at INFO; else on the error stream, since asking for it in a shell
    must not need a line of code.
    """
    place = PLACE.get()
    changes = f" ({'; '.join(plan.transforms)})" if plan.transforms else ""
    text = f"{plan.report.operation} -> {plan.kernel.id}{changes}{f' in {place}' if place else ''}"
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("%s", text)
    else:
        sys.stderr.write(f"layerzero: {text}\n")
