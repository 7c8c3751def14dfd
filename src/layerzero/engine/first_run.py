"""A kernel's first run on this machine, and which kernel is suspected where a process or a device context dies.

Before a library runs a class of calls for the first time, the ledger commits a marker; it is taken away when the first
result was accepted. A marker that a dead process left behind names the kernel that a segmentation fault, a division
error or a kill happened in. A class that was proved here once is never marked again, and hits know nothing of this.

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
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger, class_text
from layerzero.core.plan import Plan
from layerzero.core.system import disk, forking, resources

MAX_RECENT = 32
"""Classes that come under suspicion when a device's context dies: errors arise later than the launch that made them."""


def marked(kernel: Kernel) -> bool:
    """Whether a kernel's first run is marked: torch's own kernels and the references are as trusted as torch is."""
    return kernel.source not in ("torch", "reference")


_UNMARKED = nullcontext()


def first_run(plan: Plan, ledger: Ledger) -> AbstractContextManager[None]:
    """Mark what runs inside, until it ended in a result or in an exception.

    On a GPU the stream is synchronised before the marker goes, so that a fault shows itself here. A CUDA graph capture
    admits no synchronisation and proves nothing: it is not marked. Nor is a collective: a rank that ended while it
    waited for another would suspect a kernel that the others run.
    """
    facts = plan.report.facts
    marks = marked(plan.kernel) and not facts["capturing"] and not facts.operation.is_collective
    marker = ledger.begin(plan.kernel, facts) if marks else None
    return _UNMARKED if marker is None else _until_accepted(marker, facts, ledger)


@contextmanager
def _until_accepted(marker: object, facts: Facts, ledger: Ledger) -> Iterator[None]:
    try:
        yield
        if facts.device.torch_type == "cuda":
            torch.cuda.current_stream(facts.device.index).synchronize()
    except BaseException:
        ledger.withdraw(marker)
        raise
    ledger.accept(marker)


class Recent:
    """The plans that were chosen last on a device that fails asynchronously, one entry for each class.

    Launches themselves are not recorded: a hit would pay for it on every call. What was chosen last is the nearest
    thing that costs hits nothing.
    """

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._chosen: deque[tuple[str, str, Kernel, Facts]] = deque(maxlen=MAX_RECENT)

    def add(self, plan: Plan) -> None:
        """Remember a plan that is about to run for the first time."""
        if plan.report.facts.device.torch_type == "cuda":
            self._add(plan)

    def _add(self, plan: Plan) -> None:
        if not marked(plan.kernel):
            return
        name = (plan.kernel.id, class_text(plan.report.facts))
        with self._lock:
            others = [each for each in self._chosen if each[:2] != name]
            self._chosen = deque([*others, (*name, plan.kernel, plan.report.facts)], MAX_RECENT)

    def accuse(self, plan: Plan, ledger: Ledger, error: BaseException) -> tuple[str, ...]:
        """Make suspects of them, and of the plan that raised; return their names with their classes."""
        self._add(plan)
        with self._lock:
            chosen = tuple(reversed(self._chosen))
        why = f"one of the last {len(chosen)} chosen when the device's context died: {str(error).strip()[:200]}"
        for _, _, kernel, facts in chosen:
            ledger.suspect(kernel, facts, why)
        return tuple(f"{kernel_id} for {text}" for kernel_id, text, _, _ in chosen)

    def clear(self) -> None:
        """Forget everything (for tests)."""
        with self._lock:
            self._chosen.clear()


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
