"""What a call costs beside its kernel: nanoseconds over calling the kernel directly, and what a miss costs.

The kernel does nothing, so that only dispatch is timed. Candidates are interleaved, and each figure is the smallest of
many rounds, because a loaded machine only ever adds. Ratios between lines of one run mean more than the numbers.

    python benchmarks/overhead.py [--json] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

import layerzero as lz
from layerzero.engine import accelerator
from layerzero.engine.functions import CALLS


def noop(query: Any, key: Any, value: Any, *, causal: bool = False, scale: float | None = None) -> Any:
    """Stand in for a kernel."""
    return query


def smallest_ns(calls: dict[str, Callable[[], Any]], rounds: int, repeat: int = 500) -> dict[str, float]:
    """Time every call in turn, round after round; the smallest time of one call, less that of an empty one."""
    timed = {"nothing": lambda: None, **calls}
    best = dict.fromkeys(timed, float("inf"))
    for call in timed.values():
        for _ in range(repeat):
            call()
    for _ in range(rounds):
        for name, call in timed.items():
            started = time.perf_counter_ns()
            for _ in range(repeat):
                call()
            best[name] = min(best[name], (time.perf_counter_ns() - started) / repeat)
    return {name: best[name] - best["nothing"] for name in calls}


def _plan(rows: tuple[Any, ...]) -> Callable[[], Any]:
    """The kept plan of a call, called as a hit calls it."""
    plan = next(plan for plan in CALLS["attention"].dispatcher.cache.current.values() if plan.kernel.id == "user.noop")
    return lambda: plan.run(*rows)


def hits(rounds: int) -> dict[str, float]:
    """Times of calls that were chosen before, beside what else dispatches."""
    declared = {"priority": 100, "grad": True, "handles_negated": True}
    lz.register_kernel("attention.standard.prefill", "user.noop", **declared)(noop)
    query, key, value = (torch.randn(1, 4, 2, 8) for _ in range(3))
    short, longer = (torch.randn(1, length, 2, 8) for length in (4, 7))
    graded = query.clone().requires_grad_()
    library = torch.library.Library("layerzero_bench", "DEF")
    library.define("noop(Tensor q, Tensor k, Tensor v, bool causal=True) -> Tensor")
    library.impl("noop", lambda *tensors, **_: tensors[0].view_as(tensors[0]), "CompositeExplicitAutograd")

    @torch.library.custom_op("layerzero_bench::custom", mutates_args=())
    def custom(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
        return q.clone()

    python_operator = torch.ops.layerzero_bench.noop.default
    addition, small = torch.ops.aten.add.Tensor, torch.zeros(1)
    python = CALLS["attention"].python
    turns = [short, longer]

    def in_turn() -> Any:
        turns.reverse()
        return lz.attention(turns[0], turns[0], turns[0], layout="BSHD")

    def attention(q: torch.Tensor) -> Callable[[], Any]:
        return lambda: lz.attention(q, key, value, layout="BSHD")

    with torch.no_grad():
        for way in (lz.attention, lz.attention, python):  # the first loads the declarations, which empties the tables
            way(query, key, value, layout="BSHD")
        arguments = (query, key, value, True, None, "BSHD", None, 0.0, None, None, None, None, None, False)
        times = smallest_ns(
            {
                "the kernel itself": lambda: noop(query, key, value, causal=True, scale=None),
                "its plan": _plan(arguments),
                "lz.attention": attention(query),
                "lz.attention, two sizes in turn": in_turn,
                "lz.attention in Python": lambda: python(query, key, value, layout="BSHD"),
                "a C++ operator (aten.add)": lambda: addition(small, small),
                "a Python operator (torch.library)": lambda: python_operator(query, key, value),
                "torch.library.custom_op": lambda: custom(query, key, value),
            },
            rounds,
        )
        with lz.scope(debug=False):
            times |= smallest_ns({"lz.attention in a scope": attention(query)}, rounds)
    times |= smallest_ns(
        {
            "lz.attention, grad on": attention(graded),
            "lz.attention in Python, grad on": lambda: python(graded, key, value, layout="BSHD"),
        },
        rounds,
    )
    lz.unregister_kernel("user.noop")
    return times


def miss_us(rounds: int) -> float:
    """Time of choosing anew among the kernels of this machine and one that does nothing, which wins."""
    lz.register_kernel("attention.standard.prefill", "user.noop", priority=100)(noop)
    query, key, value = (torch.randn(1, 4, 2, 8) for _ in range(3))
    cache = CALLS["attention"].dispatcher.cache

    def miss() -> None:
        cache.current.clear()
        lz.attention(query, key, value, layout="BSHD")

    with torch.no_grad():
        best_us = smallest_ns({"miss": miss}, rounds, repeat=20)["miss"] / 1000
    lz.unregister_kernel("user.noop")
    return best_us


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    times, chosen_us = hits(options.rounds), miss_us(options.rounds)
    kernels = len(lz.list_kernels("attention.standard.prefill")) + 1
    if options.json:
        print(json.dumps({"ns": times, "miss_us": chosen_us, "candidates": kernels, "torch": torch.__version__}))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, smallest of {options.rounds} rounds")
    print(f"hit path: {'C' if accelerator.HOT is not None else 'Python, ' + accelerator.ABSENT}")
    plan, operator, custom = (
        times[name] for name in ("its plan", "a C++ operator (aten.add)", "torch.library.custom_op")
    )
    print(f"{'':36}{'ns a call':>12}{'over the plan':>16}{'of a C++ op':>14}{'of custom_op':>14}")
    for name, time_ns in times.items():
        over = time_ns - plan
        print(f"{name:36}{time_ns:12.0f}{over:16.0f}{over / operator:14.2f}{over / custom:14.3f}")
    print(f"a miss with {kernels} candidates: {chosen_us:.0f} us")


if __name__ == "__main__":
    main()
