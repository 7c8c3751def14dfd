"""What a call costs beside its kernel: nanoseconds over calling the kernel directly, and what a miss costs.

The kernel does nothing, so that only dispatch is timed. Candidates are interleaved, and each figure is the median of
many rounds, because a loaded machine drifts. Ratios between lines of one run mean more than the numbers.

    python benchmarks/overhead.py [--json] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import layerzero as lz


def noop(query: Any, key: Any, value: Any, *, causal: bool = False, scale: float | None = None) -> Any:
    """Stand in for a kernel."""
    return query


def median_ns(calls: dict[str, Callable[[], Any]], rounds: int, repeat: int = 2000) -> dict[str, float]:
    """Time every call in turn, round after round; return the median time of one call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(repeat):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter_ns()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter_ns() - started) / repeat)
    return {name: statistics.median(each) for name, each in times.items()}


def hits(rounds: int) -> dict[str, float]:
    """Times of calls that were chosen before, beside what else dispatches."""
    lz.register_kernel("attention.standard.prefill", "user.noop", priority=100, grad=True)(noop)
    query, key, value = (torch.randn(1, 4, 2, 8) for _ in range(3))
    graded = query.clone().requires_grad_()
    library = torch.library.Library("layerzero_bench", "DEF")
    library.define("noop(Tensor q, Tensor k, Tensor v, bool causal=True) -> Tensor")
    library.impl("noop", lambda *tensors, **_: tensors[0].view_as(tensors[0]), "CompositeExplicitAutograd")
    python_operator = torch.ops.layerzero_bench.noop.default
    addition = torch.ops.aten.add.Tensor
    small = torch.zeros(1)

    def in_scope() -> dict[str, float]:
        with lz.scope(debug=False):
            call = {"lz.attention in a scope": lambda: lz.attention(query, key, value, layout="BSHD")}
            return median_ns(call, rounds)

    with torch.no_grad():
        times = median_ns(
            {
                "the kernel itself": lambda: noop(query, key, value, causal=True, scale=None),
                "lz.attention": lambda: lz.attention(query, key, value, layout="BSHD"),
                "a C++ operator (aten.add)": lambda: addition(small, small),
                "a Python operator (torch.library)": lambda: python_operator(query, key, value),
            },
            rounds,
        )
        times |= in_scope()
    times |= median_ns({"lz.attention, grad on": lambda: lz.attention(graded, key, value, layout="BSHD")}, rounds)
    lz.unregister_kernel("user.noop")
    return times


def miss_us(rounds: int) -> float:
    """Time of choosing anew, the kernels of this machine as candidates; the kernel's own time is in it."""
    from layerzero.engine.functions import CALLS

    query, key, value = (torch.randn(1, 4, 2, 8) for _ in range(3))
    cache = CALLS["attention"].dispatcher.cache

    def miss() -> None:
        cache.current.clear()
        lz.attention(query, key, value, layout="BSHD")

    with torch.no_grad():
        return median_ns({"miss": miss}, rounds, repeat=100)["miss"] / 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    times, chosen_us = hits(options.rounds), miss_us(options.rounds)
    kernels = len(lz.list_kernels("attention.standard.prefill"))
    if options.json:
        print(json.dumps({"ns": times, "miss_us": chosen_us, "candidates": kernels, "torch": torch.__version__}))
        return
    direct, operator = times["the kernel itself"], times["a Python operator (torch.library)"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, median of {options.rounds} rounds")
    print(f"{'':36}{'ns a call':>12}{'over the kernel':>18}{'of a Python op':>16}")
    for name, time_ns in times.items():
        print(f"{name:36}{time_ns:12.0f}{time_ns - direct:18.0f}{(time_ns - direct) / operator:16.2f}")
    print(f"a miss with {kernels} candidates: {chosen_us:.0f} us")


if __name__ == "__main__":
    main()
