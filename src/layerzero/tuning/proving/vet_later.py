"""Vetting in the background: what a miss would have liked to choose proves itself in a child, and the next miss may.

Only where ``vet_in_background`` is set. One thread, one child at a time, each class once a process.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading

from layerzero.core import forking
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import class_text
from layerzero.tuning.proving.vetting import vet_calls

log = logging.getLogger("layerzero")

GATHER_S = 0.5
"""How long it waits for more classes before it starts a process for those that came."""


class Background:
    """The queue and its thread, which starts with the first class."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Ask about nothing and have no thread: at first, and in a process that was forked."""
        self._lock = forking.lock()
        self._asked: set[tuple[str, str]] = set()
        self._queue: queue.SimpleQueue[tuple[Kernel, Facts]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self.idle = threading.Event()
        self.idle.set()

    def add(self, kernel: Kernel, facts: Facts) -> None:
        """Ask about a class, once."""
        identity = (kernel.id, class_text(facts))
        with self._lock:
            if identity in self._asked:
                return
            self._asked.add(identity)
            self.idle.clear()
            self._queue.put((kernel, facts))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="layerzero-vetting", daemon=True)
                self._thread.start()
                atexit.register(self._ending.set)

    def _work(self) -> None:
        while not self._ending.is_set():
            batch = [self._queue.get()]
            self._ending.wait(GATHER_S)
            while not self._queue.empty():
                batch.append(self._queue.get())
            try:
                for found in vet_calls(batch):
                    log.info("vetted in the background: %s", found)
            except Exception:
                log.exception("vetting in the background failed for %d classes", len(batch))
            with self._lock:
                if self._queue.empty():
                    self.idle.set()


BACKGROUND = Background()
"""The one of this process."""

forking.in_child(BACKGROUND.begin)  # its thread exists in the parent only
