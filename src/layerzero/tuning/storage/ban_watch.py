"""A thread that looks once a second what other processes wrote, so that a process of hits alone hears of a ban.

A hit reads no clock and no file; the thread bumps the epoch where something was decided. It does not keep the
process alive, and waits while the process forks; a child has one of its own.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from typing import Protocol

from layerzero.core.system import forking
from layerzero.core.system.resources import started

log = logging.getLogger("layerzero")

EVERY_S = 1.0
"""How often it looks: with the time that a list takes, a ban is heard of within two seconds."""

_STOP_S = 1.0
"""How long a fork, or the end of the process, waits for a look that is under way."""


class Target(Protocol):
    """What can be looked at."""

    def look(self) -> None:
        """See what changed."""


class Watch:
    """The thread, and what it looks at for as long as somebody else holds it."""

    def __init__(self) -> None:
        self._targets: tuple[weakref.ref[Target], ...] = ()  # never changed: read without a lock
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = forking.rlock()
        self._looking = forking.rlock()
        self._still = False
        forking.in_child(self._in_child)

    def add(self, target: Target) -> None:
        """Look at something from now on."""
        with self._lock:
            self._targets = (*(each for each in self._targets if each() is not None), weakref.ref(target))
        self.start()

    def running(self) -> bool:
        """Whether the thread looks; where no thread can be started, each question looks itself."""
        return self._thread is not None  # a thread that ends says so itself: asking it costs a miss four calls

    def start(self) -> None:
        """Have a thread if there is something to look at."""
        with self._lock:
            if self._thread is None and self._living():
                self._stop = threading.Event()
                self._thread = started("layerzero-watch", self._work, self._stop)
                if self._thread is None:
                    log.debug("nobody looks what other processes write but who misses: no thread could be started")

    def stop(self) -> bool:
        """Have no thread; whether there was one."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is None or thread is threading.current_thread():
            return False
        thread.join(_STOP_S)
        return True

    def _living(self) -> list[Target]:
        return [target for each in self._targets if (target := each()) is not None]

    def _work(self, stop: threading.Event) -> None:
        try:
            while not stop.wait(EVERY_S):
                with self._looking:
                    looked = self._look()
                if not looked:
                    with self._lock:
                        if self._stop is stop and not self._living():
                            self._thread = None
                            return
        except BaseException:  # a look may end the process, or this thread
            with self._lock:
                self._thread = None if self._stop is stop else self._thread
            raise

    def _look(self) -> bool:
        """Look at everything; whether there was anything."""
        targets = self._living()
        for target in targets:
            try:
                target.look()
            except Exception:
                log.exception("what other processes wrote could not be looked at")
        return bool(targets)

    def before_fork(self) -> None:
        """Let a look end and none begin: a lock that it holds would stay locked in the child."""
        self._lock.acquire()  # held across the fork, so that no other thread starts one or forks
        self._still = self._looking.acquire(timeout=_STOP_S)

    def after_fork(self) -> None:
        """Let looks go on; the parent's thread, which was waiting, never noticed."""
        if self._still:
            self._looking.release()
        self._lock.release()

    def _in_child(self) -> None:
        """Have a thread of its own where the parent had one."""
        was, self._thread = self._thread, None
        if was is not None:
            self.start()


WATCH = Watch()
"""The one of this process."""

atexit.register(WATCH.stop)
forking.around(WATCH.before_fork, WATCH.after_fork)
