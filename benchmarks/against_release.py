"""This checkout beside the last release: what moved, of calls and of what they cost beside their kernels.

    python benchmarks/against_release.py --release dist/layerzero-0.1.0-py3-none-any.whl
    python benchmarks/against_release.py --release git+file://$PWD@v0.1.0 --pairs 7

The release is what pip can install: a wheel, a tag, ``layerzero==0.1.0``. It gets an environment of its own that sees
this one's torch and libraries. Whole processes run in pairs, the first place in turn: ``layerzero bench``, then
``overhead.py``. A time is taken as a multiple of torch's own function in the same process, where there is one, so that
a machine that others load moves both. *Moved* is what every pair shows on the same side by more than 5 %. *Gone* is a
case that only the release has. Exits with 1 if something became slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOVED = 0.05
"""What every pair must show; medians of two processes of one version differ by 1 to 3 % on an idle machine."""
COST = "cost of a call"

Case = tuple[str, str]
Times = dict[Case, tuple[float, float]]
"""Operation and case: the time, and what it is compared by."""


@dataclass(frozen=True)
class Row:
    """One case: times of the middle pair, the median of the pairs' ratios, and how far these lie apart."""

    case: Case
    before: float
    after: float
    ratio: float
    noise: float
    moved: bool


def compared(pairs: Sequence[tuple[Times, Times]]) -> list[Row]:
    """Compare what all pairs have; the largest change first."""
    rows = []
    shared = set.intersection(*(set(times) for pair in pairs for times in pair))
    for case in sorted(shared):
        ratios = sorted(after[case][1] / before[case][1] for before, after in pairs)
        ratio = statistics.median(ratios)
        moved = ratios[0] > 1 + MOVED or ratios[-1] < 1 / (1 + MOVED)
        before, after = (statistics.median(pair[side][case][0] for pair in pairs) for side in (0, 1))
        rows.append(Row(case, before, after, ratio, (ratios[-1] - ratios[0]) / 2 / ratio, moved and len(pairs) > 1))
    return sorted(rows, key=lambda row: -max(row.ratio, 1 / row.ratio))


def gone(pairs: Sequence[tuple[Times, Times]]) -> list[Case]:
    """The cases that the release has and this checkout in no process."""
    before, after = (set().union(*(pair[side] for pair in pairs)) for side in (0, 1))
    return sorted(before - after)


def page(rows: Sequence[Row], head: str, pairs: int, lost: Sequence[Case] = ()) -> str:
    """One page of what moved and what is gone."""
    moved = [row for row in rows if row.moved]
    slower = sum(row.ratio > 1 for row in moved)
    lines = ["# Against the last release", "", head, ""]
    lines.append(f"{len(rows)} cases, {pairs} pairs: {slower} slower, {len(moved) - slower} faster, the others within.")
    if moved:
        lines += ["", "| operation | case | before us | after us | ratio | noise |", "|---|---|---|---|---|---|"]
    for row in moved:
        times = f"{row.before:.2f} | {row.after:.2f} | {row.ratio:.2f} | {row.noise:.0%}"
        lines.append(f"| {row.case[0]} | {row.case[1]} | {times} |")
    if lost:
        lines += ["", f"Gone: only the release has them ({len(lost)}):", ""]
        lines += [f"- {operation}: {case}" for operation, case in lost]
    return "\n".join(lines) + "\n"


def install(release: str, folder: Path) -> Path:
    """Make the release's environment. Returns: its interpreter."""
    venv.create(folder, clear=True, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", release], check=True)
    inside = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (inside / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind the release's own
    return python


@contextlib.contextmanager
def _environment(path: str) -> Iterator[dict[str, str]]:
    """Neither side finds what the other, or an earlier process, learnt."""
    with tempfile.TemporaryDirectory() as cache:
        yield os.environ | {"PYTHONPATH": path, "LAYERZERO_CACHE_DIR": cache}


def told(command: Sequence[Any], path: str) -> Any:
    """The JSON that a process prints, whatever its exit code says. Raises: SystemExit where it prints none."""
    with _environment(path) as environment:
        done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"wanted JSON of {' '.join(map(str, command))}, got exit code {done.returncode}") from None


def of_bench(answer: Mapping[str, Any]) -> Times:
    """The time of the chosen kernel of each call."""
    found: Times = {}
    for call in answer["calls"]:
        for line in call["kernels"]:
            time_us = line["median_us"] if line["device_us"] is None else line["device_us"]
            if line["chosen"] and time_us is not None:
                over_torch = line["against_torch"]
                case = call["name"].removeprefix(call["operation"]).strip()
                found[call["operation"], case] = (time_us, 1 / over_torch if over_torch else time_us)
    return found


def of_overhead(answer: Mapping[str, Any]) -> Times:
    """What LayerZero adds to a call, in microseconds."""
    found = {name: ns / 1000 for name, ns in answer["over_ns"].items() if name.startswith("lz.")}
    found |= {f"a miss, {name}": us for name, us in answer["miss_us"].items()}
    return {(COST, name): (us, us) for name, us in found.items() if us > 0}


def measured(python: Path, path: str, options: argparse.Namespace) -> Times:
    """All times of one side, each command in a process of its own."""
    found: Times = {}
    for operation in options.operations:
        command = [python, "-m", "layerzero", "bench", operation, "--json", "--budget-s", f"{options.budget_s:g}"]
        found |= of_bench(told(command, path))
    command = [python, ROOT / "benchmarks" / "overhead.py", "--json", "--rounds", str(options.rounds)]
    return found | of_overhead(told(command, path))


def main() -> int:
    """Install, measure in turn, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", required=True, help="what pip installs: a wheel, git+file://FOLDER@TAG")
    parser.add_argument("--operations", nargs="*", default=["attention", "norm.*", "linear"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=60, help="of each operation in each process")
    parser.add_argument("--rounds", type=int, default=31, help="of overhead.py")
    parser.add_argument("--page", type=Path, default=ROOT / "build" / "against_release.md")
    options = parser.parse_args()
    release = install(options.release, ROOT / "build" / "release")
    sides = [(release, ""), (Path(sys.executable), str(ROOT / "src"))]
    asked = "import json, layerzero as lz; print(json.dumps([lz.__file__, lz.doctor().versions]))"
    heads = []
    for python, path in sides:
        place, versions = told([python, "-c", asked], path)
        heads.append(f"{versions['layerzero']} in {Path(place).parent}, hit path {versions['hit path']}")
    pairs = []
    for number in range(options.pairs):
        order = sides if number % 2 == 0 else sides[::-1]
        times = [measured(*side, options) for side in order]
        pairs.append((times[0], times[1]) if number % 2 == 0 else (times[1], times[0]))
        print(f"pair {number + 1} of {options.pairs}", file=sys.stderr, flush=True)
    rows = compared(pairs)
    text = page(rows, f"Before: {heads[0]}. After: {heads[1]}.", len(pairs), gone(pairs))
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(text)
    print(text)
    return int(not rows or any(row.moved and row.ratio > 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
