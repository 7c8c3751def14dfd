"""Whether a silent process waits for the machine: for a core, or for memory that lies on a disk.

A process that hangs runs or sleeps. With more threads than cores, some of its threads queue, too: a process whose
threads together ran for most of the silence did not wait for the machine. Only Linux has these numbers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")

_FAULTS, _STATE = 12, 3
"""Fields of ``/proc/PID/stat``: faults that read a disk, and the first one behind the name, which may hold anything."""

LEAST_S = 1.0
"""A shorter silence says nothing: any process waits a while for a core."""

SHARE = 0.5
"""Of a silence, what a thread waited for a core; with less, it had time to give a sign."""

FAULTS_A_SECOND = 10.0
"""Pages read from a disk: a machine that swaps reads hundreds a second, each thread at most some thousand."""


@dataclass(frozen=True, slots=True)
class Waits:
    """What a process has waited for the machine since it began.

    Attributes:
        queued_s: for a core, each thread by its number.
        faults: pages that were read from a disk.
        ran_s: how long it ran meanwhile, each thread by its number.
    """

    queued_s: dict[int, float] = field(default_factory=dict)
    faults: int = 0
    ran_s: dict[int, float] = field(default_factory=dict)

    def since(self, before: Waits, seconds: float) -> str:
        """What kept it for most of so many seconds, in words; empty where it did not wait for the machine."""
        if seconds < LEAST_S:
            return ""
        queued = max((now - before.queued_s.get(thread, 0.0) for thread, now in self.queued_s.items()), default=0.0)
        ran = sum(now - before.ran_s.get(thread, 0.0) for thread, now in self.ran_s.items())
        if queued > SHARE * seconds > ran:
            return f"it waited for a core for {queued:.0f} s of {seconds:.0f}"
        faults = self.faults - before.faults
        if faults > FAULTS_A_SECOND * seconds:
            return f"the machine swapped: it read its memory back from a disk {faults} times in {seconds:.0f} s"
        return ""


def waits(process: int) -> Waits:
    """What a process has waited so far; nothing where the system does not tell."""
    queued: dict[int, float] = {}
    ran: dict[int, float] = {}
    folder = _PROC / str(process)
    with contextlib.suppress(OSError, ValueError, IndexError):
        faults = int((folder / "stat").read_text().rpartition(")")[2].split()[_FAULTS - _STATE])
        for thread in (folder / "task").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                times = (thread / "schedstat").read_text().split()
                ran[int(thread.name)], queued[int(thread.name)] = int(times[0]) / 1e9, int(times[1]) / 1e9
        return Waits(queued, faults, ran)
    return Waits(queued, 0, ran)
