"""Many processes and threads at one file of times, and what a miss costs."""

from __future__ import annotations

import itertools
import os
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from one_time import TIME, facts, fresh, run, times

import layerzero as lz
from counting import events
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import environment, sql_schema
from layerzero.tuning.storage import rows as rows_module
from layerzero.tuning.storage.database import Database
from layerzero.tuning.storage.journal import line_of

WRITERS = """
import os, sys, torch, layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.store import TimeStore
kernel, kernels = REGISTRY.kernel("torch.rms_norm"), REGISTRY.candidates("norm.rms")
store, (waiting, go) = TimeStore(), os.pipe()
children = []
for number in range(16):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(waiting, 1)
        for each in range(25):
            facts = lz.facts("rms_norm", torch.empty(number * 10_000 + each + 1, 8), torch.empty(8))
            store.record(kernel, facts, Measurement(float(each + 1), 1.0, 0.0, 20))
            assert store.evidence(kernels, facts)[kernel.id].time_us == each + 1
        assert all("wait in journals" in note for note in store.notes()), store.notes()
        sys.exit(0)
    children.append(child)
os.close(go)  # all at once, the making of the file included
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


def held(folder):
    fresh().settle()  # what the last of them left in its journal
    connection = sqlite3.connect(folder / "perfdb.sqlite")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        found = connection.execute("SELECT facts FROM times JOIN works ON work = works.key").fetchall()
    finally:
        connection.close()
    return [int(text.split('"rows":"')[1].split('"')[0]) for (text,) in found]


@pytest.mark.slow
def test_sixteen_writers_at_once_lose_nothing(folder):
    run(WRITERS, folder)
    assert sorted(held(folder)) == sorted(number * 10_000 + each + 1 for number in range(16) for each in range(25))


KILLED = """
import os, signal, sys
import layerzero as lz, torch
from layerzero.core.evidence import Measurement
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.store import TimeStore
kernel = REGISTRY.kernel("torch.rms_norm")
kernels = REGISTRY.candidates("norm.rms")
asked = [lz.facts("rms_norm", torch.empty(each + 1, 8), torch.empty(8)) for each in range(5000)]
TimeStore().evidence(kernels, asked[0])
next_row = 0
for number in range(200):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        store = TimeStore()
        for each in range(next_row, 5000):
            store.record(kernel, asked[each], Measurement(float(each + 1), 1.0, 0.0, 20))
            os.write(writing, b".")
    os.close(writing)
    told = len(os.read(reading, 1 + number % 3))
    if number % 2:
        for _ in range(number * 37 % 1500): pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reading, 4096):
        told += len(more)
    os.close(reading)
    start = next_row
    store = TimeStore()
    def written(row):
        found = store.evidence(kernels, asked[row]).get(kernel.id)
        return found is not None and found.provenance == "measured"
    while next_row < 5000 and written(next_row):
        next_row += 1
    assert next_row - start >= told > 0, (start, next_row, told)
    print(next_row, flush=True)
    assert store.notes() == (), store.notes()
"""


@pytest.mark.slow
def test_two_hundred_killed_writers_leave_every_committed_row(folder):
    variables = {**os.environ, "LAYERZERO_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED]
    done = subprocess.run(command, check=False, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counts = [int(line) for line in done.stdout.split()]
    assert len(counts) == 200
    assert all(later > earlier for earlier, later in itertools.pairwise(counts)), "each wrote something"
    assert sorted(held(folder)) == list(range(1, counts[-1] + 1)), "whole"


@pytest.mark.slow
def test_a_forked_child_opens_its_own_connections(folder, kernels):
    script = """
import os, sys, threading, time, torch, layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.store import TimeStore
store, kernel = TimeStore(), REGISTRY.kernel("torch.rms_norm")
asked = [lz.facts("rms_norm", torch.empty(each + 1, 8), torch.empty(8)) for each in range(60)]
def write(numbers):
    for each in numbers:
        store.record(kernel, asked[each], Measurement(1.0, 1.0, 0.0, 20))
write(range(10))
busy = threading.Thread(target=write, args=(range(10, 30),)); busy.start()
children = []
for number in range(5):
    child = os.fork()
    if child == 0:
        assert store.evidence([kernel], asked[0]), "reads what was there"
        write(range(30 + number * 6, 36 + number * 6))
        sys.exit(0)
    children.append(child)
