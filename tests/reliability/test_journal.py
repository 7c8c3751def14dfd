"""A row that was measured is not lost: whoever holds a lock, is paused, is killed, interrupted, or fills the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest

import layerzero as lz
from journal_rows import TIME, facts, known, on_disk
from layerzero.core.evidence import Provenance
from layerzero.core.system import disk
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.prediction import fitting
from layerzero.tuning.storage import connections, database, journal, journal_merge, learning
from layerzero.tuning.storage.sql_schema import in_transaction
from layerzero.tuning.storage.store import TimeStore


@contextlib.contextmanager
def turn_of_another(folder, of="turn"):
    """A process that is paused while it has the turn to merge."""
    lock = os.open(folder / f"perfdb.sqlite.{of}", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def test_adding_waits_for_no_process_that_merges(folder, kernel):
    store = TimeStore()
    store.record(kernel, facts(1), TIME)
    with turn_of_another(folder):
        store.record(kernel, facts(2), replace(TIME, median_us=20.0))
        store.record(kernel, facts(1), replace(TIME, median_us=30.0))
        assert known(store, kernel, 1, 2) == {1: 30.0, 2: 20.0}, "this process reads what it wrote"
        assert known(TimeStore(), kernel, 1, 2) == {1: 10.0}
        (note,) = store.notes()
        assert "2 measured times wait in journals for the next process that writes" in note
    store.spool._look_at = 0.0
    assert known(store, kernel, 1, 2) == {1: 30.0, 2: 20.0}
    assert on_disk(folder) == [20.0, 30.0]
    assert store.notes() == ()
    assert not store.database.has_memory()


def test_a_program_that_keeps_the_database_open_costs_no_row(folder, kernel):
    store = TimeStore()
    store.record(kernel, facts(1), TIME)
    hog = sqlite3.connect(folder / "perfdb.sqlite", isolation_level=None)
    hog.execute("BEGIN IMMEDIATE")
    for rows in (2, 3, 4):
        store.record(kernel, facts(rows), replace(TIME, median_us=10.0 * rows))
    assert known(store, kernel, 1, 2, 3, 4) == {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0}
    hog.execute("ROLLBACK")
    hog.close()
    store.settle()
    assert on_disk(folder) == [10.0, 20.0, 30.0, 40.0]


KILLED = """
import fcntl, os, signal, torch, layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.store import TimeStore
folder = os.environ["LAYERZERO_CACHE_DIR"]
os.makedirs(folder, mode=0o700, exist_ok=True)
lock = os.open(folder + "/perfdb.sqlite.turn", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
store = TimeStore()
for rows in (1, 2, 3):
    facts = lz.facts("rms_norm", torch.empty(rows, 64), torch.empty(64))
    store.record(REGISTRY.kernel("torch.rms_norm"), facts, Measurement(float(rows), 1.0, 0.0, 20))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_journal_of_one_who_was_killed_is_merged_by_the_next_and_goes(folder):
    variables = {**os.environ, "LAYERZERO_CACHE_DIR": str(folder)}
    ended = subprocess.run([sys.executable, "-c", KILLED], check=False, env=variables)
    assert ended.returncode == -signal.SIGKILL
    assert not (folder / "perfdb.sqlite").exists()
    assert len(list(journal.folder_of(folder / "perfdb.sqlite").iterdir())) == 1
    assert known(TimeStore(), REGISTRY.kernel("torch.rms_norm"), 1, 2, 3) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert on_disk(folder) == [1.0, 2.0, 3.0]
    assert list(journal.folder_of(folder / "perfdb.sqlite").iterdir()) == []


def left_journal(folder, store, kernel):
    """A journal with one row in it, of a process that is gone."""
    with turn_of_another(folder):
        store.record(kernel, facts(5), TIME)
    store.spool._journal.close()
    (path,) = journal.folder_of(folder / "perfdb.sqlite").glob("*.rows")
    return path


@pytest.mark.parametrize("cut", [2, 5, 200])
def test_half_a_line_counts_for_nothing_and_what_follows_it_counts(folder, kernel, cut):
    path = left_journal(folder, TimeStore(), kernel)
    line = path.read_bytes()
    path.write_bytes(line[:-cut])
    assert known(TimeStore(), kernel, 5) == {}
    path.write_bytes(line[:-cut] + b"\n" + line)
    store = TimeStore()
    assert known(store, kernel, 5) == {5: 10.0}
    assert any("1 lines of journals were torn or damaged" in note for note in store.notes())


def test_a_flipped_bit_in_a_journal_is_not_believed(folder, kernel):
    path = left_journal(folder, TimeStore(), kernel)
    line = path.read_bytes()
    path.write_bytes(line.replace(b'"median_us":10.0', b'"median_us":90.0'))
    assert known(TimeStore(), kernel, 5) == {}


def test_merging_twice_does_no_harm(folder, kernel):
    store = TimeStore()
    for rows in (1, 2, 3, 4):
        store.record(kernel, facts(rows), replace(TIME, median_us=10.0 * rows))
    with turn_of_another(folder, "lock"):
        pass
    journal.forget_places(journal.folder_of(folder / "perfdb.sqlite"))
    assert journal_merge.merge(store.database)
    assert on_disk(folder) == [10.0, 20.0, 30.0, 40.0]


def test_a_journal_is_removed_when_its_process_ends(folder, kernel):
    store = TimeStore()
    store.record(kernel, facts(1), TIME)
    assert len(list(journal.folder_of(folder / "perfdb.sqlite").glob("*.rows"))) == 1, "its process lives"
    store.spool.close()
    assert list(journal.folder_of(folder / "perfdb.sqlite").iterdir()) == []


@pytest.fixture
def full(monkeypatch):
    state = {"full": True}
    write = disk.write_all

    def write_all(file, data):
        if state["full"]:
            write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    monkeypatch.setattr(disk, "write_all", write_all)
    return state


def test_a_full_disk_is_tried_again_and_loses_nothing(folder, kernel, full):
    store = TimeStore()
    with pytest.warns(lz.LayerZeroWarning, match="measured times end with this process .No space left") as caught:
        for rows in (1, 2, 3):
            store.record(kernel, facts(rows), replace(TIME, median_us=10.0 * rows))
    assert len(caught) == 1
    assert known(store, kernel, 1, 2, 3) == {1: 10.0, 2: 20.0, 3: 30.0}
    assert any("3 are kept in memory" in note for note in store.notes())
    full["full"] = False
    store.spool._retry_at = store.spool._look_at = 0.0  # some seconds later
    store.look()
    assert on_disk(folder) == [10.0, 20.0, 30.0]
    assert not store.database.has_memory()
    assert all("torn" in note for note in store.notes())


def test_what_could_not_be_written_is_tried_once_more_at_the_end(folder, kernel, full):
    store = TimeStore()
    with pytest.warns(lz.LayerZeroWarning):
        store.record(kernel, facts(1), TIME)
    full["full"] = False
    store.spool.close()
    assert on_disk(folder) == [10.0]


class Interrupted:
    """A connection during whose statement Ctrl-C is pressed."""

    def __init__(self, connection, statement):
        self.connection, self.statement = connection, statement

    def execute(self, statement, *arguments):
        found = self.connection.execute(statement, *arguments)
        if statement == self.statement:
            raise KeyboardInterrupt
        return found

    @property
    def in_transaction(self):
        return self.connection.in_transaction


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "COMMIT"])
def test_an_interrupt_leaves_no_transaction_open(tmp_path, statement):
    connection = sqlite3.connect(tmp_path / "some.sqlite", isolation_level=None)
    with pytest.raises(KeyboardInterrupt):
        in_transaction(Interrupted(connection, statement), lambda inside: None)
    assert not connection.in_transaction
    connection.close()


