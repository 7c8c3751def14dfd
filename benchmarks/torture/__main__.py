"""What must never happen, tried for as long as wanted: damage, kills, writers beside busy processes.

    python benchmarks/torture                      ten minutes, every part
    python benchmarks/torture --only one_bit --times 10000 --seconds 3600
    python benchmarks/torture --seed 7

Each file beside this one has parts: functions of a seeded generator, a deadline and how often at most, which return
counts. Exits with 1 if one of those that must stay zero did not.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


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


def main() -> int:
    """Run the parts one after another, each for its share of the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all parts together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=None, help="how often each part tries, at most")
    parser.add_argument("--only", default="", help="parts whose name has this in it")
    wanted = parser.parse_args()
    chosen = [(name, part) for name, part in parts() if wanted.only in name]
    failed = False
    for name, part in chosen:
        started = time.monotonic()
        found = Counts(*part(random.Random(wanted.seed), started + wanted.seconds / len(chosen), wanted.times))
        failed |= any(found.zero.values())
        text = ", ".join(f"{value:g} {what}" for what, value in {**found.other, **found.zero}.items())
        print(f"{'FAILED' if any(found.zero.values()) else 'ok':6} {name}: {text} ({time.monotonic() - started:.0f} s)")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
