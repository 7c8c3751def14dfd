"""Damage to what is kept between processes, and processes that are killed as they write it."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import select
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _asked import ASKED

import layerzero as lz
from layerzero.core.evidence import Measurement, Provenance
from layerzero.core.ledger import Ledger, Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.prediction.fitting import fit
from layerzero.tuning.prediction.predict import Point, meaning_of, predict
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.rows import axes_of, work_of
from layerzero.tuning.storage.store import TimeStore

MEMORY = Path("/dev/shm")  # where there is one: every try writes and syncs
ROWS = (1, 8, 64, 512)
UNSEEN = 100

Found = tuple[dict[str, int], dict[str, float]]


@contextlib.contextmanager
def cache() -> Iterator[Path]:
    """A cache folder of its own for this process."""
    folder = Path(tempfile.mkdtemp(prefix="layerzero-torture-", dir=MEMORY if MEMORY.is_dir() else None))
    before = os.environ.get("LAYERZERO_CACHE_DIR")
    os.environ["LAYERZERO_CACHE_DIR"] = str(folder)
    ENGINE.ledger = Ledger()  # nobody else has the files open
    lz.configure()
    try:
        yield folder
    finally:
        os.environ["LAYERZERO_CACHE_DIR"] = before or ""
        lz.configure()
        shutil.rmtree(folder, ignore_errors=True)


def facts(rows: int, width: int = 64) -> Any:
    return lz.facts("rms_norm", torch.empty(rows, width), torch.empty(width))


def kernels() -> list[Any]:
    return [REGISTRY.kernel(name) for name in ("torch.rms_norm", "inductor.rms_norm")]


def flipped(whole: bytes, draw: random.Random, bits: int) -> bytes:
    spoilt = bytearray(whole)
    for _ in range(bits):
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
    return bytes(spoilt)


def tries(until: float, times: int | None, zero: Counter[str]) -> Iterator[int]:
    """Numbers until the time is up, or something was found."""
    for number in itertools.count() if times is None else range(times):
        if time.monotonic() >= until or any(zero.values()):
            return
        yield number


def one_bit(draw: random.Random, until: float, times: int | None) -> Found:
    """One bit of a database, and of the records of a ban."""
    return spoilt_files(draw, until, times or 10_000, 1)


def fifty_bits(draw: random.Random, until: float, times: int | None) -> Found:
    """Fifty bits of each."""
    return spoilt_files(draw, until, times or 2_000, 50)


def spoilt_files(draw: random.Random, until: float, times: int, bits: int) -> Found:
    zero = Counter({"calls raised": 0, "wrong times believed": 0, "bans lifted": 0, "rows lost afterwards": 0})
    other: Counter[str] = Counter({"files": 0})
    with cache() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, good = database_of(folder)
        predicted = predictions_from(good)
        banned = ban_of(folder)
        for number in tries(until, times, zero):
            other["files"] += 1
            shutil.rmtree(folder)
            folder.mkdir(0o700)
            (folder / "perfdb.sqlite").write_bytes(flipped(whole, draw, bits))
            try:
                spoilt_times(good, predicted, zero, other)
                spoilt_ban(folder, banned, draw, bits if number % 2 else -1, zero)
            except Exception as error:  # noqa: BLE001  # this is what is counted
                zero["calls raised"] += 1
                other[f"of {type(error).__name__}"] += 1
    return zero, other


def database_of(folder: Path) -> tuple[bytes, dict[tuple[int, str], float]]:
    store = TimeStore()
    good = {}
    for (number, rows), (factor, kernel) in itertools.product(enumerate(ROWS), enumerate(kernels(), 1)):
        good[rows, kernel.id] = 10.0 * (number + 1) + factor
        store.record(kernel, facts(rows), Measurement(good[rows, kernel.id], 12.0, 0.1, 20))
    store.settle()
    store.spool.close()
    store.database.close()
    return (folder / "perfdb.sqlite").read_bytes(), good


def predictions_from(good: dict[tuple[int, str], float]) -> dict[str, list[float]]:
    """What may be predicted of each kernel for the unseen call: from all of its good times, or from any of them."""
    work = work_of(facts(UNSEEN))
    meaning = meaning_of(axes_of(dict(work.facts)))
    found: dict[str, list[float]] = {}
    for kernel in kernels():
        points = [Point(work_of(facts(rows)).sizes, good[rows, kernel.id], None, None, meaning) for rows in ROWS]
        for count in range(1, len(points) + 1):
            for some in itertools.combinations(points, count):
                model = fit(list(some))
                estimate = None if model is None else predict(model, work.sizes)
                found.setdefault(kernel.id, []).extend([] if estimate is None else [estimate.time_us])
    return found


def spoilt_times(
    good: dict[tuple[int, str], float], predicted: dict[str, list[float]], zero: Counter[str], other: Counter[str]
) -> None:
    store = TimeStore()
    kernel = kernels()[0]
    for rows in (*ROWS, UNSEEN):
        found = store.evidence(kernels(), facts(rows))
        other["times missing"] += rows != UNSEEN and len(found) < len(kernels())
        for name, each in found.items():
            if each.provenance is Provenance.MEASURED:
                zero["wrong times believed"] += each.time_us != good[rows, name]
            elif rows == UNSEEN and each.provenance is Provenance.PREDICTED:  # a table that ships may answer, too
                sound = any(math.isclose(each.time_us, right, rel_tol=1e-3) for right in predicted[name])
                zero["wrong times believed"] += not sound
    store.record(kernel, facts(7), Measurement(11.0, 12.0, 0.1, 20))
    found = store.evidence(kernels(), facts(7))
    zero["rows lost afterwards"] += kernel.id not in found or found[kernel.id].time_us != 11.0
    store.notes()
    store.spool.close()
    store.database.close()
    other["files set aside"] += bool(store.database.named and list(store.database.named.parent.glob("*.set-aside-*")))


def ban_of(folder: Path) -> tuple[str, bytes]:
    FileLedger(folder).record_verdict(kernels()[1], facts(8), Verdict.WRONG, "planted")
    (path,) = (folder / "ledger-1").glob("*.json")
    return path.name, path.read_bytes()


def spoilt_ban(folder: Path, banned: tuple[str, bytes], draw: random.Random, bits: int, zero: Counter[str]) -> None:
    """A ban with flipped bits, or cut at some place."""
    (folder / "ledger-1").mkdir(0o700)
    name, whole = banned
    spoilt = flipped(whole, draw, bits) if bits > 0 else whole[: draw.randrange(len(whole))]
    (folder / "ledger-1" / name).write_bytes(spoilt)
    ledger, kernel = FileLedger(folder), kernels()[1]
    for rows in (8, 4000):
        refused = ledger.verdict(kernel, facts(rows)) is Verdict.WRONG or ledger.suspicion(kernel, facts(rows))
        zero["bans lifted"] += not refused
    ledger.notes()


# writers


def killed_writers(draw: random.Random, until: float, times: int | None) -> Found:
    """Writers beside busy processes, of which one after another is killed and begun anew; on a real disk."""
    kills = times or ASKED.kills
    with tempfile.TemporaryDirectory(prefix="layerzero-torture-") as folder:
        os.environ["LAYERZERO_CACHE_DIR"] = folder
        lz.configure()
        asked = {(slot, rows): facts(1 << rows, 8 * (slot + 1)) for slot in range(ASKED.writers) for rows in range(20)}
        TimeStore().evidence(kernels(), facts(1))
        burners = [forked(burn) for _ in range(ASKED.busy)]
        crowd = Crowd(asked, draw)
        done = 0
        while done < kills and time.monotonic() < until:
            crowd.listen(draw.uniform(0.0, 0.2))
            if crowd.everybody_wrote():
                crowd.kill(draw.randrange(ASKED.writers))
                done += 1
        crowd.end()
        for burner in burners:
            os.kill(burner, signal.SIGKILL)
            os.waitpid(burner, 0)
        zero = crowd.missing()
        lz.configure()
    os.environ["LAYERZERO_CACHE_DIR"] = ""
    slowest = sorted(crowd.took)
    if slowest[-1] > ASKED.longest_s:
        zero[f"writes longer than {ASKED.longest_s:g} s"] = sum(took > ASKED.longest_s for took in slowest)
    other = {
        "writers": ASKED.writers,
        "busy processes": ASKED.busy,
        "kills": done + ASKED.writers,
        "rows told": len(crowd.told),
        "writes": len(slowest),
        "s the median write": round(slowest[len(slowest) // 2], 4),
        "s the longest write": round(slowest[-1], 3),
    }
    return zero, other


def burn() -> None:
    while True:
        pass


def forked(act: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(1)
    return child


class Crowd:
    """Writers and what each told that it had written."""

    def __init__(self, asked: dict[tuple[int, int], Any], draw: random.Random) -> None:
        self.asked, self.draw = asked, draw
        self.told: dict[tuple[int, int], float] = {}
        self.took: list[float] = []
        self.problems: Counter[str] = Counter()
        self.running: list[tuple[int, int, bytes]] = []
        self.wrote: set[int] = set()
        self.count = 0
        for slot in range(ASKED.writers):
            self.running.append(self.begin(slot))

    def begin(self, slot: int) -> tuple[int, int, bytes]:
        reading, writing = os.pipe()
        self.count += 1
        child = forked(lambda: self.write(slot, self.count * 1e6, writing))
        os.close(writing)
        return child, reading, b""

    def write(self, slot: int, first: float, writing: int) -> None:
        """Write times that only grow, for as long as it lives; tell of each when it is written."""
        warnings.showwarning = lambda message, *_, **__: os.write(writing, f"W {message}\n".encode())
        store, kernel = TimeStore(), kernels()[0]
        for number in itertools.count(1):
            rows = number % 20
            started = time.perf_counter()
            store.record(kernel, self.asked[slot, rows], Measurement(first + number, 1.0, 0.0, 20))
            took = time.perf_counter() - started
            os.write(writing, f"T {slot} {rows} {first + number} {took}\n".encode())

    def listen(self, seconds: float) -> None:
        ready, _, _ = select.select([reading for _, reading, _ in self.running], [], [], seconds)
        for slot, (child, reading, before) in enumerate(self.running):
            if reading in ready:
                self.running[slot] = child, reading, self.hear(before + os.read(reading, 65536))

    def hear(self, text: bytes) -> bytes:
        *lines, rest = text.split(b"\n")
        for line in lines:
            kind, _, words = line.decode().partition(" ")
            if kind == "T":
                slot, rows, value, took = words.split()
                self.told[int(slot), int(rows)] = float(value)
                self.took.append(float(took))
                self.wrote.add(int(slot))
            else:
                self.problems[words] += 1
        return rest

    def everybody_wrote(self) -> bool:
        return len(self.wrote) == ASKED.writers

    def kill(self, slot: int) -> None:
        self.finish(slot)
        self.wrote.discard(slot)
        self.running[slot] = self.begin(slot)

    def finish(self, slot: int) -> None:
        child, reading, text = self.running[slot]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 65536):
            text += more
        os.close(reading)
        self.hear(text)

    def end(self) -> None:
        for slot in range(ASKED.writers):
            self.finish(slot)

    def missing(self) -> dict[str, int]:
        """What a later process does not find of what was told."""
        store, kernel = TimeStore(), kernels()[0]
        store.settle()
        found = Counter({"rows lost": 0, "older values": 0, "warnings": self.problems.total()})
        for key, value in self.told.items():
            time_us = store.evidence([kernel], self.asked[key]).get(kernel.id)
            if time_us is None or time_us.provenance is not Provenance.MEASURED:
                found["rows lost"] += 1
            elif time_us.time_us < value:
                found["older values"] += 1
        for note in store.notes():
            print("   note:", note)
        for problem, count in self.problems.items():
            print("   warning:", count, "x", problem)
        store.spool.close()
        store.database.close()
        return found


PARTS = (one_bit, fifty_bits, killed_writers)
