"""The clocks of devices: how long a call takes, and how long the device alone needs for it.

What a user waits for is the longer of what host and device need. On a CPU that is one number: the mean of a short burst
of calls, since one call of a few microseconds drowns in the clock; a sample is the quickest of three bursts, as other
work on a machine only ever makes a call longer. On a GPU a sample is the longer of two numbers. *Device time*: one call
between two events, behind a flush of the L2 cache that is queued long enough for the host to get ahead. *Burst time*:
calls back to back between two events on an idle queue, divided by their number, where the device waits for a host that
launches slowly; calls above 500 us are not sent in bursts, since no library spends that long on the host. A CUDA
graph's replay has device time only, and is another record.

Both are kept along with their maximum. A device repeats itself within a percent or two; a host is slow by a factor of
1.5 to 2 for seconds at a time (a virtual machine with an H200, 2026-11-21), which no number of samples in a row
averages out.

:func:`device_times` leaves the host out: it replays a CUDA graph that holds many calls. Between two events around one
launch lies what the host needs to launch, wherever that is longer: 5 us for a kernel of two, 25 on a slow host. A graph
launches by itself, and about 1 us is left between two of its kernels (H200). The calls of a graph take turns through
copies of their inputs and keep their results apart, so that no call finds its tensors in the L2 cache: *cold*. Small
calls would need thousands of copies for that, and find in the cache what lies there in a model, too: *warm*.

Memory that a kernel takes besides its results is a GPU's alone: torch's allocator of a CPU has no counter, and what a
process holds at most tells of its whole life.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from layerzero.core.facts import Facts
from layerzero.core.graph_capture import capturing
from layerzero.core.kernel import Kernel
from layerzero.engine import headroom
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE

Run = Callable[[], Any]

CALMER = 3
"""A calmer clock takes so many times as long for a sample."""

HOST_DRIFT = 2.0
"""A host may be so many times slower for seconds: longer than the turns in which candidates are compared."""


class Sample(NamedTuple):
    """One reading of a clock, in microseconds of a call.

    Attributes:
        time_us: what a user waits for.
        device_us: what the device needs; None where it is not measured apart, as on a CPU.
        host_us: burst time, which is the host's or, where that gets ahead, the device's; None where there was no burst.
    """

    time_us: float
    device_us: float | None = None
    host_us: float | None = None

    @property
    def at_least_us(self) -> float:
        """What is left of it if the host was slow just then."""
        if self.host_us is None:
            return self.time_us
        return max(self.device_us or 0.0, self.host_us / HOST_DRIFT)


class Clock(Protocol):
    """A device's clock."""

    def sample(self, run: Run, about_us: float) -> Sample:
        """One reading, for a call of which it is known about how long it takes."""

    def once(self, run: Run) -> float:
        """Microseconds of one call as it is, until its result is there."""

    def calmer(self) -> Clock | None:
        """A clock that takes longer and is disturbed less; None where there is none."""


class CpuClock:
    """Bursts of calls between two readings of the wall clock.

    Attributes:
        bursts: of so many the quickest is a sample.
        one_above_us: a longer call gets a single one, which interrupts change little.
    """

    BURST_US = 200.0
    """What a burst lasts at least: a reading of the clock costs 0.1 us, an interrupt 5 (Intel Xeon, 2026-11-21)."""

    def __init__(self, bursts: int = 3, one_above_us: float = math.inf) -> None:
        self.bursts, self.one_above_us = bursts, one_above_us

    def sample(self, run: Run, about_us: float) -> Sample:
        """Mean of the quickest burst; short calls run once before it, since another candidate had the caches."""
        count = max(1, round(self.BURST_US / max(about_us, 0.2)))
        if about_us < 1000.0:
            run()
        bursts = 1 if about_us > self.one_above_us else self.bursts
        return Sample(min(self._burst(run, count) for _ in range(bursts)))

    def _burst(self, run: Run, count: int) -> float:
        started = time.perf_counter_ns()
        for _ in range(count):
            run()
        return (time.perf_counter_ns() - started) / 1000.0 / count

    def calmer(self) -> Clock:
        """The quickest of three times as many bursts."""
        return CpuClock(self.bursts * CALMER, self.one_above_us)

    def once(self, run: Run) -> float:
        started = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - started) / 1000.0


