"""What a call costs more in a process of its own: the same kernel in this process and in another one, in turns.

    python benchmarks/isolation.py [--calls 2000] [--kib 4 64 1024 4096] [--pin]

Prints, for each size of the one large tensor, quantiles of both and the differences of the quantiles, in us. Next to
them stands the time that a copy of so many bytes takes, of which a call makes two; and the same call with its result
copied out of the shared memory, which is a third. This process keeps freed memory, as the other one does: page faults
of the result took 0.6 ms here otherwise.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch

import layerzero as lz
from layerzero.engine.registry import REGISTRY
from layerzero.serving.isolation import kernels
from layerzero.serving.isolation.child import keep_freed_memory

HIDDEN, SHARES = 1024, (0.0, 0.1, 0.25, 0.5)


def quantiles(samples: list[float]) -> list[float]:
    ordered = sorted(samples)
    return [ordered[int(share * (len(ordered) - 1))] for share in SHARES]


def in_turns(ways: dict[str, Callable[[], object]], calls: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(calls):
        for name, way in ways.items():
            began = time.perf_counter_ns()
            way()
            samples[name].append((time.perf_counter_ns() - began) / 1e3)
    return {name: quantiles(each) for name, each in samples.items()}


def measured(kib: int, calls: int, cpus: list[int]) -> None:
    x, weight = torch.randn(kib * 256 // HIDDEN, HIDDEN), torch.ones(HIDDEN)
    facts, kernel = lz.explain("rms_norm", x, weight).facts, REGISTRY.kernel("torch.rms_norm")
    here, apart, copy = kernel.load(facts), kernels.IsolatedKernel(kernel, facts), torch.empty_like(x)
    assert torch.equal(here(x, weight, eps=1e-6), apart(x, weight, eps=1e-6))
    processes = [os.getpid(), *[each.worker.pid for each in kernels.LIBRARIES.values()]]
    for process, cpu in zip(processes, cpus, strict=False):
        os.sched_setaffinity(process, {cpu})
    found = in_turns(
        {
            "in this process": lambda: here(x, weight, eps=1e-6),
            "in its own": lambda: apart(x, weight, eps=1e-6),
            "result copied out": lambda: apart(x, weight, eps=1e-6).clone(),
            "one copy": lambda: copy.copy_(x),
        },
        calls,
    )
    print(f"{kib} KiB  " + " ".join(f"{share:6.0%}" for share in SHARES))
    for name, values in found.items():
        print(f"  {name:25}" + " ".join(f"{value:6.1f}" for value in values))
    for name in ("in its own", "result copied out"):
        more = [that - this for this, that in zip(found["in this process"], found[name], strict=True)]
        print(f"  + {name:23}" + " ".join(f"{value:6.1f}" for value in more))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 64, 1024, 4096])
    parser.add_argument("--pin", action="store_true", help="a CPU each")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    cpus = sorted(os.sched_getaffinity(0)) if wanted.pin else []
    for kib in wanted.kib:
        measured(kib, wanted.calls, cpus)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
