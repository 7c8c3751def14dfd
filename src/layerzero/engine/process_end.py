"""What ended a process that left a marker behind: a kernel that crashed, or a signal from outside.

A rollout, a preemption or a closed terminal ends a process whenever it comes, also in a kernel's first run. While a
marker is held, ``faulthandler`` writes into its file as such a signal arrives, and the process then ends as it always
would. A marker that says so accuses no kernel. SIGKILL lets no process say anything; but where the system counts the
processes that it killed for want of memory, a marker says how many those were before, and in which control group; one
of a process that ended as that number grew accuses no kernel either.
"""

from __future__ import annotations

import faulthandler
import re
import signal
from pathlib import Path

from layerzero.core.system import disk, forking, resources

_SIGNALS = tuple(
    signal.Signals[name]
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if name in signal.Signals.__members__
)
"""Signals from outside that end a process where it does nothing about them. Python itself answers SIGINT."""

_TOLD = b"(most recent call first)"
"""What faulthandler writes before the frames."""

MOST_BYTES = 1 << 20
"""A file that is larger is no marker."""


_KILLS = b"killed for memory before: "


class _Endings:
    """The files that are written into, the latest first in line; faulthandler knows one."""

    def __init__(self) -> None:
        self._lock = forking.rlock()
        self._files: list[int] = []
        self._watched: set[signal.Signals] = set()
        forking.in_child(self._leave)

    def begin(self, file: int) -> None:
        with self._lock:
            self._files.append(file)
            self._watch(file)

    def end(self, file: int) -> None:
        with self._lock:
            if file in self._files:  # a forked child has forgotten it
                self._files.remove(file)
            if self._files:
                self._watch(self._files[-1])
            else:
                self._leave()

    def _watch(self, file: int) -> None:
        if not hasattr(faulthandler, "register"):  # Windows
            return
        caught = _caught()
        for number in _SIGNALS:
            untouched = signal.getsignal(number) is signal.SIG_DFL
            if untouched and (number in self._watched or not caught >> (number - 1) & 1):
                faulthandler.register(number, file=file, all_threads=False, chain=True)
                self._watched.add(number)

    def _leave(self) -> None:
        """Give back the signals that no other code has taken meanwhile; also in a forked child, which has no marker."""
        self._files.clear()
        for number in self._watched:
            if signal.getsignal(number) is signal.SIG_DFL:
                faulthandler.unregister(number)
        self._watched.clear()


_ENDINGS = _Endings()


def begin(file: int) -> None:
    """From now on let a signal from outside that ends the process leave a word in an open file."""
    _ENDINGS.begin(file)


def end(file: int) -> None:
    """Write no more into a file; call it before the file is closed."""
    _ENDINGS.end(file)


def from_outside(path: Path) -> bool:
    """Whether the process that left this file was ended by such a signal, or for want of memory. Raises: OSError."""
    said = disk.read_plain(path, MOST_BYTES)
    before = re.search(re.escape(_KILLS) + rb"(\d+) in ([^\s;]*);", said)
    if _TOLD in said or before is None:
        return _TOLD in said
    return resources.kills().since(resources.Kills(int(before[1]), before[2].decode())) > 0


def so_far() -> str:
    """What a marker says as it is made, for :func:`from_outside`."""
    before = resources.kills()
    return f"{_KILLS.decode()}{before.count} in {before.group};"


def _caught() -> int:
    """Signals that something in this process handles, beneath Python: they are left alone. All, where nothing tells."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("SigCgt:")), 16)
    except (OSError, StopIteration, ValueError):
        return -1
