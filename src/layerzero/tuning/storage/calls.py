"""Which calls this machine really made: those that were chosen for, kept for ``layerzero tune``, bounded.

A miss hands over the facts of its call and goes on; once a second, and as the process ends, what came is merged into
one file of the cache folder. Hits are not counted: a call counts once a process and epoch.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import Counter, deque
from pathlib import Path

import msgspec

from layerzero.core.facts import Facts
from layerzero.core.recipe import CallRecipe
from layerzero.core.system import disk, forking

FILE, LOCK = "calls-1.json", "calls-1.lock"

MAX_WAITING = 4096
MAX_KEPT = 1000
"""Calls in the file; of further ones those that were made longest ago are forgotten."""

MOST_BYTES = 16 << 20


class Made(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call, how often it was chosen for, and when last."""

    count: int
    at_unix_s: float
    call: CallRecipe


class CallsMade:
    """The calls of this process that are not written yet, and the file of all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: deque[Facts] = deque(maxlen=MAX_WAITING)
        self._lock = forking.lock()
        self.add = self._waiting.append
        """Hand over the facts of a call; never waits."""
        forking.in_child(self.forget)
        atexit.register(self.write)

    def forget(self) -> None:
        """Leave what waits to the process that this one was forked from."""
        self._waiting.clear()

    def made(self) -> list[Made]:
        """What was called, in this process and in earlier ones, the latest first."""
        self.write()
        return sorted(self._read(), key=lambda each: -each.at_unix_s)

    def write(self) -> None:
        """Merge what came since; what cannot be written now waits, unless another process has it amid writing."""
        with self._lock:  # what another thread took from the queue is in the file before this one reads that
            self._write()

    def _write(self) -> None:
        if not self._waiting or disk.distrust(self.folder):
            return
        try:
            disk.make_private(self.folder)
            lock = disk.open_plain(self.folder / LOCK, os.O_RDWR | os.O_CREAT)
        except OSError:  # the ledger tells of a folder that cannot be written
            return
        try:
            if disk.lock(lock):  # else another process writes
                self._merge()
        except OSError:  # the disk is full
            return
        finally:
            os.close(lock)

    def _merge(self) -> None:
        fresh: Counter[bytes] = Counter()
        for _ in range(len(self._waiting)):
            fresh[msgspec.json.encode(CallRecipe.of(self._waiting.popleft()))] += 1
        kept = {msgspec.json.encode(each.call): each for each in self._read()}
        now = time.time()
        for call, count in fresh.items():
            before = kept[call].count if call in kept else 0
            kept[call] = Made(before + count, now, msgspec.json.decode(call, type=CallRecipe))
        latest = sorted(kept.values(), key=lambda each: -each.at_unix_s)[:MAX_KEPT]
        disk.write_whole(self.folder / FILE, msgspec.json.encode(latest), private=True)

    def _read(self) -> list[Made]:
        if disk.distrust(self.folder):
            return []
        return disk.read_json(self.folder / FILE, MOST_BYTES, list[Made]) or []  # else what comes is written anew