def test_an_interrupt_amid_a_merge_costs_no_row(folder, kernel, monkeypatch):
    store = TimeStore()
    real = learning.insert
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(learning, "insert", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        store.record(kernel, facts(1), TIME)
    assert learning.insert is real
    assert known(TimeStore(), kernel, 1) == {1: 10.0}
    store.record(kernel, facts(2), TIME)
    assert on_disk(folder) == [10.0, 10.0]


def test_models_are_learnt_outside_of_transactions_and_once_a_batch(folder, kernel, monkeypatch):
    store = TimeStore()
    store.record(kernel, facts(1), TIME)
    writer = sqlite3.connect(folder / "perfdb.sqlite", isolation_level=None, timeout=0)
    fitted = []
    real = fitting.fit

    def fit(points):
        writer.execute("BEGIN IMMEDIATE")  # nobody holds the database meanwhile
        writer.execute("ROLLBACK")
        fitted.append(len(points))
        return real(points)

    with turn_of_another(folder):
        for rows in (2, 4, 8, 16):
            store.record(kernel, facts(rows), replace(TIME, median_us=5.0 + rows))
    monkeypatch.setattr(fitting, "fit", fit)
    store.settle()
    writer.close()
    assert fitted == [5]


def test_what_a_killed_process_did_not_learn_is_learnt_by_who_asks(folder, kernel, monkeypatch):
    store = TimeStore()
    with monkeypatch.context() as patch:
        patch.setattr(learning, "learn", lambda *_, **__: None)
        for rows in (1, 2, 4, 8, 16, 32):
            store.record(kernel, facts(rows), replace(TIME, median_us=5.0 + rows))
    assert store.database.read("SELECT count(*) FROM models") == [(0,)]
    found = TimeStore().evidence([kernel], facts(12))["user.a"]
    assert found.provenance is Provenance.PREDICTED
    assert found.time_us == pytest.approx(17, rel=0.1)
    assert store.database.read("SELECT count(*) FROM stale") == [(0,)]


def test_a_forked_child_writes_a_journal_of_its_own(folder, kernel):
    store = TimeStore()
    store.record(kernel, facts(1), TIME)
    child = os.fork()
    if child == 0:
        try:
            store.record(kernel, facts(2), replace(TIME, median_us=20.0))
            mine = store.spool._journal._path.name.startswith(f"{os.getpid()}-")
            os._exit(0 if mine and known(store, kernel, 1, 2) == {1: 10.0, 2: 20.0} else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    store.record(kernel, facts(3), replace(TIME, median_us=30.0))
    assert on_disk(folder) == [10.0, 20.0, 30.0]


def test_a_child_forked_amid_a_merge_does_not_keep_the_turn(folder, kernel):
    store = TimeStore()
    store.record(kernel, facts(1), TIME)
    (reading, writing), (up, told) = os.pipe(), os.pipe()
    with connections.turn(folder / "perfdb.sqlite", of="turn"):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.write(told, b".")
            os.read(reading, 1)
            os._exit(0)
    os.read(up, 1)
    with connections.turn(folder / "perfdb.sqlite", of="turn", wait_s=0.0):
        pass
    os.close(writing)
    os.waitpid(child, 0)


def test_a_journal_that_grows_is_begun_anew(folder, kernel, monkeypatch):
    monkeypatch.setattr(journal, "MAX_OWN", 100)
    store = TimeStore()
    for rows in (1, 2, 3):
        store.record(kernel, facts(rows), TIME)
    assert len(list(journal.folder_of(folder / "perfdb.sqlite").glob("*.rows"))) == 1
    assert len(on_disk(folder)) == 3


def test_rows_wait_while_a_connection_cannot_be_made(folder, kernel, monkeypatch):
    store = TimeStore()
    with monkeypatch.context() as patch:
        patch.setattr(database.connections, "writing", lambda _: (_ for _ in ()).throw(sqlite3.OperationalError("x")))
        store.record(kernel, facts(1), TIME)
        assert known(store, kernel, 1) == {1: 10.0}
    store.spool.close()
    assert known(TimeStore(), kernel, 1) == {1: 10.0}


def test_who_writes_merges_a_few_rows_by_the_way_its_own_first(folder, kernel, monkeypatch):
    monkeypatch.setattr(journal_merge, "merge", functools.partial(journal_merge.merge, for_s=0.0))
    monkeypatch.setattr(journal_merge, "OWN_ROWS", 10)
    monkeypatch.setattr(journal_merge, "OWN_BYTES", 2000)
    with turn_of_another(folder):
        others = [TimeStore(), TimeStore()]
        for number in range(100):
            others[number % 2].record(kernel, facts(1000 + number), TIME)
    for other in others:
        other.spool._journal.close()
    store = TimeStore()
    with turn_of_another(folder):
        store.record(kernel, facts(1), replace(TIME, median_us=20.0))
    store.record(kernel, facts(2), replace(TIME, median_us=20.0))
    assert on_disk(folder).count(20.0) == 2
    assert len(on_disk(folder)) < 30
    assert journal_merge.merge(store.database, for_s=60.0)
    assert len(on_disk(folder)) == 102
