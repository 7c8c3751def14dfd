"""What becomes of a file of times that cannot be trusted, read or written."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from one_time import TIME, facts, fresh, run, times

import layerzero as lz
from layerzero.core.system import disk
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import archive, connections, sql_schema
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger


def damaged(path):
    path.write_bytes(b"\x00\xff" * 5000)


def truncated(path):
    path.write_bytes(path.read_bytes()[:6000])


def foreign(path):
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    connection.close()


def test_no_statement_numbers_its_places():
    """``?1`` beside a tuple of values: Python 3.12 warns of it, and 3.14 refuses, so that no time would be read."""
    sources = Path(sql_schema.__file__).parents[2].rglob("*.py")
    assert [path for path in sources if re.search(r"\?\d", path.read_text())] == []


def test_calls_that_are_invented_are_not_counted_and_those_behind_them_are(tmp_path):
    """Runs of two threads may overlap; the last to end must not leave the ledger deaf."""
    ledger = ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
    with ExitStack() as other:
        with ledger.uncounted():
            other.enter_context(ledger.uncounted())
            lz.rms_norm(torch.randn(2, 8), torch.ones(8))
        lz.rms_norm(torch.randn(2, 32), torch.ones(32))
    assert ledger.calls() == []
    lz.rms_norm(torch.randn(2, 16), torch.ones(16))
    assert len(ledger.calls()) == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_calls_that_could_not_be_written_wait_for_the_next_time(tmp_path, monkeypatch, error):
    def full(*args, **kwargs):
        raise error

    ledger = ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
    lz.rms_norm(torch.randn(2, 8), torch.ones(8))
    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(disk, "write_whole", full)
        ledger.look()
    lz.rms_norm(torch.randn(2, 16), torch.ones(16))
    assert sorted(call.tensors["input"].shape for _, call in ledger.calls()) == [(2, 8), (2, 16)]


@pytest.mark.parametrize("ruin", [damaged, truncated, foreign])
@pytest.mark.parametrize("reading", [True, False])
def test_a_file_that_is_not_ours_is_set_aside_and_named(folder, kernels, ruin, reading):
    path = folder / "perfdb.sqlite"
    filled = fresh()
    for rows in range(1, 30):
        filled.record(kernels[0], facts(rows), TIME)
    filled.spool.close()  # the process ends; while it lives, its journal would bring the rows back
    filled.database.close()
    assert [each.name for each in folder.iterdir() if each.name.endswith("-wal")] == []
    ruin(path)
    left = path.read_bytes()

    store = fresh()
    with pytest.warns(lz.LayerZeroWarning, match="was set aside as perfdb.sqlite.set-aside-"):
        if reading:
            assert times(store, kernels, facts(29)) == {}
        store.record(kernels[1], facts(), TIME)
    assert times(store, kernels, facts()) == {"user.b": 10.0}
    (aside,) = connections.set_aside(path)
    assert (folder / aside).read_bytes() == left
    assert aside in store.notes()[0]
    assert aside in fresh().notes()[0], "another process tells as well"
    assert times(fresh(), kernels, facts()) == {"user.b": 10.0}


@pytest.mark.parametrize("version", [sql_schema.VERSION - 1, sql_schema.VERSION + 1])
def test_a_file_of_another_version_is_left_alone(folder, kernels, version):
    path = folder / "perfdb.sqlite"
    fresh().record(kernels[0], facts(), TIME)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    store, beside = fresh(), f"perfdb.schema-{sql_schema.VERSION}.sqlite"
    told = (
        f"{path}: wanted schema {sql_schema.VERSION}, got {version} of another version; "
        "`layerzero tune` measures again. "
        f"The file is left alone, and times are kept in {beside} next to it"
    )
    with pytest.warns(lz.LayerZeroWarning) as caught:
        assert times(store, kernels, facts()) == {}
        store.record(kernels[1], facts(), TIME)
        assert store.notes() == (told,)
    assert [str(each.message) for each in caught] == [told], "once"
    with pytest.warns(lz.LayerZeroWarning, match=beside):
        assert times(fresh(), kernels, facts()) == {"user.b": 10.0}
    assert archive.damage(path) == told.partition(": ")[2].partition(". ")[0], "what merge and check say"
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT kernel FROM times").fetchall() == [("user.a",)]
    connection.close()


def test_a_file_that_is_replaced_is_opened_anew(folder, kernels):
    store = fresh()
    store.record(kernels[0], facts(), TIME)
    for suffix in ("", "-wal", "-shm"):
        Path(f"{folder / 'perfdb.sqlite'}{suffix}").unlink(missing_ok=True)
    assert times(store, kernels, facts()) == {}
    store.record(kernels[1], facts(), TIME)
    assert times(fresh(), kernels, facts()) == {"user.b": 10.0}


def test_where_nothing_can_be_written_memory_serves_and_it_is_said_once(folder, kernels):
    blocked = folder / "file"
    blocked.write_text("no folder")
    lz.configure(perfdb={"path": str(blocked / "times.sqlite")})
    store = fresh()
    with pytest.warns(lz.LayerZeroWarning, match="cannot be written: measured times end with this process"):
        store.record(kernels[0], facts(), TIME)
    store.record(kernels[1], facts(), TIME)
    assert times(store, kernels, facts()) == {"user.a": 10.0, "user.b": 10.0}
    assert any("cannot be written" in note for note in store.notes())


@pytest.fixture
def open_folder(monkeypatch):
    """A cache folder that another user could get to: what pytest makes, it closes to others again and again."""
    made = Path(tempfile.mkdtemp())
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(made))
    lz.configure()
    yield made
    made.chmod(0o755)
    shutil.rmtree(made)


@pytest.mark.slow
def test_a_file_without_permission_to_write_is_read(open_folder):
    folder = open_folder
    path = folder / "perfdb.sqlite"
    store = fresh()
    store.record(REGISTRY.kernel("torch.rms_norm"), facts(), TIME)
    store.database.close()
    path.with_name("perfdb.sqlite.lock").unlink()
    script = f"""
