"""What must never happen, tried for as long as wanted: damage, kills, forks, threads at once, bad kernels.

    make torture                                   ten minutes, every part
    make torture TORTURE_S=60 TORTURE_SEED=7
    python benchmarks/torture --only one_bit --times 10000 --seconds 3600

Each file beside this one has parts: functions of a seeded generator, a deadline and how often at most, which return
counts. Each part runs in a process of its own, which is stuck if it lives much longer than its share of the time. Exits
with 1 at the first part that found something.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

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
    part = dict(parts())[wanted.inside]
    draw = random.Random(f"{wanted.seed} {wanted.inside}")
    found = Counts(*part(draw, time.monotonic() + wanted.seconds, wanted.times))
    print("\n" + json.dumps([dict(found.zero), dict(found.other)]), flush=True)
    os._exit(0)  # threads that are stuck were counted


def apart(name: str, seconds: float, wanted: argparse.Namespace) -> Counts:
    """Run one part in a process of its own."""
    command = [sys.executable, str(Path(__file__).parent), "--inside", name, "--seconds", str(seconds)]
    command += ["--seed", str(wanted.seed), *(["--times", str(wanted.times)] if wanted.times else [])]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, _ = child.communicate(timeout=seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGUSR1)  # where it is
        time.sleep(1.0)
        return Counts({"stuck processes": 1}, {})
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    *before, last = said.strip().splitlines() or [""]
    print("".join(f"   {line}\n" for line in before), end="")
    if child.returncode or not last.startswith("["):
        return Counts({f"ended with {child.returncode}": 1}, {})
    return Counts(*json.loads(last))


def main() -> int:
    """Run the parts one after another, each for its share of the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all parts together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=None, help="how often each part tries, at most")
    parser.add_argument("--only", default="", help="parts whose name has this in it")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.inside:
        inside(wanted)
    chosen = [name for name, _ in parts() if wanted.only in name]
    print(f"seed {wanted.seed}, {wanted.seconds:g} s, {len(chosen)} parts", flush=True)
    for name in chosen:
        started = time.monotonic()
        found = apart(name, wanted.seconds / len(chosen), wanted)
        failed = any(found.zero.values())
        text = ", ".join(f"{value:g} {what}" for what, value in {**found.other, **found.zero}.items())
        print(f"{'FAILED' if failed else 'ok':6} {name}: {text} ({time.monotonic() - started:.0f} s)", flush=True)
        if failed:
            print(f"again: python benchmarks/torture --only {name} --seed {wanted.seed} --seconds {wanted.seconds:g}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
