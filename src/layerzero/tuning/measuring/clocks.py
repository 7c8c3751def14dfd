"""The clocks of devices: a reading of how long a call takes.

What a user waits for is the longer of what host and device need. On a CPU that is one number: the mean of a short burst
of calls, since one call of a few microseconds drowns in the clock; a sample is the quickest of three bursts, as other
work on a machine only ever makes a call longer. On a GPU a sample is the longer of two numbers.
*Device time*: one call between two events, behind a flush of the L2 cache that is queued long enough for the host to
get ahead. *Burst time*: calls back to back between two events on an idle queue, divided by their number, where the
device waits for a host that launches slowly; calls above 500 us are not sent in bursts, since no library spends that
long on the host. A CUDA graph's replay has device time only, and is another record.

Both are kept beside their maximum. A device repeats itself within a percent or two; a host is slow by a factor of 1.5
to 2 for seconds at a time (a virtual machine with an H200, 2026-11-21), which no number of samples in a row averages
out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

Run = Callable[[], Any]

CALMER = 3
"""A calmer clock takes so many times as long for a sample."""

HOST_DRIFT = 2.0
"""A host may be so many times slower for seconds: longer than the turns in which candidates are compared."""


class Sample(NamedTuple):
    """One reading of a clock, in microseconds of a call.

    Attributes:
        time_us: what a user waits for.
        device_us: what the device needs; None where it is not told apart, as on a CPU.
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
        """One call."""
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
        start, end = _events()
        for _ in range(self.FLUSHES):
            self._flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0

    def burst(self, run: Run, about_us: float) -> float:
        """Time of a call among others back to back, launching included."""
        count = max(5, min(20, round(400.0 / max(about_us, 1.0))))
        start, end = _events()
        for _ in range(self.LEAD):
            run()
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0 / count

    def calmer(self) -> None:
        """A device that nobody else uses has no other."""

    def once(self, run: Run) -> float:
        """One call from the host's view, until the device is done."""
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        run()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - started) / 1000.0


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


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
