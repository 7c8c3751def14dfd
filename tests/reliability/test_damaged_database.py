"""A damaged, changed or older database of times: no call fails, nothing wrong is believed, and it is told."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import sqlite3
import warnings
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from one_time import right
from typer.testing import CliRunner

import layerzero as lz
from drawing import examples
from layerzero.cli.app import main
from layerzero.core.evidence import Measurement, Provenance
from layerzero.core.ledger import Ledger
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import archive, connections
from layerzero.tuning.storage import rows as rows_module
from layerzero.tuning.storage.store import StoreLedger, TimeStore

TIME = Measurement(10.0, 12.0, 0.01, 20, noise=0.02)
ROWS = (1, 8, 64, 512)


@pytest.fixture
def kernels():
    for name in ("a", "b"):
        lz.register_kernel("norm.rms", f"user.{name}", priority=50)(right)
    return [REGISTRY.kernel("user.a"), REGISTRY.kernel("user.b")]


def facts(rows):
    return lz.facts("rms_norm", torch.empty(rows, 64), torch.empty(64))


MADE = []


@pytest.fixture
def path(tmp_path, monkeypatch, kernels):
    """A database that an ended process left, with measured times and models."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    file = tmp_path / "perfdb.sqlite"
    if MADE:
        file.write_bytes(MADE[0])
        return file
    store = TimeStore()
    for number, rows in enumerate(ROWS):
        for factor, kernel in zip((1.0, 1.5), kernels, strict=True):
            store.record(kernel, facts(rows), replace(TIME, median_us=factor * 10.0 * (number + 1)))
    store.settle()
    ended(store)
    MADE.append(file.read_bytes())
    return file


def ended(store):
    """What the end of a process does."""
    store.spool.close()
    store.database.close()


def sql(path, *statements):
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA ignore_check_constraints = 1")
        for statement in statements:
            connection.execute(statement)
    finally:
        connection.close()


def used(kernels):
    """What a process makes of the file: measured times by kernel and rows, a prediction, notes; it writes, too."""
    ENGINE.ledger = StoreLedger(Ledger())
    found = {rows: ENGINE.ledger.evidence(kernels, facts(rows)) for rows in (*ROWS, 100)}
    lz.rms_norm(torch.randn(8, 64), torch.randn(64))
    lz.rms_norm(torch.randn(100, 64), torch.randn(64))
    ENGINE.ledger.record_time(kernels[0], facts(77), TIME)
    assert ENGINE.ledger.evidence(kernels, facts(77))["user.a"].time_us == 10.0
    lz.doctor()
    measured = {
        (rows, name): each.time_us
        for rows, times in found.items()
        for name, each in times.items()
        if each.provenance is Provenance.MEASURED
    }
    return measured, ENGINE.ledger.times.notes()


WHOLE = {
    (rows, f"user.{name}"): f * 10.0 * (n + 1) for n, rows in enumerate(ROWS) for name, f in (("a", 1.0), ("b", 1.5))
}

