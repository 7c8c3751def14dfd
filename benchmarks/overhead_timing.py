"""Timing calls of a few hundred nanoseconds: interleaved rounds, differences, threads, cold caches."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Any]

SWEEP_BYTES = 32 * 2**20
"""What is written between two cold calls: more than the second-level cache and a share of the third."""


def rounds_ns(calls: Mapping[str, Call], rounds: int, repeat: int = 100) -> dict[str, list[float]]:
    """Nanoseconds a call in each round; all calls take turns, so that a loaded machine is loaded for each of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(repeat):
            call()
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                for _ in range(repeat // 3):  # what the others pushed out of the caches comes back; cold_ns times that
                    call()
                started = time.perf_counter_ns()
                for _ in range(repeat):
                    call()
                times[name].append((time.perf_counter_ns() - started) / repeat)
            gc.collect(0)
    finally:
        if collects:
            gc.enable()
    return times


def over(times: Mapping[str, list[float]], direct: str) -> dict[str, float]:
    """Median over the rounds of each call's time beyond the direct call of the same round."""
    return {
        name: statistics.median(mine - base for mine, base in zip(each, times[direct], strict=True))
        for name, each in times.items()
        if name != direct
    }


def threads_ns(call: Call, threads: int, calls: int = 40_000) -> float:
    """Wall nanoseconds a call with this many threads calling at once, all calls counted together."""
    barrier = threading.Barrier(threads + 1)

    def work() -> None:
        barrier.wait()
        with torch.no_grad():
            for _ in range(calls // threads):
                call()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    started = time.perf_counter_ns()
    for worker in workers:
        worker.join()
    return (time.perf_counter_ns() - started) / (calls // threads * threads)


def scaling(call: Call, rounds: int = 7) -> dict[int, float]:
    """Wall time a call at 1, 2, 4 and 8 threads as a multiple of one thread's; medians of interleaved rounds."""
    times: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
    for _ in range(rounds):
        for threads, each in times.items():
            each.append(threads_ns(call, threads))
    one = statistics.median(times[1])
    return {threads: statistics.median(each) / one for threads, each in times.items()}


def cold_ns(calls: Mapping[str, Call], samples: int = 150) -> dict[str, float]:
    """Median nanoseconds of one call after 32 MiB of other memory were written, less that of an empty call."""
    swept = torch.zeros(SWEEP_BYTES // 4)
    timed: dict[str, Call] = {"nothing": lambda: None, **calls}
    times: dict[str, list[int]] = {name: [] for name in timed}
    for _ in range(samples):
        for name, call in timed.items():
            swept.add_(1)
            started = time.perf_counter_ns()
            call()
            times[name].append(time.perf_counter_ns() - started)
    nothing = statistics.median(times["nothing"])
    return {name: statistics.median(times[name]) - nothing for name in calls}
