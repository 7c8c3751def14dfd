"""A cache folder may hold anything: pipes, links, devices, another user's files; nothing of it hangs or misleads."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch
from one_time import right

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import Ledger, Verdict
from layerzero.core.system import disk
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.freeze import Frost
from layerzero.tuning.measurement.workload import FORMAT, Manifest
from layerzero.tuning.storage import archive, connections, journal
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.rows import CallsMade
from layerzero.tuning.storage.store import StoreLedger, TimeStore

TIME = Measurement(10.0, 12.0, 0.01, 20, noise=0.02)
X, W = torch.randn(4, 64), torch.randn(64)


@pytest.fixture(autouse=True)
def hangs_end_the_run():
    """Far more than anything here takes: what hangs ends in a traceback, not in a person's evening."""
    signal.alarm(300)
    yield
    signal.alarm(0)


@pytest.fixture
def kernel():
    lz.register_kernel("norm.rms", "mine.rms_norm", priority=100)(right)
    return REGISTRY.kernel("mine.rms_norm")


def facts(rows=4):
    return lz.facts("rms_norm", torch.empty(rows, 64), W)


STRANGE = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("/nonexistent/x"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("kind", ["verdict", "suspect", "proved", "failures"])
def test_a_record_that_is_no_plain_file(folder, kernel, what, kind):
    ledger = FileLedger(folder)
    ledger.record_verdict(kernel, facts(), Verdict.WRONG)
    (path,) = (folder / "ledger-1").glob("*.verdict.json")
    path = path.rename(path.with_name(path.name.replace("verdict", kind)))
    path.unlink()
    STRANGE[what](path)
    fresh = FileLedger(folder)
    if kind in ("verdict", "suspect"):
        with pytest.warns(lz.LayerZeroWarning, match="may have been a ban"):
            assert fresh.suspicion(kernel, facts()) is not None
    else:
        assert fresh.suspicion(kernel, facts()) is None
        assert fresh.begin(kernel, facts()) is not None
    assert len(fresh.notes()) == 1


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("name", ["mine.rms_norm@{key}.running-{nonce}.json", "some.tmp", "notes.txt"])
def test_a_marker_or_other_file_that_is_no_plain_file(folder, kernel, what, name):
    (folder / "ledger-1").mkdir(mode=0o700)
    STRANGE[what](folder / "ledger-1" / name.format(key="0" * 24, nonce="0" * 32))
    with pytest.warns(lz.LayerZeroWarning, match="a ban") if "running" in name else contextlib.nullcontext():
        ledger = FileLedger(folder)
        assert ledger.suspicion(kernel, facts()) is None, "of another class"
        ledger.record_verdict(kernel, facts(), Verdict.WRONG)
        assert FileLedger(folder).verdict(kernel, facts()) is Verdict.WRONG


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize(
    "where", ["perfdb.sqlite", "perfdb.sqlite.lock", "perfdb.sqlite.turn", "perfdb.sqlite-journal"]
)
def test_a_database_or_lock_that_is_no_plain_file(folder, kernel, what, where):
    STRANGE[what](folder / where)
    store = TimeStore()
    with pytest.MonkeyPatch.context() as patch:
        told = []
        patch.setattr("warnings.warn", lambda text, *_, **__: told.append(text))
        store.record(kernel, facts(), TIME)
        assert store.evidence([kernel], facts())["mine.rms_norm"].time_us == 10.0
    assert store.notes() or where == "perfdb.sqlite-journal"
    assert len(told) <= 2


@pytest.mark.parametrize("what", STRANGE)
def test_journals_that_are_none(folder, kernel, what):
    rows = journal.folder_of(folder / "perfdb.sqlite")
    rows.mkdir(mode=0o700)
    STRANGE[what](rows / "1-0.rows")
    STRANGE[what](rows / "1-0.at")
    store = TimeStore()
    store.record(kernel, facts(), TIME)
    assert TimeStore().evidence([kernel], facts())["mine.rms_norm"].time_us == 10.0


def test_files_and_folders_are_private(tmp_path, monkeypatch, kernel):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "new" / "cache"))
    lz.configure()
    before = os.umask(0)
    try:
        ledger = StoreLedger(FileLedger(tmp_path / "new" / "cache"))
        ledger.record_verdict(kernel, facts(), Verdict.WRONG)
        ledger.record_time(kernel, facts(), TIME)
    finally:
        os.umask(before)
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert {path.name for path in made} >= {"cache", "ledger-1", "perfdb.sqlite", "perfdb.sqlite.turn"}
    assert {oct(stat.S_IMODE(path.lstat().st_mode)) for path in made if path.is_dir()} == {"0o700"}
    assert {oct(stat.S_IMODE(path.lstat().st_mode)) for path in made if path.is_file()} == {"0o600"}


def anybodys(folder):
    folder.chmod(0o777)


def anothers(folder):
    os.chown(folder, 12345, 12345)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")