WRONG = {
    "a model that is none": "UPDATE models SET model = x'00ff'",
    "a model as text": "UPDATE models SET model = '{}'",
    "a model of another type": "UPDATE models SET model = x'5b312c325d'",
    "a format as text": "UPDATE models SET format = 'x'",
    "a work that is none": "UPDATE works SET facts = 'nope'",
    "a work of other types": "UPDATE works SET facts = '{\"rows\":5}'",
    "huge sizes": 'UPDATE works SET facts = replace(facts, \'"rows":"\', \'"rows":"9999999999999999999999\')',
    "an environment that is none": "UPDATE environments SET facts = 'nope'",
    "no works": "DELETE FROM works",
    "no models": "DELETE FROM models",
    "a median of 1e308": "UPDATE times SET median_us = 1e308",
    "an endless median": "UPDATE times SET median_us = 9e999",
    "a tiny median": "UPDATE times SET median_us = 1e-300",
    "a negative median": "UPDATE times SET median_us = -1",
    "endless noise": "UPDATE times SET noise = 9e999",
    "an endless variance": "UPDATE times SET variance_us2 = 9e999",
    "text as a number": "UPDATE times SET p95_us = 'abc'",
    "text as a device's time": "UPDATE times SET device_us = 'abc'",
    "all samples": "UPDATE times SET samples = 9223372036854775807",
    "no date": "UPDATE times SET written_at = ''",
    "bytes as a date": "UPDATE times SET written_at = x'ff00'",
    "bytes as adaptations": "UPDATE times SET adapts = x'ff'",
    "bytes as a condition": "UPDATE times SET condition = x'00'",
    "text that is none": "UPDATE times SET kernel = cast(x'ff41' AS text) WHERE kernel = 'user.a'",
    "another kernel": "UPDATE times SET kernel = 'user.c' WHERE kernel = 'user.a'",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_was_changed_by_hand_is_not_believed_and_told(path, kernels, what):
    sql(path, WRONG[what])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured, notes = used(kernels)
    assert measured.items() <= WHOLE.items(), "nothing but what was measured"
    assert sum(issubclass(each.category, lz.LayerZeroWarning) for each in caught) <= 1
    if "UPDATE times SET " in WRONG[what] and "p95_us" not in WRONG[what]:  # which decides nothing
        assert any("damaged times count for nothing" in note for note in notes)
        assert len(caught) == 1


@pytest.mark.parametrize("what", [each for each in WRONG if each not in ("no models", "a format as text")])
def test_checking_tells_what_is_wrong(path, kernels, what):
    sql(path, WRONG[what])
    result = CliRunner().invoke(main, ["perfdb", "check"])
    assert result.exit_code == 1
    assert str(path) in result.stdout


STRUCTURE = {
    "schema -1": "PRAGMA user_version = -1",
    "no table of times": "DROP TABLE times",
    "no table of models": "DROP TABLE models",
    "a view in its place": "ALTER TABLE times RENAME TO other",
    "a trigger": "CREATE TRIGGER no BEFORE INSERT ON times BEGIN SELECT raise(ABORT, 'no'); END",
    "another column": "ALTER TABLE times ADD COLUMN more TEXT",
}


@pytest.mark.parametrize("what", STRUCTURE)
def test_a_file_that_is_not_as_it_was_made_is_set_aside_once_and_its_rows_are_saved(path, kernels, what):
    sql(path, STRUCTURE[what])
    with pytest.warns(lz.LayerZeroWarning, match="it was set aside as") as caught:
        used(kernels)
    assert len(caught) == 1
    measured, notes = used(kernels)
    assert len(connections.set_aside(path)) == 1
    assert any("set aside" in note for note in notes)
    lost = what in ("no table of times", "a view in its place")
    assert measured == ({} if lost else WHOLE)


def test_a_running_process_whose_table_goes_works_on(path, kernels):
    store = TimeStore()
    assert store.evidence(kernels, facts(8))
    sql(path, "DROP TABLE times")
    with pytest.warns(lz.LayerZeroWarning, match="it was set aside as"):
        assert store.evidence(kernels, facts(8)) == {}
        store.record(kernels[0], facts(8), TIME)
    assert store.evidence(kernels, facts(8))["user.a"].time_us == 10.0


def test_a_cache_that_is_wiped_below_a_running_process_is_made_anew(path, kernels):
    """What is measured afterwards is kept, not written into files that nobody can open any more."""
    store = TimeStore()
    store.record(kernels[0], facts(8), TIME)
    for rows in (9, 10):
        shutil.rmtree(path.parent)
        store.record(kernels[0], facts(rows), TIME)
        store.settle()
        assert store.evidence(kernels, facts(rows))["user.a"].time_us == 10.0
    ended(store)
    assert TimeStore().evidence(kernels, facts(10))["user.a"].time_us == 10.0


def flipped(whole, draw, bits):
    spoilt = bytearray(whole)
    for _ in range(bits):
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
    return bytes(spoilt)


@pytest.mark.parametrize("bits", [1, 50])
def test_flipped_bits_raise_nothing_and_nothing_wrong_is_believed(path, kernels, bits):
    whole, draw = path.read_bytes(), random.Random(bits)
    for _ in range(examples(100)):
        for each in path.parent.iterdir():
            if each.is_file():
                each.unlink()
        path.write_bytes(flipped(whole, draw, bits))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store = TimeStore()
            for rows in (*ROWS, 100):
                for name, each in store.evidence(kernels, facts(rows)).items():
                    if each.provenance is Provenance.MEASURED:
                        assert each.time_us == WHOLE[rows, name]
            store.record(kernels[0], facts(8), TIME)
            assert store.evidence(kernels, facts(8))["user.a"].time_us == 10.0
            store.notes()
        ended(store)


@pytest.fixture
def clock(monkeypatch):
    def set_to(year):
        monkeypatch.setattr(rows_module, "now", lambda: f"{year}-06-01T00:00:00.000Z")

    return set_to


def test_a_clock_that_was_ahead_once_makes_no_later_time_void(path, kernels, clock):
    store = TimeStore()
    clock(2031)
    store.record(kernels[0], facts(8), replace(TIME, median_us=99.0))
    clock(2030)
    result = CliRunner().invoke(main, ["perfdb", "check"])
    assert "1 times are dated in the future" in result.stdout
    with pytest.warns(lz.LayerZeroWarning, match="a clock was ahead"):
        store.record(kernels[0], facts(8), replace(TIME, median_us=11.0))
    assert TimeStore().evidence(kernels, facts(8))["user.a"].time_us == 11.0
    assert any("a clock was ahead" in note for note in store.notes())


def test_a_time_from_the_future_is_the_oldest_beside_others(path, kernels, clock):
    store = TimeStore()
    clock(2031)
    store.record(kernels[0], facts(8), replace(TIME, median_us=99.0, origin="bench"))
    clock(2030)
    assert store.evidence(kernels, facts(8))["user.a"].time_us == 20.0


LEAVES = (10, 13)
"""How SQLite's pages begin that hold rows: of an index, which a table without row ids is, and of a table."""


def test_a_damaged_page_costs_the_times_on_it_only(path, kernels):
    store = TimeStore()
    row = next(archive.rows(store.database))
    store.add([msgspec.structs.replace(row, facts=row.facts | {"rows": str(rows)}) for rows in range(1000, 1400)])
    ended(store)
    before = len(list(archive.rows(TimeStore().database)))
    whole = bytearray(path.read_bytes())
    leaves = [start for start in range(4096, len(whole), 4096) if whole[start] in LEAVES]  # others have whole branches
    middle = leaves[len(leaves) // 2]
    whole[middle : middle + 4096] = random.Random(3).randbytes(4096)
    path.write_bytes(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = TimeStore()
        store.database.read("SELECT sum(median_us), max(facts) FROM times JOIN works ON key = work")
        store.evidence(kernels, facts(8))
        left = len(list(archive.rows(store.database)))
    assert len(connections.set_aside(path)) == 1
    assert before > 400
    assert left > before * 0.8


def test_what_no_file_can_raise_reaches_no_caller(path, kernels, monkeypatch):
    store = TimeStore()
    monkeypatch.setattr("layerzero.tuning.storage.store.weighed", lambda *_: 1 / 0)
    with pytest.warns(lz.LayerZeroWarning, match="division by zero"):
        assert store.evidence(kernels, facts(8)) == {}
        assert store.evidence(kernels, facts(64)) == {}
    assert connections.set_aside(path) == [], "a sound file is no culprit"


@pytest.mark.parametrize("reading", [True, False])
def test_a_paused_process_holds_up_nobody(path, kernels, reading):
    sql(path, "PRAGMA user_version = -1")
    lock = os.open(Path(f"{path}.lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    store = TimeStore()
    with pytest.warns(lz.LayerZeroWarning):
        if reading:
            assert store.evidence(kernels, facts(8)) == {}
        else:
            store.record(kernels[0], facts(8), TIME)
            assert store.evidence(kernels, facts(8))["user.a"].time_us == 10.0
    os.close(lock)


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")  # that models are damaged
@pytest.mark.parametrize("column", ["kernel", "adapts"])
def test_a_model_whose_names_are_no_text_goes_and_hides_no_time(path, kernels, column):
    sql(path, f"UPDATE models SET {column} = CAST(x'75dfff' AS TEXT) WHERE kernel = 'user.a'")
    store = TimeStore()
    store.record(kernels[0], facts(3), replace(TIME, median_us=33.0))
    for _ in range(2):
        assert store.evidence(kernels, facts(3))["user.a"].time_us == 33.0
    ended(store)
    connection = sqlite3.connect(path)
    connection.text_factory = bytes
    names = connection.execute(f"SELECT {column} FROM models").fetchall()
    connection.close()
    assert (b"u\xdf\xff",) not in names
    assert not [note for note in store.notes() if "cannot be" in note]
