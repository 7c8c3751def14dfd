"""Threads that work behind the caller, and how many a computation should have on this machine."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

from layerzero.core.system.resources import cpu_quota

_SIBLINGS = "topology/thread_siblings_list"


def started(name: str, work: Callable[..., None], *given: object) -> threading.Thread | None:
    """Start a thread that keeps no process alive; None where the system has no more, or the interpreter ends."""
    thread = threading.Thread(target=work, args=given, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def usable_cpus() -> int:
    """Logical CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_advice(threads: int, system: Path = Path("/sys/devices/system/cpu")) -> str:
    """What is wrong with so many threads of a computation here, and the number to set; empty where nothing is.

    Threads beyond a container's quota are stopped for the rest of each period, and two threads of one core share its
    units for products. Where the system does not say which CPUs are one core, each counts as one.
    """
    logical, quota = usable_cpus(), cpu_quota()
    numbers = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(logical)
    cores = len({_core(system, number) for number in numbers})
    wanted = max(1, min(cores, math.ceil(quota) if quota < math.inf else cores))
    if threads == wanted or (threads < wanted and threads > 1):  # fewer may be meant: several processes share a machine
        return ""
    if threads == 1:
        why = f"torch uses 1 thread of {wanted} cores"
    elif quota < cores:
        why = f"torch uses {threads} threads, and a quota gives this process {quota:g} CPUs"
    else:
        why = f"torch uses {threads} threads on {cores} cores"
    return f"{why}; set OMP_NUM_THREADS={wanted}, or call torch.set_num_threads({wanted})"


def _core(system: Path, number: int) -> str:
    try:
        return (system / f"cpu{number}" / _SIBLINGS).read_text().strip()
    except OSError:
        return str(number)