import os, sys, warnings
os.umask(0)
os.chmod({str(folder)!r}, 0o555); os.chmod({str(path)!r}, 0o444)
import layerzero as lz, torch
from layerzero.tuning.storage.store import TimeStore
from layerzero.engine.registry import REGISTRY
from layerzero.core.evidence import Measurement
kernel = REGISTRY.kernel("torch.rms_norm")
store, facts = TimeStore(), lz.facts("rms_norm", torch.randn(4, 64), torch.randn(64))
lz.explain("rms_norm", torch.randn(4, 64), torch.randn(64))  # imports what it needs while it may
if os.getuid() == 0:
    os.setuid(65534)
assert store.evidence([kernel], facts)["torch.rms_norm"].time_us == 10.0
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    store.record(kernel, lz.facts("rms_norm", torch.randn(9, 64), torch.randn(64)), Measurement(5.0, 5.0, 0.0, 20))
    store.record(kernel, lz.facts("rms_norm", torch.randn(8, 64), torch.randn(64)), Measurement(5.0, 5.0, 0.0, 20))
assert len(caught) == 1, caught
nine = lz.facts("rms_norm", torch.randn(9, 64), torch.randn(64))
assert store.evidence([kernel], nine)["torch.rms_norm"].time_us == 5.0
assert store.evidence([kernel], facts)["torch.rms_norm"].time_us == 10.0
assert any("cannot be written" in note for note in store.notes()), store.notes()
"""
    run(script, folder)


MOUNTS = """21 1 8:1 / / rw shared:1 - ext4 /dev/sda rw
30 21 0:40 / /home rw shared:2 - nfs4 server:/home rw
31 30 8:2 / /home/me/local\\040disk rw - xfs /dev/sdb rw
32 21 0:41 / /mnt rw - fuse.sshfs host: rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/var/cache", ""),
        ("/home/me", "nfs4"),
        ("/home/me/local disk/cache", ""),
        ("/homestead", ""),
        ("/mnt/x", "fuse.sshfs"),
    ],
)
def test_network_file_systems_are_known(tmp_path, monkeypatch, folder, kind):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    monkeypatch.setattr(connections, "_MOUNTS", mounts)
    assert connections.network_type(Path(folder)) == kind


def test_on_a_network_file_system_a_rollback_journal_is_kept_and_told(folder, kernels, monkeypatch):
    local = fresh()
    local.record(kernels[0], facts(), TIME)
    assert journal(folder) == "wal"
    local.database.close()
    monkeypatch.setattr(connections, "network_type", lambda _: "nfs4")
    store = fresh()
    store.record(kernels[1], facts(), TIME)
    assert journal(folder) == "delete"
    assert times(store, kernels, facts()) == {"user.a": 10.0, "user.b": 10.0}
    assert "lies on a network file system (nfs4)" in store.notes()[0]


def journal(folder):
    connection = sqlite3.connect(folder / "perfdb.sqlite")
    try:
        return connection.execute("PRAGMA journal_mode").fetchone()[0]
    finally:
        connection.close()


# many at once