class CudaClock:
    """Events on the current stream.

    Attributes:
        graph: whether replays are timed, for which the host's time says nothing.
    """

    FLUSH_BYTES = 256 * 2**20
    """Written before each call: five times the L2 cache of an H200, and 60 us of the queue at 4.2 TB/s."""

    FLUSHES = 4
    """So many flushes keep the device busy for 240 us: the slowest entry of a library takes 90 us of host time, and
    :data:`HOST_DRIFT` times that where the host is slow."""

    BURST_BELOW_US = 500.0
    LEAD = 2
    """Calls before a burst's first event: a device-bound burst then starts behind a full queue."""

    def __init__(self, *, graph: bool = False) -> None:
        self.graph = graph
        self._flush = torch.empty(self.FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def sample(self, run: Run, about_us: float) -> Sample:
        """The longer of device time and burst time; of a graph and of a long call, device time."""
        device_us = self.device(run)
        if self.graph or about_us > self.BURST_BELOW_US:
            return Sample(device_us, device_us)
        burst_us = self.burst(run, about_us)
        return Sample(max(device_us, burst_us), device_us, burst_us)

    def device(self, run: Run) -> float:
        """Device time of one call with a cold L2 cache."""
        return _elapsed_us(run, 1, self._flush.zero_, self.FLUSHES)

    def burst(self, run: Run, about_us: float) -> float:
        """Time of a call among others back to back, launching included."""
        count = max(5, min(20, round(400.0 / max(about_us, 1.0))))
        return _elapsed_us(run, count, run, self.LEAD) / count

    def calmer(self) -> None:
        """A device without other users has no other."""

    def once(self, run: Run) -> float:
        """One call from the host's view, until the device is done."""
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        run()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - started) / 1000.0


def _elapsed_us(run: Run, times: int, before: Run, leads: int) -> float:
    """Time of so many runs between two events, behind what keeps the device busy until the first."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    for _ in range(leads):
        before()
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000.0


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one: events and captures belong to that, whatever device the tensors of a call lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def clock_of(device: torch.device | str, *, graph: bool = False) -> Clock:
    """The clock of a device. Raises: ValueError for a graph on a device without graphs."""
    if torch.device(device).type == "cuda":
        return CudaClock(graph=graph)
    if graph:
        raise ValueError(f"graph: wanted a CUDA device, got {torch.device(device).type}")
    return CpuClock()


TARGET_US = 400.0
"""What a replay should last: ten times what launching a graph takes on a slow host."""

MOST_CALLS = 128
"""Calls of a graph at most: their results live as long as the graph does."""

FEWEST_CALLS = 4

MOST_COPIES = 64
"""Copies of a call's inputs at most."""

LEAD = 2
"""Replays before the first event: the queue is full by then."""


class Graphs:
    """CUDA graphs on the current device."""

    def captured(self, calls: Sequence[Run], before: Run | None = None) -> Run:
        """Capture calls; what they return is kept, so that none writes where another did.

        ``before`` runs ahead of the capture, in place of the first of them.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for each in (before or calls[0], *calls[1:]):  # workspaces, forms of weights and choices come before it
                each()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            kept = [call() for call in calls]

        def replay() -> None:
            assert kept  # they live as long as the replay does
            graph.replay()

        return replay

    def elapsed_us(self, run: Run, times: int) -> float:
        """Time between two events, the first of them behind other runs."""
        return _elapsed_us(run, times, run, LEAD)


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What was found about one callable.

    Attributes:
        time_us: microseconds of a call, the median; None where it could not be captured.
        calls: in the graph.
        copies: of the inputs through which they took turns.
        samples: microseconds of a call, in order.
        problem: why there is no time.
        cache: ``cold`` where calls took turns through more copies than the cache holds, else ``warm``.
    """

    time_us: float | None
    calls: int = 0
    copies: int = 1
    samples: tuple[float, ...] = field(default=(), repr=False)
    problem: str = ""
    cache: str = ""


