"""What a device needs for a call, without the host that launches it: replays of a CUDA graph that holds many calls.

Between two events around one launch lies what the host needs to launch, wherever that is longer: 5 us for a kernel of
two, 25 on a slow host. A graph launches by itself, and what is left between two of its kernels is about 1 us (H200).

The calls of a graph take turns through copies of their inputs and keep their results apart, so that a call does not
find its tensors in the L2 cache: *cold*. Small calls would need thousands of copies for that, and find in the cache
what lies there in a model, too: *warm*.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from layerzero.core.capturing import capturing

Run = Callable[[], object]

TARGET_US = 400.0
"""What a replay should last: ten times what launching a graph takes on a slow host."""

MOST_CALLS = 128
"""Calls of a graph at most: their results live as long as the graph does."""

FEWEST_CALLS = 4

MOST_COPIES = 64
"""Copies of a call's inputs at most."""

LEAD = 2
"""Replays before the first event: the queue is full by then."""


class Device(Protocol):
    """What captures and times; a test brings its own."""

    def captured(self, calls: Sequence[Run]) -> Run:
        """Calls in their order as one replay. Raises whatever capturing raises, RuntimeError mostly."""

    def elapsed_us(self, run: Run, times: int) -> float:
        """Microseconds of so many runs back to back, behind a queue that is full."""


class Graphs:
    """CUDA graphs on the current device."""

    def captured(self, calls: Sequence[Run], before: Run | None = None) -> Run:
        """Capture calls; what they return is kept, so that none writes where another did.

        ``before`` runs ahead of the capture, in place of the first of them.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            (before or calls[0])()  # workspaces and tuned choices come into being before the capture
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
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(LEAD):
            run()
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What was found about one callable.

    Attributes:
        time_us: microseconds of a call, the median; None where it could not be captured.
        calls: in the graph.
        copies: of the inputs through which they took turns.
        samples: microseconds of a call, in order.
        problem: why there is no time.
    """

    time_us: float | None
    calls: int = 0
    copies: int = 1
    samples: tuple[float, ...] = field(default=(), repr=False)
    problem: str = ""


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
    runs: Mapping[str, Sequence[Run]],
    *,
    about_us: Mapping[str, float] | None = None,
    samples: int = 10,
    device: Device | None = None,
    seed: int = 0,
) -> dict[str, DeviceTime]:
    """Time what the device needs for calls, side by side: a sample of each in turn, in an order drawn anew.

    Args:
        runs: of each name the same call, once for each copy of its inputs; they have run before.
        about_us: how long a call takes, roughly; measured by a graph of a few calls where nothing is said.
        samples: replays' samples of each.
        device: CUDA graphs if None.
        seed: draws the order.
    """
    graphs = device or Graphs()
    ready: dict[str, tuple[Run, int]] = {}
    problems: dict[str, str] = {}
    for name, copies in runs.items():
        try:
            known = (about_us or {}).get(name)
            few = (
                graphs.elapsed_us(graphs.captured([copies[0]] * FEWEST_CALLS), 1) / FEWEST_CALLS
                if known is None
                else known
            )
            calls = _calls(few, len(copies))
            ready[name] = graphs.captured([copies[number % len(copies)] for number in range(calls)]), calls
        except Exception as error:  # noqa: BLE001  # what cannot be captured is a finding, and is told
            problems[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    taken: dict[str, list[float]] = {name: [] for name in ready}
    order = random.Random(seed)  # noqa: S311  # an order, no secret
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


def device_time_us(
    run: Run,
    *,
    others: Sequence[Run] = (),
    about_us: float | None = None,
    samples: int = 10,
    device: Device | None = None,
) -> float | None:
    """Microseconds that the device needs for a call; None where it cannot be captured into a CUDA graph.

    Args:
        run: the call; it has run before.
        others: the same call on copies of its inputs, of which the graph's calls take turns.
        about_us: how long a call takes, roughly.
        samples: of the median.
        device: CUDA graphs if None.
    """
    known = None if about_us is None else {"": about_us}
    return device_times({"": (run, *others)}, about_us=known, samples=samples, device=device)[""].time_us


def _calls(about_us: float, copies: int) -> int:
    """Calls of a graph: as many as fill its time, every copy as often as the others."""
    wanted = min(max(FEWEST_CALLS, round(TARGET_US / max(about_us, 0.1))), MOST_CALLS)
    return max(1, -(-wanted // copies)) * copies
