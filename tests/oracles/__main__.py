"""Make random calls of every function and compare each with numpy: ``PYTHONPATH=tests python -m oracles``."""

from __future__ import annotations

import argparse
import sys

from layerzero.testing import fuzz
from oracles import truth


def main() -> None:
    parser = argparse.ArgumentParser(prog="oracles", description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--call", type=int, help="one call of a run again, on every kernel")
    asked = parser.parse_args()

    def progress(report: fuzz.FuzzReport) -> None:
        sys.stderr.write(f"{report.calls} of {asked.calls} calls, {len(report.failures)} wrong\n")

    if asked.call is not None:
        report = fuzz.replay(asked.seed, asked.call, truth=truth)
    else:
        report = fuzz.run(asked.calls, asked.seed, progress=progress, truth=truth)
    sys.stdout.write(str(report).replace("with float64", "with numpy's float64", 1) + "\n")
    sys.exit(not report.ok)


main()
