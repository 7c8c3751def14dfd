"""Threads that work behind the caller, where one can be had."""

from __future__ import annotations

import threading
from collections.abc import Callable


def started(name: str, work: Callable[..., None], *given: object) -> threading.Thread | None:
    """Start a thread that keeps no process alive; None where the system has no more, or the interpreter ends."""
    thread = threading.Thread(target=work, args=given, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
