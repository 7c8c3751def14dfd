"""The golden files: text of one line a thing, read and written beside this module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent


def write(name: str, lines: Iterable[str]) -> None:
    """Write a file anew."""
    (FOLDER / name).write_text("".join(f"{line}\n" for line in lines))


def read(name: str) -> list[str]:
    """The lines of a file."""
    return (FOLDER / name).read_text().splitlines()


def computed(first: int, end: int) -> dict[str, list[str]]:
    """The lines that each file would hold now, from one process without settings and without a cache folder."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LAYERZERO_")}
    paths = [str(FOLDER.parent), *sys.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment |= {"LAYERZERO_CACHE_DIR": "", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "golden", str(first), str(end)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def difference(name: str, wanted: list[str], got: list[str], most: int = 10) -> str:
    """The first lines that differ, for a failed test; empty where all are equal."""
    pairs = [(a, b) for a, b in zip(wanted, got, strict=False) if a != b]
    if not pairs and len(wanted) == len(got):
        return ""
    shown = "".join(f"\n- {a}\n+ {b}" for a, b in pairs[:most])
    return (
        f"{name}: {len(pairs)} lines differ, {len(wanted)} were wanted, {len(got)} came:{shown}\n"
        "If this is meant, run `PYTHONPATH=src:tests python -m golden` and say why in the commit message."
    )