@pytest.mark.parametrize("open_to", [anybodys, pytest.param(anothers, marks=AS_ROOT)])
def test_a_folder_that_others_may_write_is_refused_with_a_word(tmp_path, monkeypatch, kernel, open_to):
    FileLedger(tmp_path / "cache").record_verdict(kernel, facts(), Verdict.PASSED)
    open_to(tmp_path / "cache")
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    lz.configure()
    before = sorted((tmp_path / "cache").rglob("*"))
    with pytest.warns(lz.LayerZeroWarning, match=r"belongs to user 12345|can be written by every user .mode 777"):
        ENGINE.ledger = StoreLedger(FileLedger(tmp_path / "cache"))
        assert ENGINE.ledger.verdict(kernel, facts()) is None
        ENGINE.ledger.record_verdict(kernel, facts(), Verdict.WRONG)
        ENGINE.ledger.record_time(kernel, facts(), TIME)
    assert ENGINE.ledger.verdict(kernel, facts()) is Verdict.WRONG, "in this process"
    assert ENGINE.ledger.evidence([kernel], facts())["mine.rms_norm"].time_us == 10.0
    assert sorted((tmp_path / "cache").rglob("*")) == before
    assert sum(str(tmp_path / "cache") in issue for issue in lz.doctor().issues) >= 2


@pytest.mark.parametrize("open_to", [anybodys, pytest.param(anothers, marks=AS_ROOT)])
def test_bans_in_a_folder_that_others_may_write_count_and_nothing_else_does(tmp_path, kernel, open_to):
    """A ban can only refuse: Kubernetes mounts its folders as 0777, and a kernel that was wrong ran again there."""
    folder = tmp_path / "cache"
    before = FileLedger(folder)
    before.record_verdict(kernel, facts(), Verdict.WRONG, "off by 3")
    before.record_failure(kernel, facts(), "raised")
    marker = before.begin(kernel, facts())
    open_to(folder)
    files = sorted(folder.rglob("*"))
    with pytest.warns(lz.LayerZeroWarning, match="of it bans alone count, which can only refuse kernels"):
        ledger = FileLedger(folder)
        assert ledger.verdict(kernel, facts()) is Verdict.WRONG
    assert ledger.failures() == {}
    assert [each.verdict for each in ledger.suspects()] == [Verdict.WRONG], "no marker became a suspect"
    assert any("bans alone count" in note for note in ledger.notes())
    ledger.record_verdict(kernel, facts(), Verdict.PASSED)
    assert ledger.verdict(kernel, facts()) is Verdict.PASSED, "what this process found itself"
    assert sorted(folder.rglob("*")) == files
    with pytest.warns(lz.LayerZeroWarning, match="bans alone count"):
        assert FileLedger(folder).verdict(kernel, facts()) is Verdict.WRONG
    before.withdraw(marker)


def test_a_damaged_ban_in_such_a_folder_is_doubted_where_it_lies(tmp_path, kernel):
    folder = tmp_path / "cache"
    FileLedger(folder).record_verdict(kernel, facts(), Verdict.WRONG)
    (file,) = folder.rglob("*.verdict.json")
    file.write_bytes(b"{")
    folder.chmod(0o777)
    with pytest.warns(lz.LayerZeroWarning, match=r"bans alone count|may have been a ban"):
        ledger = FileLedger(folder)
        assert "it is damaged" in ledger.suspicion(kernel, facts())
    assert file.read_bytes() == b"{"


def test_what_a_folder_holds_counts_again_once_it_is_private(tmp_path, kernel):
    folder = tmp_path / "cache"
    FileLedger(folder).record_verdict(kernel, facts(), Verdict.PASSED)
    folder.chmod(0o777)
    with pytest.warns(lz.LayerZeroWarning, match="bans alone count"):
        ledger = FileLedger(folder)
        assert ledger.verdict(kernel, facts()) is None
    folder.chmod(0o700)
    ledger.notes()  # lists it anew
    assert ledger.verdict(kernel, facts()) is Verdict.PASSED


@AS_ROOT
def test_a_folder_that_a_group_of_others_may_write_is_not_trusted(tmp_path):
    os.chown(tmp_path, os.geteuid(), 4711)
    for mode, refused in ((0o700, False), (0o750, False), (0o770, True), (0o775, True), (0o2775, True)):
        tmp_path.chmod(mode)
        why = disk.distrust(tmp_path)
        assert ("can be written by group 4711" in why) is refused, oct(mode)
    os.chown(tmp_path, os.geteuid(), 0)
    tmp_path.chmod(0o775)
    assert disk.distrust(tmp_path) == "", "the group of root may do anything anyway"


def test_a_group_of_the_users_own_may_write(tmp_path, monkeypatch):
    """Many systems give each user a group of the same number, and folders 0775."""
    tmp_path.chmod(0o775)
    found = tmp_path.stat()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "stat", lambda _: os.stat_result((*found[:4], 1000, 1000, *found[6:])))
    for group, refused in ((1000, False), (100, True)):
        monkeypatch.setattr(os, "getegid", lambda group=group: group)
        assert bool(disk.distrust(tmp_path)) is refused


