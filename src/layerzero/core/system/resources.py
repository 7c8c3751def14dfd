"""Memory, CPUs and threads that this process may use: by its control groups, on a device, within a bound of its own."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path

from layerzero.core.system import forking

_TOP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class _Names:
    bound: str
    use: str
    idle: str
    """In ``memory.stat``, the bytes of idle files: they count as used, and are given back when needed."""

    kills: str


_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file", "memory.events")
_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")


def group_bytes() -> float:
    """What the group that leaves least still gives this process; infinite where none is bounded."""
    return min((_left(folder, names) for folder, names in _folders()), default=math.inf)


@dataclass(frozen=True, slots=True)
class Kills:
    """How many processes the system ended for want of memory, and which group counted them.

    Attributes:
        count: since the group was made.
        group: which one, on which run of which machine; empty where no group counts.
    """

    count: int = 0
    group: str = ""

    def since(self, before: Kills) -> int:
        """How many more they are; 0 where another group counted, or the same one of a container that began anew."""
        return max(self.count - before.count, 0) if self.group and self.group == before.group else 0


def kills() -> Kills:
    """Those that the nearest group which counts them has counted."""
    for folder, names in _folders():
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)", (folder / names.kills).read_text(), re.MULTILINE)
            if found:
                boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
                return Kills(
                    int(found[1]), f"{boot}:{folder}:{folder.stat().st_ino}".replace(" ", "_").replace(";", "_")
                )
    return Kills()


def cpu_quota() -> float:
    """How many CPUs the group with the least quota gives this process; infinite where none is bounded."""
    return min((_quota(folder, names is _VERSION_2) for folder, names in _folders("cpu")), default=math.inf)


def _quota(folder: Path, second: bool) -> float:
    try:
        if second:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        found = int(quota) / int(period)
    except (OSError, ValueError):  # no such file at the top, or no bound: "max"
        return math.inf
    return found if found > 0 else math.inf  # -1 is no bound


def _folders(controller: str = "memory") -> Iterator[tuple[Path, _Names]]:
    """This process's groups, the nearest first: in a container its own folder is the top."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, names = (_TOP / controller, _VERSION_1) if controllers else (_TOP, _VERSION_2)
        folder = top / group.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_dir():
                yield each, names
            if each == top:
                break


def _left(folder: Path, names: _Names) -> float:
    try:
        bound, use = (int((folder / name).read_text()) for name in (names.bound, names.use))
        idle = re.search(rf"^{names.idle} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no such file at the top, or no bound: "max"
        return math.inf
    return max(bound - use + (int(idle[1]) if idle else 0), 0)


_STATM = Path("/proc/self/statm")


class _Bound:
    def __init__(self) -> None:
        self._lock = forking.lock()
        self._inside = 0
        self.before: tuple[int, int] | None = None

    def enter(self, room: int) -> None:
        import resource

        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            pages = int(_STATM.read_text().split()[0])
            soft, hard = self.before = resource.getrlimit(resource.RLIMIT_AS)
            wanted = pages * resource.getpagesize() + room
            own = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
            resource.setrlimit(resource.RLIMIT_AS, (own, hard))

    def leave(self) -> None:
        import resource

        with self._lock:
            self._inside -= 1
            if not self._inside and self.before is not None:
                resource.setrlimit(resource.RLIMIT_AS, self.before)
                self.before = None


_BOUND = _Bound()


@contextmanager
def bounded(room: float) -> Iterator[None]:
    """Let this process reserve so many bytes more than it has, and no others; Linux alone.

    The bound is the whole process's: a thread that enters while another is inside has that one's.
    """
    if sys.platform != "linux" or room == float("inf"):
        yield
        return
    _BOUND.enter(int(room))
    try:
        yield
    finally:
        _BOUND.leave()


def lift(process: int) -> None:
    """Give a child process what this one had before: it may have been started within a bound, and would keep it."""
    before = _BOUND.before
    if before is not None:
        import resource

        with suppress(ProcessLookupError):  # it has ended already
            resource.prlimit(process, resource.RLIMIT_AS, before)


_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> float:
    """What processes can still get without another one losing it; infinite where the system does not say."""
    return min(_of_machine(), group_bytes())


def _of_machine() -> float:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024.0
    except (OSError, KeyError, ValueError):  # another system, or an old one
        return math.inf


_SIBLINGS = "topology/thread_siblings_list"


def started(name: str, work: Callable[..., None], *given: object) -> threading.Thread | None:
    """Start a thread that keeps no process alive; None where the system has no more, or the interpreter ends.

    It has no context variables, so that a scope that is open here does not hold there.
    """
    thread = threading.Thread(target=work, args=given, name=name, daemon=True)
    try:
        Context().run(thread.start)  # without a GIL it would keep a copy of the context for as long as it lives
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
