"""Threads that do everything at once, and children that are forked beside them."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from _asked import ASKED
from _norm import register
from _norm import right as right_norm
from keeping import Found, cache, facts, tries

import layerzero as lz
from layerzero import _assembly
from layerzero.core.evidence import Measurement
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY

STUCK_S = 60
"""Far more than any of it takes, on a machine that does nothing else and on a busy one."""

SHAPES = [(rows, width) for rows in (1, 3, 8, 64) for width in (8, 64, 100, 1024)]
NORMS = {shape: (torch.randn(*shape), torch.randn(shape[1])) for shape in SHAPES}
RIGHT = {
    shape: torch.nn.functional.rms_norm(data, (shape[1],), weight, 1e-6) for shape, (data, weight) in NORMS.items()
}
QUERIES = [torch.randn(1, length, 4, 64) for length in (1, 5, 16)]
ATTENDED = [
    torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2),) * 3, is_causal=True).transpose(1, 2)
    for each in QUERIES
]


def right(draw: random.Random) -> bool:
    """Make one call of those whose results are known; whether it gave the right one."""
    if draw.random() < 0.5:
        shape = draw.choice(SHAPES)
        return torch.allclose(lz.rms_norm(*NORMS[shape]), RIGHT[shape], atol=1e-4)
    number = draw.randrange(len(QUERIES))
    return torch.allclose(lz.attention(*(QUERIES[number],) * 3, layout="BSHD"), ATTENDED[number], atol=1e-4)


def settings(draw: random.Random) -> None:
    lz.configure(prefer=draw.choice([["torch"], ["zentorch"], []]), deny=draw.choice([[], ["onnxruntime"]]))


def locks(draw: random.Random) -> None:
    lz.lock("norm.rms", "torch.rms_norm", "select")
    time.sleep(0.001)
    lz.unlock("norm.rms")


def freezes(draw: random.Random) -> None:
    lz.freeze()
    time.sleep(0.003)
    lz.thaw()


def registers(draw: random.Random) -> None:
    name = f"torture.k{draw.getrandbits(60)}"
    register(name, right_norm, 90)
    time.sleep(0.002)
    lz.unregister_kernel(name)


def scopes(draw: random.Random) -> None:
    with lz.scope(prefer_sources=["torch"]), lz.deterministic():
        lz.rms_norm(*NORMS[3, 64])


def questions(draw: random.Random) -> None:
    lz.explain("rms_norm", *NORMS[3, 64])
    lz.doctor()


def recordings(draw: random.Random) -> None:
    with lz.record():
        time.sleep(0.003)


def traces(draw: random.Random) -> None:
    class Norm(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return lz.rms_norm(*NORMS[8, 64])

    assert [row.operation for row in lz.trace(Norm()).rows] == ["norm.rms"]


def writes(draw: random.Random) -> None:
    asked, kernel = facts(draw.randrange(1, 500)), REGISTRY.kernel("torch.rms_norm")
    ENGINE.ledger.record_time(kernel, asked, Measurement(draw.uniform(1.0, 9.0), 1.0, 0.0, 20))


def first_runs(draw: random.Random) -> None:
    with lz.scope(locks={"norm.rms": "torch.rms_norm"}):
        lz.rms_norm(torch.empty(1 << draw.randrange(12), 64), NORMS[8, 64][1])


WORK = (settings, locks, freezes, registers, scopes, questions, recordings, traces, writes, first_runs)


class Crowd:
    """Threads that do some work until they are told to stop."""

    def __init__(self, draw: random.Random, work: tuple[Callable[[random.Random], None], ...], callers: int) -> None:
        self.zero = Counter({"wrong results": 0, "calls raised": 0, "threads stuck": 0})
        self.done: Counter[str] = Counter()
        self.stop = threading.Event()
        jobs = [self.calls] * callers + list(work)
        self.threads = [
            threading.Thread(target=self.loop, args=(each, random.Random(draw.random())), daemon=True) for each in jobs
        ]
        for thread in self.threads:
            thread.start()

    def calls(self, draw: random.Random) -> None:
        if not right(draw):
            self.zero["wrong results"] += 1

    def loop(self, work: Callable[[random.Random], None], draw: random.Random) -> None:
        while not self.stop.is_set():
            try:
                work(draw)
                self.done[work.__name__] += 1
            except BaseException:  # noqa: BLE001  # this is what is counted
                self.zero["calls raised"] += 1
                traceback.print_exc()
            if work != self.calls:
                time.sleep(0.002)

    def end(self) -> None:
        self.stop.set()
        until = time.monotonic() + STUCK_S
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.zero["threads stuck"] = sum(thread.is_alive() for thread in self.threads)


def begin() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ENGINE.ledger = _assembly.ledger()
    right(random.Random(0))


def threads(draw: random.Random, until: float, times: int | None) -> Found:
    """Callers beside threads that change everything that they depend on."""
    with cache():
        begin()
        crowd = Crowd(draw, WORK, ASKED.threads)
        while time.monotonic() < until and not any(crowd.zero.values()):
            time.sleep(0.1)
        crowd.end()
        lz.configure(prefer=None, deny=None)
    return crowd.zero, crowd.done


def forks(draw: random.Random, until: float, times: int | None) -> Found:
    """Children of a process whose other threads are at work; torch's kernels alone, whose locks survive a fork."""
    zero = Counter({"children stuck": 0, "children that failed": 0, "wrong results": 0})
    other: Counter[str] = Counter({"children": 0})
    with cache():
        begin()
        lz.configure(allow=["torch"])
        crowd = Crowd(draw, (questions, writes, first_runs, recordings), 3)
        for number in tries(until, times, zero):
            child = os.fork()
            if child == 0:
                grow_up(random.Random(ASKED.first + number))
            _, status = os.waitpid(child, 0)
            other["children"] += 1
            zero["children stuck"] += os.WIFSIGNALED(status)
            zero["wrong results"] += os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2
            zero["children that failed"] += os.WIFEXITED(status) and os.WEXITSTATUS(status) == 1
        crowd.end()
        lz.configure(allow=None)
    return {**zero, **{f"{what} in the parent": count for what, count in crowd.zero.items()}}, other | crowd.done


def grow_up(draw: random.Random) -> None:
    """What a forked child does, until it ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(STUCK_S)
    faulthandler.dump_traceback_later(STUCK_S * 0.9)  # where it is stuck
    try:
        fine = all(right(draw) for _ in range(4))
        lz.rms_norm(torch.empty(draw.randrange(1, 9999), 64), NORMS[8, 64][1])
        lz.configure(tune_samples=draw.randrange(5, 50))
        questions(draw)
        writes(draw)
        first_runs(draw)
        os._exit(0 if fine else 2)
    except BaseException:  # noqa: BLE001  # told, and counted by its parent
        traceback.print_exc()
        os._exit(1)


PARTS = (threads, forks)
