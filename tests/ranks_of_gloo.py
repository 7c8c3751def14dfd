"""Processes that run one script as ranks of gloo; several files of tests start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys


def two_ranks(folder, script, case, ranks=2):
    """What two ranks, or more, print, split at ``|``; the script gets rank, store, case and their number.

    No rank outlives this.
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(folder / "store"), case, str(ranks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "LAYERZERO_CACHE_DIR": str(folder / f"cache{rank}")},
        )
        for rank in range(ranks)
    ]
    try:
        said = [each.communicate(timeout=300) for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0] * ranks, said
    said = [(re.sub(r"(?m)^\[Gloo\] .*\n", "", out), err) for out, err in said]  # torch 2.10 prints it there
    return [out.strip().split("|") for out, _ in said]
