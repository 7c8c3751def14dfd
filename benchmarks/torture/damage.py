"""Damage to the files of a process that goes on making calls: no wrong result, no error, no ban that is lifted."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from _norm import register, right
from keeping import Found, cache, facts, flipped, tries

import layerzero as lz
from layerzero import _assembly
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY

WIDTH = 64
RECORDED = 6


def calls_between_damage(draw: random.Random, until: float, times: int | None) -> Found:
    """Calls, measurements and questions while the files beneath are spoilt, in this process and in new ones."""
    zero = Counter({"wrong results": 0, "calls raised": 0, "bans lifted": 0})
    other: Counter[str] = Counter({"files spoilt": 0, "calls": 0, "ledgers opened": 0})
    ran: list[int] = []

    def banned(data: torch.Tensor, _: torch.Tensor, __: float) -> torch.Tensor:
        ran.append(1)
        return torch.zeros_like(data)

    register("torture.banned", banned, 100)
    kernel = REGISTRY.kernel("torture.banned")
    with cache() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in tries(until, times, zero):
            if not (folder / "ledger-1").is_dir() or draw.random() < 0.1:
                begin_anew(folder, kernel)
            elif draw.random() < 0.5:
                ENGINE.ledger = _assembly.ledger()  # as a new process would
                other["ledgers opened"] += 1
            other["files spoilt"] += spoil(folder, draw)
            try:
                act(draw, zero)
            except Exception as error:  # noqa: BLE001  # this is what is counted
                zero["calls raised"] += 1
                print(f"{type(error).__name__}: {error}")
            other["calls"] += 1
            zero["bans lifted"] += len(ran)
    lz.unregister_kernel("torture.banned")
    return zero, other


def begin_anew(folder: Path, kernel: Any) -> None:
    while folder.exists():  # a thread that writes times down may put one more beside what is being taken away
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(0o700, exist_ok=True)
    ENGINE.ledger = _assembly.ledger()
    ENGINE.ledger.record_verdict(kernel, facts(8), Verdict.WRONG, "planted")
    for rows in range(1, RECORDED):
        measure(rows)
    ENGINE.bump()


def measure(rows: int) -> None:
    ENGINE.ledger.record_time(REGISTRY.kernel("torch.rms_norm"), facts(rows), Measurement(10.0 * rows, 12.0, 0.1, 20))


def spoil(folder: Path, draw: random.Random) -> bool:
    """One of the files, in one of the ways that files are spoilt.

    Not the index of the write-ahead log: SQLite maps it into memory, and whoever cuts a mapped file ends the process
    (SIGBUS), whatever program that is.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith("-shm")]
    if not files:
        return False
    path = draw.choice(files)
    whole = path.read_bytes()
    way = draw.randrange(6)
    if way == 0 and path.suffix == ".json":
        path.unlink()
        os.mkfifo(path)
    elif way == 1:
        path.write_bytes(b"")
    elif whole and way == 2:
        os.truncate(path, draw.randrange(len(whole)))
    elif whole:
        path.write_bytes(flipped(whole, draw, draw.choice((1, 1, 8, 50))))
    return True


def act(draw: random.Random, zero: Counter[str]) -> None:
    """A call, and at times a measurement or a question, as programs make them."""
    rows = draw.choice((1, 2, 3, 8, 64, draw.randrange(1, 5000)))
    data, weight = torch.randn(rows, WIDTH), torch.randn(WIDTH)
    zero["wrong results"] += not torch.allclose(lz.rms_norm(data, weight), right(data, weight), atol=1e-4)
    if draw.random() < 0.3:
        measure(rows)
    if draw.random() < 0.2:
        lz.explain("rms_norm", data, weight)
    if draw.random() < 0.02:
        lz.doctor()


PARTS = (calls_between_damage,)
