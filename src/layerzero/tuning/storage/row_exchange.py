"""How rows get into the database, and how a process hears of others: its journal, and a thread that looks for bans.

Rows go through a journal, or stay in memory where nothing can be written.

Adding never waits for another process and never loses a row: it is in the journal when adding returns, and merged at
once where no other process merges. Until it is merged this process reads it from memory. What could not be written is
tried again every few seconds, whatever asks next.

A thread looks once a second what other processes wrote, so that a process of hits alone hears of a ban.

A hit reads no clock and no file; the thread bumps the epoch where something was decided. It does not keep the
process alive, and waits while the process forks; a child has one of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from layerzero.core.system import forking, log
from layerzero.core.system.resources import started
from layerzero.tuning.storage import connections, journal, journal_merge, learning
from layerzero.tuning.storage.database import RETRY_S, Database, what_of
from layerzero.tuning.storage.journal import Journal, Place
from layerzero.tuning.storage.rows import Row
from layerzero.tuning.storage.sql_schema import in_transaction

AGAIN_S = 1.0
"""How long merging rests after the database could not be written."""

LOOK_S = 0.2
"""How often a process that asks looks what became of rows that wait."""

EXIT_S = 1.0
"""How long a process that ends waits for its turn, and merges and learns."""

_SMALL_BYTES = 4 << 20
"""A file that was set aside is searched for sound rows at once if it is no larger, by a thread otherwise."""


class Spool:
    """The way of this process's rows into one database.

    Attributes:
        database: where they go.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._lock = forking.rlock()
        self._journal: Journal | None = None
        self._waiting: list[Place] = []
        self._unwritten: list[tuple[bytes, int]] = []  # lines and how many rows each has
        self._problem = ""
        self._retry_at = self._merge_at = self._look_at = 0.0
        self._wrote = False
        _SPOOLS.add(self)
        forking.in_child(self._after_fork)

    def adopt(self) -> None:
        """Merge what processes left that are gone; also settles which file this version works in."""
        if self.database.path is None:
            return
        self.database.read("SELECT 1")
        self.database.close()  # a write that follows may have to change the kind of journal, alone
        if any(journal.waiting(self._folder())):
            self._merge()

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows, all or none. Raises: ValueError for what cannot be written down."""
        new = list(rows)
        if self.database.path is None:
            self._remember(new)
        elif new:
            self._wrote = True
            with self._lock:
                self._unwritten.append((journal.line_of(new), len(new)))
            self._write()
            if self._waiting and time.monotonic() >= self._merge_at:
                self._merge()
                self._drop()
            with self._lock:  # what another thread merges meanwhile is not remembered for ever
                if self._waiting or self._unwritten:
                    self._remember(new)

    def _write(self) -> None:
        """Append to the journal what is not in it; what cannot be written is tried again later."""
        with self._lock:
            while self._unwritten and time.monotonic() >= self._retry_at:
                try:
                    place = self._opened().append(self._unwritten[0][0])
                except OSError as error:
                    self._problem, self._retry_at = what_of(error), time.monotonic() + RETRY_S
                else:
                    self._waiting.append(place)
                    del self._unwritten[0]
            told = self._cannot() if self._unwritten else ""  # a line that another thread adds from here on is its own
        if told:
            self.database.tell_once("write", told)

    @property
    def ends_here(self) -> bool:
        """Whether rows are in this process's memory alone; those that wait in a journal do not end with it."""
        return bool(self._unwritten) or (self.database.path is None and self.database.has_memory())

    def _cannot(self) -> str:
        return f"{self.database.path} cannot be written: measured times end with this process ({self._problem})"

    def _folder(self) -> Path:
        assert self.database.path is not None
        return journal.folder_of(self.database.path)

    def _opened(self) -> Journal:
        folder = self._folder()
        if self._journal is None or self._journal.folder != folder:
            self._journal = Journal(folder)
        return self._journal

    def _remember(self, rows: list[Row]) -> None:
        def insert(connection: sqlite3.Connection) -> None:
            in_transaction(connection, lambda inside: learning.insert(inside, rows))

        self.database.remember(insert)

    def _merge(self) -> None:
        try:
            own = self._waiting[-1].path if self._waiting else None
            done = journal_merge.merge(self.database, own=own)
        except TimeoutError:  # another process merges: asking again costs nothing
            return
        except Exception as error:  # noqa: BLE001  # what was measured waits; no call fails because of a disk
            self.database.tell(f"{self.database.path}: measured times wait in journals ({what_of(error)})")
            done = False
        if not done:
            self._merge_at = time.monotonic() + AGAIN_S

    def refresh(self) -> None:
        """See what became of rows that wait; quick where none do."""
        if self.database.aside:
            self._save()
        if not self._waiting and not self._unwritten:
            return
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        if self._unwritten:
            self._write()
        if self._waiting and now >= self._merge_at:
            self._merge()
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            paths = {place.path for place in self._waiting}
            merged: dict[Path, float] = {path: journal.merged_until(path) for path in paths}
            merged |= dict.fromkeys(
                [path for path in paths if not path.exists()], math.inf
            )  # it goes when all of it is merged
            self._waiting = [place for place in self._waiting if place.end > merged[place.path]]
            if not self._waiting and not self._unwritten and self.database.has_memory():
                self.database.forget()

    def settle(self) -> None:
        """Merge all that waits and learn all that is stale, however long it takes; for commands."""
        if self.database.path is not None and os.path.isdir(self._folder()):  # noqa: PTH112  # Path's raises where nothing may be read
            journal_merge.merge(self.database, for_s=math.inf, wait_s=RETRY_S)
            self._drop()

    # files that were set aside

    def _save(self) -> None:
        """Bring sound rows of a file that was set aside into the one that took its place."""
        while self.database.aside:
            path = self.database.aside.pop()
            self._forget_places()
            large = path.is_file() and path.stat().st_size > _SMALL_BYTES
            if not large or started("layerzero-salvage", self._save_from, path) is None:
                self._save_from(path)

    def _forget_places(self) -> None:
        """Have journals merged anew; one that merges just now may still say that the old file has their rows."""
        assert self.database.path is not None
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a process that is paused amid a merge holds up no other
                stack.enter_context(connections.turn(self.database.path, of="turn"))
            journal.forget_places(self._folder())

    def _save_from(self, path: Path) -> None:
        count = 0
        for rows in journal_merge.sound_rows(path):
            self.add(rows)
            count += len(rows)
        self._merge()  # what journals still hold, too
        if count:
            self.database.tell(f"{path}: {count} sound times of it were taken over")

    # the end, and children

    def notes(self) -> Iterator[str]:
        """What is not in the database yet."""
        if self.database.path is None:
            return
        self._look_at = 0.0
        self.refresh()
        if self._unwritten:
            count = sum(rows for _, rows in self._unwritten)
            yield f"{self._cannot()}; {count} are kept in memory, and written as soon as that is possible"
        count = journal.count(self._folder())
        if count:
            yield f"{self.database.path}: {count} measured times wait in journals for the next process that writes"

    def close(self) -> None:
        """Write what can be written, and let go of the journal."""
        if not self._wrote or self.database.path is None:
            return
        self._wrote, self._retry_at = False, 0.0
        self._write()
        with self._lock:
            own, self._journal = self._journal, None
            if own is not None:
                own.close()
        with contextlib.suppress(OSError):  # what is in the journal waits for the next process
            journal_merge.merge(self.database, for_s=EXIT_S, wait_s=EXIT_S)

    def _after_fork(self) -> None:
        """In a child: a journal of its own."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None


_SPOOLS: weakref.WeakSet[Spool] = weakref.WeakSet()


def _at_exit() -> None:
    for spool in list(_SPOOLS):
        spool.close()


atexit.register(_at_exit)  # before the databases close: handlers run in reverse


EVERY_S = 1.0
"""How often it looks: with the time that a list takes, a ban is heard of within two seconds."""

_STOP_S = 1.0
"""How long a fork, or the end of the process, waits for a look that is under way."""


class Target(Protocol):
    """What can be looked at."""

    def look(self) -> None:
        """See what changed."""


class Watch:
    """The thread, and what it looks at for as long as something else holds it."""

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
        with self._lock:
            if self._thread is None and self._living():
                self._stop = threading.Event()
                self._thread = started("layerzero-watch", self._work, self._stop)
                if self._thread is None:
                    log.debug("only misses look what other processes write: no thread could be started")

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