def test_what_is_kept_is_private_under_any_umask(tmp_path, kernel):
    (tmp_path / "cache").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        made = CallsMade(tmp_path / "cache")
        made.add(facts())
        made.write()
        made.add(facts())
        made.write()
    finally:
        os.umask(before)
    assert (tmp_path / "cache" / "calls-1.json").stat().st_mode & 0o777 == 0o600


def test_a_folder_of_ones_own_may_be_a_link(tmp_path, kernel):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "real")
    FileLedger(tmp_path / "cache").record_verdict(kernel, facts(), Verdict.WRONG)
    assert FileLedger(tmp_path / "real").verdict(kernel, facts()) is Verdict.WRONG


# documents


def documents():
    yield "frozen choices", Frost(1, "", "", "", "", {}).sealed().write
    yield "a manifest", Manifest(FORMAT, 0.0, "", []).save
    yield "times", lambda path: archive.export([], path)
    yield "priors", lambda path: archive.export_prior(archive.Table(1, "", "", "", "", {}, "", "", []), path)


@pytest.mark.parametrize(("what", "write"), list(documents()), ids=lambda each: each if isinstance(each, str) else "")
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_document_is_written_whole_or_not_at_all(tmp_path, monkeypatch, what, write, error):
    path = tmp_path / "document"
    path.write_text("before")
    real = disk.write_all

    def write_all(file, data):
        real(file, data[: len(data) // 2])
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(disk, "write_all", write_all)
        write(path)
    assert [each.name for each in tmp_path.iterdir()] == ["document"]
    assert path.read_text() == "before"
    write(path)
    assert [each.name for each in tmp_path.iterdir()] == ["document"]
    assert path.read_text() != "before"


def test_a_document_survives_a_power_cut(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "write"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (done.append(name), real(*given))[1])
    real = Path.replace
    monkeypatch.setattr(Path, "replace", lambda *given: (done.append("rename"), real(*given))[1])
    disk.write_whole(tmp_path / "document", b"text")
    assert done == ["write", "fsync", "rename", "fsync"], "the content before its name, then the name"


def test_a_document_goes_through_links_and_into_pipes(tmp_path):
    (tmp_path / "real").write_text("before")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    disk.write_whole(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "after"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640
    disk.write_whole("/dev/null", b"text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_one_call_may_write_a_part_only(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:3]))
    disk.write_whole(tmp_path / "document", b"0123456789")
    assert (tmp_path / "document").read_bytes() == b"0123456789"


def test_what_is_too_large_is_no_record(tmp_path):
    (tmp_path / "large").write_bytes(b"x" * 100)
    with pytest.raises(OSError, match="wanted at most 99 bytes"):
        disk.read_plain(tmp_path / "large", 99)


def test_a_setting_may_name_a_link_to_a_database(folder, kernel):
    (folder / "real").mkdir(mode=0o700)
    (folder / "times.sqlite").symlink_to(folder / "real" / "times.sqlite")
    lz.configure(perfdb={"path": str(folder / "times.sqlite")})
    TimeStore().record(kernel, facts(), TIME)
    assert (folder / "real" / "times.sqlite").is_file()
    assert connections.set_aside(folder / "times.sqlite") == []


@pytest.mark.parametrize("below", ["", "further"])
def test_doctor_tells_of_a_cache_that_cannot_be_before_anybody_writes(tmp_path, monkeypatch, below):
    (tmp_path / "file").write_text("x")
    where = tmp_path / "file" / below
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(where))
    lz.configure()
    ENGINE.ledger = StoreLedger(FileLedger(where))
    assert any(f"{tmp_path / 'file'} is no folder" in issue for issue in lz.doctor().issues)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    (note,) = FileLedger(tmp_path / "cache").notes()
    assert f"{tmp_path} may not be written" in note
    monkeypatch.undo()
    room = os.statvfs_result((4096, 4096, 1000, 3, 3, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    (note,) = FileLedger(tmp_path / "cache").notes()
    assert "cannot be written: its disk is full (12 KiB left); mend that or set LAYERZERO_CACHE_DIR" in note
    monkeypatch.undo()
    assert FileLedger(tmp_path / "cache").notes() == ()
    ENGINE.ledger = Ledger()


def test_a_whole_cache_that_is_a_file(tmp_path, monkeypatch, kernel):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    lz.configure()
    (tmp_path / "cache").write_text("x")
    with pytest.warns(lz.LayerZeroWarning):
        ENGINE.ledger = StoreLedger(FileLedger(tmp_path / "cache"))
        ENGINE.ledger.record_verdict(kernel, facts(), Verdict.WRONG)
        ENGINE.ledger.record_time(kernel, facts(), TIME)
    assert lz.which("rms_norm", X, W)["kernel_id"] != "mine.rms_norm"
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    ENGINE.ledger = Ledger()
