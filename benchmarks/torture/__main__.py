"""What must never happen, tried for as long as wanted: damage, kills, forks, threads at once, bad kernels.

    make torture                                   ten minutes, every part
    make torture TORTURE_S=60 TORTURE_SEED=7
    python benchmarks/torture --only one_bit --times 10000 --seconds 3600
    python benchmarks/torture --part all           the numbers that hold at every time, each as often as it says
    python benchmarks/torture --part files --count 10000
    python benchmarks/torture --part writers --writers 32 --busy 4 --kills 200
    python benchmarks/torture --part threads --threads 16 --seconds 60
    python benchmarks/torture --part forks --count 200
    python benchmarks/torture --part memory        1,000 calls with 2 GB of a GPU left
    python benchmarks/torture --part fuzz --count 1000000 --processes 16

Each file beside this one has parts: functions of a seeded generator, a deadline and how often at most, which return
counts. Each part runs in a process of its own, which is stuck if it lives much longer than its share of the time; with
``--part``, several processes share its tries. Exits with 1 at the first part that found something.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import pkgutil
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import _numbers
from _asked import ASKED, Asked

GRACE_S = 240.0
"""How much longer than its share a part may take: at its end it waits for other processes, on a busy machine."""


class Counts(NamedTuple):
    """What a part found: counts that must be zero, and others."""

    zero: dict[str, int]
    other: dict[str, float]


Part = Callable[[random.Random, float, int | None], tuple[dict[str, int], dict[str, float]]]


def parts() -> Iterator[tuple[str, Part]]:
    """Every part of every file in this folder, by name."""
    for module in sorted(each.name for each in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if not module.startswith("_"):
            for part in importlib.import_module(module).PARTS:
                yield f"{module}.{part.__name__}", part


def inside(wanted: argparse.Namespace) -> None:
    """Run one part and print what it found as the last line."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for field in dataclasses.fields(Asked):
        setattr(ASKED, field.name, json.loads(wanted.asked).get(field.name, field.default))
    part = dict(parts())[wanted.inside]
    draw = random.Random(" ".join(map(str, (ASKED.seed, wanted.inside, *[ASKED.first][: ASKED.first]))))
    found = Counts(*part(draw, time.monotonic() + wanted.seconds, wanted.times))
    print("\n" + json.dumps([dict(found.zero), dict(found.other)]), flush=True)
    os._exit(0)  # threads that are stuck were counted


class Apart:
    """One part in a process of its own."""

    def __init__(self, name: str, seconds: float, times: int | None, asked: dict[str, float]) -> None:
        self.limit = seconds + GRACE_S
        command = [sys.executable, str(Path(__file__).parent), "--inside", name, "--seconds", str(seconds)]
        command += ["--asked", json.dumps(asked), *(["--times", str(times)] if times else [])]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def found(self) -> Counts:
        """What it found, once it ended."""
        child = self.child
        try:
            said, _ = child.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGUSR1)  # where it is
            time.sleep(1.0)
            return Counts({"stuck processes": 1}, {})
        finally:
            self.end()
            child.wait()
            child.stdout.close()
        *before, last = said.strip().splitlines() or [""]
        print("".join(f"   {line}\n" for line in before), end="")
        if child.returncode or not last.startswith("["):
            return Counts({f"ended with {child.returncode}": 1}, {})
        return Counts(*json.loads(last))

    def end(self) -> None:
        """End it, and all that it began."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)


def apart(name: str, seconds: float, wanted: argparse.Namespace) -> Counts:
    """Run one part in a process of its own."""
    return Apart(name, seconds, wanted.times, {**asked_of(wanted), "seed": wanted.seed}).found()


def asked_of(wanted: argparse.Namespace) -> dict[str, float]:
    """What the command line says of the sizes of parts."""
    names = [field.name for field in dataclasses.fields(Asked)]
    return {name: value for name in names if (value := getattr(wanted, name, None)) is not None}


def together(shares: list[tuple[int, int | None]], name: str, seconds: float, asked: dict[str, float]) -> Counts:
    """Run a part in as many processes as there are shares; the first that found something ends the others."""
    zero: Counter[str] = Counter()
    other: Counter[str] = Counter()
    children = [Apart(name, seconds, times, {**asked, "first": first}) for first, times in shares]
    try:
        with ThreadPoolExecutor(len(children)) as pool:
            left = {pool.submit(child.found) for child in children}
            while left and not any(zero.values()):
                done, left = wait(left, return_when=FIRST_COMPLETED)
                for each in done:
                    found = each.result()
                    zero.update(found.zero)
                    other.update({what: value for what, value in found.other.items() if not what.startswith("s the ")})
                    for what, value in found.other.items():
                        if what.startswith("s the "):
                            other[what] = max(other[what], value)
            for child in children:
                child.end()
    finally:
        for child in children:
            child.end()
    return Counts(zero, other)


def told(name: str, found: Counts, started: float, processes: int = 1) -> bool:
    """Print a line of counts; whether anything was found."""
    failed = any(found.zero.values())
    text = ", ".join(f"{value:g} {what}" for what, value in {**found.other, **found.zero}.items())
    where = f" in {processes} processes" if processes > 1 else ""
    print(f"{'FAILED' if failed else 'ok':6} {name}: {text} ({time.monotonic() - started:.0f} s{where})", flush=True)
    return failed


def numbers(wanted: argparse.Namespace) -> int:
    """Show the numbers that were asked for."""
    for number in _numbers.NUMBERS if wanted.part == "all" else [wanted.part]:
        counts = _numbers.counts(number, wanted.count)
        for each, count in zip(_numbers.NUMBERS[number], counts, strict=True):
            started = time.monotonic()
            shares = _numbers.shares(count, wanted.processes if each.split else 1)
            seconds = wanted.seconds if wanted.part != "all" else None
            seconds = seconds or each.seconds or _numbers.MOST_S
            asked = {**each.asked, **asked_of(wanted), "seed": wanted.seed}
            if told(each.part, together(shares, each.part, seconds, asked), started, len(shares)):
                print(f"again: python benchmarks/torture --part {number} --seed {wanted.seed}")
                return 1
    return 0


def main() -> int:
    """Run the parts one after another, each for its share of the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="for all parts together, 600 unless --part says how long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=None, help="how often each part tries, at most")
    parser.add_argument("--only", default="", help="parts whose name has this in it")
    parser.add_argument("--part", choices=["all", *_numbers.NUMBERS], help="show a number that holds at every time")
    parser.add_argument("--count", type=int, help="with --part: how often it is tried; its own count by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="with --part: that share the tries")
    parser.add_argument("--writers", type=int, help="processes that write at once")
    parser.add_argument("--busy", type=int, help="processes that only compute, beside the writers")
    parser.add_argument("--kills", type=int, help="how many writers are killed")
    parser.add_argument("--longest-s", type=float, help="a write that takes longer is counted; 1 with --part")
    parser.add_argument("--threads", type=int, help="threads that call at once")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    parser.add_argument("--asked", default="{}", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.inside:
        inside(wanted)
    if wanted.part:
        return numbers(wanted)
    wanted.seconds = wanted.seconds or 600.0
    chosen = [name for name, _ in parts() if wanted.only in name]
    print(f"seed {wanted.seed}, {wanted.seconds:g} s, {len(chosen)} parts", flush=True)
    for name in chosen:
        started = time.monotonic()
        found = apart(name, wanted.seconds / len(chosen), wanted)
        if told(name, found, started):
            print(f"again: python benchmarks/torture --only {name} --seed {wanted.seed} --seconds {wanted.seconds:g}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
