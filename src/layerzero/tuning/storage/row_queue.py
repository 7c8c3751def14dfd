"""How rows of this process get into the database: through its journal, or memory where nothing can be written.

Adding never waits for another process and never loses a row: it is in the journal when adding returns, and merged at
once where no other process merges. Until it is merged this process reads it from memory. What could not be written is
tried again every few seconds, whatever asks next.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from layerzero.core.system import forking
from layerzero.tuning.storage import connections, journal, journal_merge, learning
from layerzero.tuning.storage.connections import in_transaction
from layerzero.tuning.storage.database import RETRY_S, Database, what_of
from layerzero.tuning.storage.journal import Journal, Place
from layerzero.tuning.storage.rows import Row

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
        if self.database.path is not None and self._folder().is_dir():
            journal_merge.merge(self.database, for_s=math.inf, wait_s=RETRY_S)
            self._drop()

    # files that were set aside

    def _save(self) -> None:
        """Bring sound rows of a file that was set aside into the one that took its place."""
        while self.database.aside:
            path = self.database.aside.pop()
            self._forget_places()
            if path.is_file() and path.stat().st_size > _SMALL_BYTES:
                threading.Thread(target=self._save_from, args=(path,), name="layerzero-salvage", daemon=True).start()
            else:
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