busy.join()
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
assert all(store.evidence([kernel], each) for each in asked)
assert store.notes() == (), store.notes()
"""
    run(script, folder)
    assert len(held(folder)) == 60


def test_threads_read_and_write_at_once(folder, kernels):
    store = fresh()
    asked = [facts(rows) for rows in range(1, 41)]
    stop = threading.Event()
    seen = []

    def read():
        while not stop.is_set():
            seen.append(sum(bool(store.evidence(kernels, each)) for each in asked))

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read) for _ in range(4)]
        try:
            list(pool.map(lambda each: store.record(kernels[0], each, TIME), asked))
        finally:
            stop.set()
        for reader in readers:
            reader.result()
    assert len(held(folder)) == 40
    assert times(store, kernels, asked[-1]) == {"user.a": 10.0}
    assert max(seen, default=0) <= 40


def test_the_tables_are_made_once(folder, kernels):
    databases = [Database(folder / "perfdb.sqlite") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: each.write(lambda connection: None), databases))
    assert {each.read("PRAGMA user_version")[0][0] for each in databases} == {sql_schema.VERSION}
    assert all(each.notes() == () for each in databases)


def of_another_version(path):
    """A file of times of another schema, and the name of the one that takes its place."""
    database = Database(path)
    database.write(lambda connection: None)
    database.close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {sql_schema.VERSION + 1}")
    connection.close()
    return path.with_name(f"{path.stem}.schema-{sql_schema.VERSION}{path.suffix}")


def test_a_reader_and_a_writer_that_meet_another_version_at_once_take_one_file(tmp_path, monkeypatch):
    beside = of_another_version(tmp_path / "perfdb.sqlite")
    recovered, both = Database._recovered, threading.Barrier(2, timeout=60)  # which fails rather than hang

    def meeting(self, *found, **how):
        both.wait()  # until the other thread has met it, too
        return recovered(self, *found, **how)

    monkeypatch.setattr(Database, "_recovered", meeting)
    for _ in range(20):
        database = Database(tmp_path / "perfdb.sqlite")
        with pytest.warns(lz.LayerZeroWarning, match="is left alone") as caught, ThreadPoolExecutor(2) as pool:
            reading = pool.submit(database.read, "SELECT 1")
            assert pool.submit(database.write, lambda connection: None).result()
            reading.result()
        assert (database.path, len(caught), len(database.notes())) == (beside, 1, 1)
        database.close()


AT_ONCE = """
import os, sys, threading, warnings
from pathlib import Path
from layerzero.tuning.storage.database import Database
warnings.simplefilter("ignore")
path, beside = map(Path, sys.argv[1:])
waiting, go = os.pipe()
children = []
for number in range(2):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(waiting, 1)
        for each in range(20):
            database, both = Database(path), threading.Barrier(2)
            reader = threading.Thread(target=lambda: (both.wait(), database.read("SELECT 1")))
            reader.start()
            both.wait()
            row = (str(number), each)
            assert database.write(lambda into: into.execute("INSERT INTO stale VALUES (?, 0, '', '', ?, 0)", row))
            reader.join()
            assert database.path == beside, database.path
            database.close()
        os._exit(0)
    children.append(child)
os.close(go)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


@pytest.mark.slow
def test_two_processes_that_meet_another_version_at_once_write_into_one_file(folder):
    path = folder / "perfdb.sqlite"
    beside = of_another_version(path)
    run(AT_ONCE, folder, str(path), str(beside))
    assert len(Database(beside).read("SELECT * FROM stale")) == 40
    assert {each.name for each in folder.glob("*.sqlite")} == {path.name, beside.name}


# cost


def filled(store, kernels, works):
    """Times of every kernel for this many works."""
    here = environment.surroundings(facts().device)
    template = rows_module.row_of("", rows_module.work_of(facts()), "", here.environment(kernels[0])[0], TIME)
    environments = {kernel.id: here.environment(kernel)[0] for kernel in kernels}
    batch = []
    for number in range(1, works + 1):
        work = template.facts | {"rows": str(number)}
        for kernel_id, each in environments.items():
            batch.append(msgspec.structs.replace(template, kernel=kernel_id, facts=work, environment=each))
        if len(batch) >= 20_000 or number == works:
            store.add(batch)
            batch = []
    store.database.close()


def steps_of_reads(store, kernels, works, monkeypatch):
    """How many instructions SQLite runs to read what is known of a work, at most."""
    steps = [0]

    class Counting(sqlite3.Connection):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.set_progress_handler(lambda: steps.__setitem__(0, steps[0] + 1), 1)

    connect = sqlite3.connect
    found = []
    with monkeypatch.context() as counted:
        counted.setattr(sqlite3, "connect", lambda *args, **kwargs: connect(*args, **(kwargs | {"factory": Counting})))
        assert set(times(store, kernels, facts(1))) == {kernel.id for kernel in kernels}
        for number in range(30):
            steps[0] = 0
            assert store.evidence(kernels, facts(1 + number * 7919 % works))
            found.append(steps[0])
    assert max(found) > 0
    return max(found)


@pytest.mark.parametrize(
    "rows", [pytest.param(100_000, marks=pytest.mark.slow), pytest.param(1_000_000, marks=pytest.mark.stress)]
)
def test_many_rows_cost_a_miss_no_more_than_a_few(folder, monkeypatch, rows):
    kernels = REGISTRY.candidates("norm.rms")
    few, many = fresh(), fresh()
    lz.configure(perfdb={"path": str(folder / "few.sqlite")})
    filled(few, kernels, 10)
    quick = steps_of_reads(few, kernels, 10, monkeypatch)
    lz.configure(perfdb={"path": str(folder / "many.sqlite")})
    works = rows // len(kernels)
    filled(many, kernels, works)
    assert many.database.read("SELECT count(*) FROM times")[0][0] > 0.99 * rows
    many.database.close()
    assert steps_of_reads(many, kernels, works, monkeypatch) < 2 * quick


def test_a_miss_without_a_database_costs_little(folder, kernels):
    store, asked = fresh(), facts()
    store.evidence(kernels, asked)
    made = events(lambda: store.evidence(kernels, asked))
    assert len(made) < 100, made
    assert not {"Cursor.execute", "Connection.execute", "connect", "open"} & set(made)


class LockThatOthersWaitFor:
    """As it is let go a second time, another thread has it, and adds a line."""

    def __init__(self, lock, then):
        self.lock, self.then, self.turns = lock, then, 2

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *told):
        self.turns -= 1
        if self.turns == 0:
            self.then()
        self.lock.release()


def test_what_another_thread_adds_meanwhile_is_no_failure_to_write(folder, kernels):
    store = fresh()
    store.record(kernels[0], facts(1), TIME)
    spool = store.spool
    spool._lock = LockThatOthersWaitFor(spool._lock, lambda: spool._unwritten.append((line_of([]), 0)))
    store.record(kernels[0], facts(2), TIME)  # warned that the place cannot be written, without a reason
    assert times(store, kernels, facts(2)) == {"user.a": 10.0}
    assert store.notes() == ()
