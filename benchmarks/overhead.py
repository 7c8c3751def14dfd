"""What a call costs beside its kernel, next to what else dispatches; what a miss, a cold call and threads cost.

The kernel does nothing. Candidates are interleaved in one process, each figure is the median over the rounds of the
time beyond a direct call of that kernel in the same round; ratios mean more than nanoseconds.

    python benchmarks/overhead.py                     table, and comparison with the last recorded run
    python benchmarks/overhead.py --record            append this run to benchmarks/records/overhead.json
    python benchmarks/overhead.py --markdown --png    write docs/measurements/overhead.md and .png
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import overhead_peers
import overhead_report
import torch
from overhead_timing import cold_ns, over, rounds_ns, scaling

import layerzero as lz
from layerzero.engine import accelerator
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS

RECORDS = Path(__file__).parent / "records" / "overhead.json"
CHART = overhead_report.PAGE.with_suffix(".png")
DIRECT = "the kernel itself"
OPERATION = "attention.standard.prefill"


def noop(query: Any, key: Any, value: Any, *, causal: bool = False, scale: float | None = None) -> Any:
    """Stand in for a kernel."""
    return query


@contextmanager
def registered() -> Iterator[None]:
    """The kernel that does nothing wins every choice inside."""
    lz.register_kernel(OPERATION, "user.noop", priority=100, grad=True, handles_negated=True)(noop)
    try:
        yield
    finally:
        lz.unregister_kernel("user.noop")


def tensors() -> tuple[torch.Tensor, ...]:
    """Query, key and value of the calls."""
    return tuple(torch.randn(1, 4, 2, 8) for _ in range(3))


def ways(query: Any, key: Any, value: Any) -> dict[str, Callable[[], Any]]:
    """The direct call, and LayerZero's as users write them."""
    python = CALLS["attention"].python
    bound = lz.bind(lz.attention, query, key, value, causal=True, layout="BSHD")
    unguarded = lz.bind(lz.attention, query, key, value, causal=True, layout="BSHD", guard=False)
    calls: dict[str, Callable[[], Any]] = {
        DIRECT: lambda: noop(query, key, value, causal=True, scale=None),
        "lz.attention": lambda: lz.attention(query, key, value, causal=True, layout="BSHD"),
        "lz.attention in Python": lambda: python(query, key, value, causal=True, layout="BSHD"),
        "lz.bind": lambda: bound(query, key, value),
        "lz.bind, guard=False": lambda: unguarded(query, key, value),
    }
    for call in calls.values():
        call()
        call()
    return calls


def two_sizes_in_turn() -> Callable[[], Any]:
    """A call whose length is another one each time."""
    turns = [torch.randn(1, length, 2, 8) for length in (4, 7)]

    def in_turn() -> Any:
        turns.reverse()
        return lz.attention(turns[0], turns[0], turns[0], causal=True, layout="BSHD")

    return in_turn


def hits(rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """Nanoseconds over the direct call, and the peers that are not here with the reason."""
    query, key, value = tensors()
    with registered():
        with torch.no_grad():
            peers, missing = overhead_peers.installed(query, key, value, noop)
            calls = ways(query, key, value) | {"lz.attention, two sizes in turn": two_sizes_in_turn()} | peers
            found = over(rounds_ns(calls, rounds), DIRECT)
            with lz.scope(debug=False):
                scoped = {DIRECT: calls[DIRECT], "lz.attention in a scope": calls["lz.attention"]}
                found |= over(rounds_ns(scoped, rounds), DIRECT)
        graded = query.clone().requires_grad_()
        with_grad = over(rounds_ns(ways(graded, key, value), rounds), DIRECT)
        found |= {f"{name}, grad on": each for name, each in with_grad.items()}
        custom = torch.ops.layerzero_bench.custom
        both = {DIRECT: lambda: noop(graded, key, value, causal=True, scale=None)}
        both["torch.library.custom_op, grad on"] = lambda: custom(graded, key, value, True)
        found |= over(rounds_ns(both, rounds), DIRECT)
    return found, missing


def misses_us(rounds: int, candidates: int) -> dict[str, float]:
    """Microseconds of choosing anew among so many kernels, the legal ones first, without running the chosen one."""
    query, key, value = tensors()
    found: dict[str, float] = {}
    with registered(), torch.no_grad():
        lz.attention(query, key, value, causal=True, layout="BSHD")
        report = lz.explain("attention", query, key, value, causal=True, layout="BSHD")
        kept = [each.kernel for each in report.candidates][:candidates]
        call, registry = CALLS["attention"], ENGINE.registry
        cache, before = call.dispatcher.cache, registry.candidates
        registry.candidates = lambda _operation: kept
        try:
            for name, way in (("native", lz.attention), ("Python", call.python)):

                def miss(way: Any = way) -> None:
                    cache.current.clear()
                    way(query, key, value, causal=True, layout="BSHD")

                times = rounds_ns({name: miss, DIRECT: lambda: None}, rounds, repeat=5)
                found[name] = over(times, DIRECT)[name] / 1000
        finally:
            registry.candidates = before
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Everything, as plain values."""
    over_ns, missing = hits(rounds)
    query, key, value = tensors()
    with registered():
        with torch.no_grad():
            calls = ways(query, key, value)
            custom = torch.ops.layerzero_bench.custom
            cold = cold_ns(calls | {"torch.library.custom_op": lambda: custom(query, key, value, True)})
        threads = scaling(calls["lz.attention"])
    return {
        "over_ns": {name: round(each, 1) for name, each in over_ns.items()},
        "missing": missing,
        "cold_ns": {name: round(each) for name, each in cold.items()},
        "threads": {str(number): round(each, 3) for number, each in threads.items()},
        "miss_us": {name: round(each, 1) for name, each in misses_us(rounds, 10).items()},
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hit_path": f"C, {accelerator.HOT.reader()}" if accelerator.HOT is not None else accelerator.ABSENT,
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    """Measure, print, compare and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=151)
    parser.add_argument("--json", action="store_true", help="print plain values and nothing else")
    parser.add_argument("--record", type=Path, nargs="?", const=RECORDS, help="append this run to a file of runs")
    parser.add_argument("--markdown", action="store_true", help="write docs/measurements/overhead.md")
    parser.add_argument("--png", type=Path, nargs="?", const=CHART, help="draw the bars, which needs matplotlib")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a second thread would wait for cores that others use
    run = measure(options.rounds)
    if options.json:
        print(json.dumps(run))
        return
    path = options.record or RECORDS
    recorded = json.loads(path.read_text()) if path.exists() else []
    same = [each for each in recorded if each["machine"]["cpu"] == run["machine"]["cpu"]]
    overhead_report.show(run, (same or [None])[-1])
    if options.record:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([*recorded, run], indent=1) + "\n")
        print(f"recorded in {path}")
    if options.markdown:
        print(f"wrote {overhead_report.write_markdown(run)}")
    if options.png:
        overhead_report.write_chart(run, options.png)
        print(f"wrote {options.png}")


if __name__ == "__main__":
    main()
