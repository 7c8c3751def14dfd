"""What was found bad stays refused: on a full disk, beside damage, in a folder that vanishes, and it is said."""

from __future__ import annotations

import errno
import os
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from one_time import right

import layerzero as lz
from layerzero.core.ledger import Verdict
from layerzero.core.system import disk
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import files as files_module
from layerzero.tuning.storage.files import FileLedger

X, W = torch.randn(4, 64), torch.randn(64)


@pytest.fixture
def kernel():
    lz.register_kernel("norm.rms", "mine.rms_norm", priority=100)(right)
    return REGISTRY.kernel("mine.rms_norm")


def facts(rows=4):
    return lz.facts("rms_norm", torch.empty(rows, 64), W)


def file_of(folder, kind):
    (found,) = Path(folder, "ledger-1").glob(f"*.{kind}*.json")
    return found


@pytest.fixture
def full(monkeypatch):
    """A switch: while it is on, the disk takes no byte."""
    state = {"full": False}
    write = disk.write_all

    def write_all(file, data):
        if state["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    monkeypatch.setattr(disk, "write_all", write_all)
    return state


def test_a_ban_on_a_full_disk_holds(tmp_path, kernel, full):
    FileLedger(tmp_path).record_verdict(kernel, facts(), Verdict.WRONG, "planted")
    ENGINE.ledger = FileLedger(tmp_path)
    full["full"] = True
    with pytest.warns(lz.LayerZeroWarning, match="No space left on device; what is learnt"):
        ENGINE.ledger.suspect(REGISTRY.kernel("torch.rms_norm"), facts(), "because")
    assert ENGINE.ledger.verdict(kernel, facts()) is Verdict.WRONG
    assert lz.which("rms_norm", X, W)["kernel_id"] != "mine.rms_norm"
    assert any("cannot be written" in issue for issue in lz.doctor().issues)


def test_what_could_not_be_written_holds_in_this_process_and_is_written_later(tmp_path, kernel, full, monkeypatch):
    ledger = FileLedger(tmp_path)
    full["full"] = True
    with pytest.warns(lz.LayerZeroWarning, match="No space left"):
        ledger.record_verdict(kernel, facts(), Verdict.WRONG, "planted")
    ledger.look()
    assert ledger.verdict(kernel, facts(500)) is Verdict.WRONG
    assert "1 records wait in memory" in ledger.notes()[0]
    assert FileLedger(tmp_path).verdict(kernel, facts()) is None
    full["full"] = False
    ledger.files._retry_at = 0.0  # some seconds later
    ledger.look()
    assert FileLedger(tmp_path).verdict(kernel, facts()) is Verdict.WRONG
    assert ledger.notes() == ()


def test_a_kernel_that_passed_keeps_its_verdict_where_nothing_can_be_written(tmp_path, kernel, full):
    FileLedger(tmp_path).record_verdict(kernel, facts(), Verdict.PASSED)
    ledger = FileLedger(tmp_path)
    full["full"] = True
    with pytest.warns(lz.LayerZeroWarning, match="No space left"):
        ledger.record_failure(kernel, facts(), "planted")
    assert ledger.verdict(kernel, facts()) is Verdict.PASSED


def test_a_clearance_that_could_not_be_written_holds_in_this_process_only(tmp_path, kernel, full, monkeypatch):
    FileLedger(tmp_path).suspect(kernel, facts(), "because")
    ledger = FileLedger(tmp_path)
    (suspect,) = ledger.suspects()
    full["full"] = True
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
    with pytest.warns(lz.LayerZeroWarning):
        ledger.settle(suspect, Verdict.PASSED, "")
    ledger._open(anew=True)
    assert ledger.suspicion(kernel, facts()) is None
    assert FileLedger(tmp_path).suspicion(kernel, facts()) == "because"


@pytest.mark.parametrize("kind", ["verdict", "suspect"])
def test_each_flipped_bit_leaves_the_ban_or_a_suspicion(tmp_path, kernel, kind):
    ledger = FileLedger(tmp_path / "cache")
    if kind == "verdict":
        ledger.record_verdict(kernel, facts(), Verdict.WRONG, "planted")
    else:
        ledger.suspect(kernel, facts(), "because")
    path = file_of(tmp_path / "cache", kind)
    whole = path.read_bytes()
    draw = random.Random(7)
    for _ in range(60):
        spoilt = bytearray(whole)
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        path.write_bytes(spoilt)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fresh = FileLedger(tmp_path / "cache")
            assert fresh.verdict(kernel, facts()) is Verdict.WRONG or fresh.suspicion(kernel, facts())
        shutil.rmtree(path.parent / "set-aside", ignore_errors=True)


def test_a_damaged_verdict_is_told_once_by_doctor_and_lifted_by_another(tmp_path, kernel):
    FileLedger(tmp_path).record_verdict(kernel, facts(), Verdict.WRONG, "planted")
    file_of(tmp_path, "verdict").write_text("{}")
    with pytest.warns(lz.LayerZeroWarning, match=r"it may have been a ban, so mine\.rms_norm is refused") as caught:
        ENGINE.ledger = FileLedger(tmp_path)
        assert lz.which("rms_norm", X, W)["kernel_id"] != "mine.rms_norm"
        assert lz.which("rms_norm", torch.randn(999, 64), W)["kernel_id"] != "mine.rms_norm"
    assert len(caught) == 1
    (issue,) = [issue for issue in lz.doctor().issues if "mine.rms_norm is refused for every call" in issue]
    assert "set-aside" in issue
    assert "layerzero vet --kernel mine.rms_norm --again" in issue
    ENGINE.ledger.record_verdict(kernel, facts(), Verdict.PASSED)
    assert lz.which("rms_norm", X, W)["kernel_id"] == "mine.rms_norm"


def test_a_damaged_verdict_that_cannot_be_moved_is_refused_where_it_lies(tmp_path, kernel, monkeypatch):
    FileLedger(tmp_path).record_verdict(kernel, facts(), Verdict.WRONG, "planted")
    file_of(tmp_path, "verdict").write_text("{}")
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
    ledger = FileLedger(tmp_path)
    with pytest.warns(lz.LayerZeroWarning):
        assert ledger.suspicion(kernel, facts()) is not None
    ledger._open(anew=True)
    assert ledger.suspicion(kernel, facts()) is not None
    assert list(ledger.on_record([kernel])) == ["mine.rms_norm"]


def test_a_verdict_that_may_not_be_read_now_is_a_suspicion_until_it_can_be(tmp_path, kernel, monkeypatch):
    FileLedger(tmp_path).record_verdict(kernel, facts(), Verdict.PASSED)
    ledger = FileLedger(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            disk, "read_plain", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files"))
        )
        with pytest.warns(lz.LayerZeroWarning, match="Too many open files"):
            assert "cannot be read" in ledger.suspicion(kernel, facts())
    assert ledger.verdict(kernel, facts()) is Verdict.PASSED
    assert ledger.suspicion(kernel, facts()) is None


def test_a_folder_that_vanishes_lifts_nothing_that_this_process_knew(tmp_path, kernel):
    ledger = FileLedger(tmp_path / "cache")
    ledger.record_verdict(kernel, facts(), Verdict.WRONG)
    ledger.suspect(kernel, facts(500), "because")
    ledger.record_verdict(kernel, facts(9000), Verdict.PASSED)
    assert ledger.verdict(kernel, facts()) is Verdict.WRONG
    shutil.rmtree(tmp_path / "cache")
    ledger._open(anew=True)
    assert ledger.verdict(kernel, facts(9000)) is Verdict.WRONG
    assert ledger.suspicion(kernel, facts(500)) == "because"
    assert {str(each.verdict) for each in ledger.suspects()} == {"None", "wrong"}
    FileLedger(tmp_path / "cache").record_verdict(kernel, facts(), Verdict.PASSED)
    ledger._open(anew=True)
    assert ledger.verdict(kernel, facts()) is Verdict.PASSED, "another process asked again"


def test_a_verdict_that_another_process_replaces_is_read_again(tmp_path, kernel):
    mine, other = FileLedger(tmp_path), FileLedger(tmp_path)
    mine.record_verdict(kernel, facts(), Verdict.PASSED)
    assert other.verdict(kernel, facts()) is Verdict.PASSED
    mine.record_verdict(kernel, facts(), Verdict.WRONG)
    epoch = ENGINE.epoch
    other.look()
    assert ENGINE.epoch > epoch
    assert other.verdict(kernel, facts()) is Verdict.WRONG


def test_doctor_says_what_holds(tmp_path, kernel):
    mine, other = FileLedger(tmp_path), FileLedger(tmp_path)
    mine.suspect(kernel, facts(), "because")
    (suspect,) = other.suspects()
    other.settle(suspect, Verdict.PASSED, "")
    assert mine.suspects() == ()


def test_three_thousand_records_cost_a_miss_a_look_at_its_own(tmp_path, kernel, monkeypatch):
    """Counted, not timed: of 3,000 records a miss reads those of its kernels, and lists the folder once."""
    ledger = FileLedger(tmp_path)
    ledger.record_verdict(kernel, facts(), Verdict.PASSED)
    folder = tmp_path / "ledger-1"
    for number in range(3_000):
        os.close(os.open(folder / f"other.kernel@{number:024x}.proved.json", os.O_CREAT))
    read, listed = [], []
    real = disk.read_plain
    monkeypatch.setattr(disk, "read_plain", lambda path, most: (read.append(path), real(path, most))[1])
    fresh = FileLedger(tmp_path)
    listing = fresh.files.listed
    monkeypatch.setattr(fresh.files, "listed", lambda: (listed.append(1), listing())[1])
    monkeypatch.setattr(files_module, "LOOK_EVERY_S", 3600.0)
    for rows in range(1, 40):
        fresh.judgement(kernel, facts(rows))
        fresh.suspicion(kernel, facts(rows))
    assert len(read) == 1
    assert len(listed) == 1