def copies_needed(call_bytes: float, cache_bytes: int) -> tuple[int, bool]:
    """How many copies of a call's tensors there should be, and whether the cache is cold with them.

    Args:
        call_bytes: what one call reads and writes.
        cache_bytes: the device's last cache; twice as much lies between two uses of a tensor.
    """
    wanted = max(1, -int(-2 * cache_bytes // max(call_bytes, 1.0)))
    return (wanted, True) if wanted <= MOST_COPIES else (1, False)


def cache_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device's L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def device_times(
    runs: Mapping[str, Sequence[Run]], *, samples: int = 10, device: Graphs | None = None
) -> dict[str, DeviceTime]:
    """Time what the device needs for calls, side by side: a sample of each in turn, in an order drawn anew.

    Args:
        runs: of each name the same call, once for each copy of its inputs; they have run before.
        samples: replays' samples of each.
        device: CUDA graphs if None.
    """
    graphs = device or Graphs()
    ready: dict[str, tuple[Run, int]] = {}
    problems: dict[str, str] = {}
    for name, copies in runs.items():
        try:
            few = graphs.elapsed_us(graphs.captured([copies[0]] * FEWEST_CALLS), 1) / FEWEST_CALLS
            calls = _calls(few, len(copies))
            ready[name] = graphs.captured([copies[number % len(copies)] for number in range(calls)]), calls
        except Exception as error:  # noqa: BLE001  # what cannot be captured is a finding, and is reported
            problems[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    taken: dict[str, list[float]] = {name: [] for name in ready}
    order = random.Random(0)  # noqa: S311  # an order, no secret
    for _ in range(samples):
        names = list(ready)
        order.shuffle(names)
        for name in names:
            replay, calls = ready[name]
            taken[name].append(graphs.elapsed_us(replay, 2) / 2 / calls)
    found = {}
    for name, copies in runs.items():
        if name in problems:
            found[name] = DeviceTime(None, 0, len(copies), (), problems[name])
        else:
            read = taken[name]
            found[name] = DeviceTime(statistics.median(read), ready[name][1], len(copies), tuple(read))
    return found


def _calls(about_us: float, copies: int) -> int:
    """Calls of a graph: as many as fill its time, every copy as often as the others."""
    wanted = min(max(FEWEST_CALLS, round(TARGET_US / max(about_us, 0.1))), MOST_CALLS)
    return max(1, -(-wanted // copies)) * copies


def taken_bytes(run: Callable[[], object], device: torch.device, counters: Any = torch.cuda) -> int:
    """Bytes that a run had at its peak and gave back: neither its results nor what it keeps for later calls."""
    counters.synchronize(device)
    counters.reset_peak_memory_stats(device)
    result = run()  # held until its memory is counted
    counters.synchronize(device)
    taken = counters.max_memory_allocated(device) - counters.memory_allocated(device)
    del result
    return max(0, int(taken))


def note(kernel: Kernel, facts: Facts, run: Callable[[], object]) -> None:
    """Measure a kernel that declares nothing, and remember it for its class; it ran before, and is warm."""
    if kernel.workspace_bytes is not None or facts.device.torch_type != "cuda":
        return
    taken = taken_bytes(run, torch.device("cuda", facts.device.index))
    ENGINE.ledger.record_workspace(kernel, facts, taken)
    if not headroom.fits(kernel, facts, current_policy()):
        ENGINE.bump()
