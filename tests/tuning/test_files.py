"""The files that processes share: damaged, foreign, unwritable, of another version, written by two at once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from one_time import right

import layerzero as lz
from drawing import examples
from layerzero.core.facts import FactsBuilder
from layerzero.core.ledger import Ledger, Verdict, class_text
from layerzero.core.recipe import CallRecipe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.testing import random_call
from layerzero.testing.compare import route
from layerzero.tuning.storage import records
from layerzero.tuning.storage.files import FileLedger, cache_folder
from layerzero.tuning.verification import child


@pytest.fixture
def kernel():
    lz.register_kernel("norm.rms", "mine.rms_norm", priority=100)(right)
    return REGISTRY.kernel("mine.rms_norm")


def facts(rows=4):
    return lz.facts("rms_norm", torch.randn(rows, 64), torch.randn(64))


def files(folder):
    return sorted(path.name for path in Path(folder, "ledger-1").glob("*.json"))


def test_every_kind_of_record_is_read_by_another_process(tmp_path, kernel):
    first = FileLedger(tmp_path)
    first.suspect(kernel, facts(), "because")
    first.record_verdict(kernel, facts(500), Verdict.HUNG)
    first.record_failure(kernel, facts(), "RuntimeError: one")
    first.record_failure(kernel, facts(500), "RuntimeError: two")
    marker = first.begin(kernel, facts(9000))
    assert marker is not None
    first.accept(marker)

    second = FileLedger(tmp_path)
    assert second.suspicion(kernel, facts()) == "because"
    assert second.suspicion(kernel, facts(500)) is None
    assert kernel.id in second.on_record([kernel])
    assert second.verdict(kernel, facts(500)) is Verdict.HUNG
    assert list(second.on_record([kernel])) == [kernel.id]
    assert FileLedger(tmp_path / "empty").on_record([kernel]) == ()
    assert second.failures() == {("mine.rms_norm", "norm.rms"): ("RuntimeError: one", "RuntimeError: two")}
    assert second.begin(kernel, facts(9000)) is None
    assert [str(suspect) for suspect in second.suspects()] == [
        f"mine.rms_norm for {class_text(facts(500))}: found hung in a child process",
        f"mine.rms_norm for {class_text(facts())}: because",
    ]
    assert second.notes() == ()


def test_a_marker_is_no_suspicion_while_its_process_lives(tmp_path, kernel):
    first, second = FileLedger(tmp_path), FileLedger(tmp_path)
    marker = first.begin(kernel, facts())
    assert second.suspicion(kernel, facts()) is None
    os.close(marker.file)  # what the end of a process does
    assert FileLedger(tmp_path).suspicion(kernel, facts()).startswith(f"process {os.getpid()} ended during its first")
    assert second.suspicion(kernel, facts()) is None, "a process that runs looks once in a while"
    second._look_at = 0.0
    assert second.suspicion(kernel, facts()).startswith(f"process {os.getpid()} ended during its first")
    assert len(second.suspects()) == 1


def test_many_that_look_at_once_all_see_the_suspect(tmp_path, kernel):
    for row in range(9):
        os.close(FileLedger(tmp_path).begin(kernel, facts(2**row)).file)
    ledgers = [FileLedger(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda ledger: [ledger.suspicion(kernel, facts(2**row)) for row in range(9)], ledgers))
    assert all(why is not None for each in seen for why in each)
    assert {name.split(".")[-2] for name in files(tmp_path)} == {"suspect"}


def test_an_exception_takes_the_marker_away(tmp_path, kernel):
    ledger = FileLedger(tmp_path)
    ledger.withdraw(ledger.begin(kernel, facts()))
    assert files(tmp_path) == []
    assert ledger.begin(kernel, facts()) is not None


DAMAGE = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "no json": lambda text: "\x00\xff" * 20,
    "another kernel": lambda text: text.replace("mine.rms_norm", "mine.other"),
    "another class": lambda text: text.replace("norm.rms float32", "norm.rms float16"),
    "another format": lambda text: text.replace('"format":1', '"format":2'),
    "another field": lambda text: text.replace('"format":1', '"format":1,"extra":1'),
    "a list": lambda text: "[]",
    "wrong type": lambda text: json.dumps({**json.loads(text), "process": "x"}),
}


KINDS = ("suspect", "verdict", "proved", "failures", "running")
DAMAGED = [(kind, each) for kind in KINDS for each in DAMAGE if (kind, each) != ("failures", "another class")]


@pytest.mark.parametrize(("kind", "damage"), DAMAGED)
def test_a_damaged_file_is_set_aside_and_named(tmp_path, kernel, kind, damage):
    ledger = FileLedger(tmp_path)
    if kind == "suspect":
        ledger.suspect(kernel, facts(), "because")
    elif kind == "verdict":
        ledger.record_verdict(kernel, facts(), Verdict.WRONG)
    elif kind == "failures":
        ledger.record_failure(kernel, facts(), "RuntimeError: planted")
    else:
        marker = ledger.begin(kernel, facts())
        if kind == "proved":
            ledger.accept(marker)
        else:
            os.close(marker.file)
    (name,) = files(tmp_path)
    path = tmp_path / "ledger-1" / name
    damaged = DAMAGE[damage](path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)

    fresh = FileLedger(tmp_path)
    may_ban = kind in ("suspect", "verdict", "running")
    with pytest.warns(lz.LayerZeroWarning, match="may have been a ban") if may_ban else contextlib.nullcontext():
        assert (fresh.suspicion(kernel, facts()) is not None) == may_ban
        assert (fresh.suspicion(kernel, facts(500)) is not None) == (kind == "verdict"), (
            "a wrong result counts everywhere"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fresh.verdict(kernel, facts()) is None
        assert fresh.suspects() == ()
        assert fresh.failures() == {}
        (note,) = fresh.notes()
        assert name in note.replace(".running.", f".{name.split('.')[-2]}.")
        fresh.record_failure(kernel, facts(), "RuntimeError: new")
        marker = fresh.begin(kernel, facts())
        assert marker is not None, "not proved by a file that means nothing"
        fresh.accept(marker)
    assert (tmp_path / "ledger-1" / "set-aside" / name).read_text() == damaged
    ENGINE.ledger = FileLedger(tmp_path)
    with pytest.warns(lz.LayerZeroWarning, match="may have been a ban") if may_ban else contextlib.nullcontext():
        assert any(name.split("-")[0] in issue for issue in lz.doctor().issues)
    fresh.record_verdict(kernel, facts(), Verdict.PASSED)
    assert fresh.suspicion(kernel, facts(500)) is None, "it was asked again"
    assert FileLedger(tmp_path).suspicion(kernel, facts()) is None


def test_foreign_files_are_set_aside(tmp_path, kernel):
    folder = tmp_path / "ledger-1"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "mine.rms_norm@0123.suspect.json").write_text("{}")
    (folder / "subfolder").mkdir()
    ledger = FileLedger(tmp_path)
    assert ledger.suspicion(kernel, facts()) is None
    (note,) = ledger.notes()
    assert "notes.txt, subfolder" in note
    assert (folder / "set-aside" / "notes.txt").read_text() == "mine"


def test_what_a_live_process_writes_is_left_alone_however_old_and_debris_is_swept_however_fresh(tmp_path, kernel):
    folder = tmp_path / "ledger-1"
    folder.mkdir()
    for name in ("live.tmp", "dead.tmp"):
        (folder / name).write_text("{")
    os.utime(folder / "live.tmp", (0, 0))
    with (folder / "live.tmp").open() as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert FileLedger(tmp_path).notes() == ()
        assert [path.name for path in folder.iterdir()] == ["live.tmp"]
    FileLedger(tmp_path).notes()
    assert list(folder.iterdir()) == []


def test_a_file_swept_before_it_was_locked_is_written_again(tmp_path, kernel, monkeypatch):
    ledger, real, swept = FileLedger(tmp_path), fcntl.flock, []

    def flock(file, how):
        if not swept and how == fcntl.LOCK_EX | fcntl.LOCK_NB:
            swept.extend((tmp_path / "ledger-1").glob("*.tmp"))
            swept[0].unlink()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    ledger.suspect(kernel, facts(), "because")
    assert len(swept) == 1
    assert FileLedger(tmp_path).suspicion(kernel, facts()) == "because"


def test_records_of_another_version_do_not_count(tmp_path, kernel, monkeypatch):
    ledger = FileLedger(tmp_path)
    ledger.suspect(kernel, facts(), "because")
    ledger.record_verdict(kernel, facts(500), Verdict.CRASHED)
    ledger.record_failure(kernel, facts(), "RuntimeError: planted")
    ledger.accept(ledger.begin(kernel, facts(9000)))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    newer = FileLedger(tmp_path)
    assert newer.suspicion(kernel, facts()) is None
    assert newer.verdict(kernel, facts(500)) is None
    assert newer.suspects() == ()
    assert newer.failures() == {}
    marker = newer.begin(kernel, facts(9000))
    assert marker is not None
    newer.withdraw(marker)
    monkeypatch.undo()
    assert FileLedger(tmp_path).suspicion(kernel, facts()) == "because"


def test_another_device_is_another_record(tmp_path, kernel):
    FileLedger(tmp_path).suspect(kernel, facts(), "because")
    elsewhere = facts().on(lz.Device.named("H100"), capturing=False)
    assert FileLedger(tmp_path).suspicion(kernel, elsewhere) is None


def test_a_folder_that_cannot_be_written_leaves_memory_and_says_so_once(tmp_path, kernel):
    (tmp_path / "file").write_text("")
    ledger = FileLedger(tmp_path / "file" / "below")
    with pytest.warns(lz.LayerZeroWarning, match="LAYERZERO_CACHE_DIR") as caught:
        assert ledger.begin(kernel, facts()) is None
        ledger.suspect(kernel, facts(), "because")
        ledger.record_verdict(kernel, facts(500), Verdict.WRONG)
        ledger.record_failure(kernel, facts(), "RuntimeError: planted")
    assert len(caught) == 1
    assert ledger.suspicion(kernel, facts()) == "because"
    assert ledger.verdict(kernel, facts(500)) is Verdict.WRONG
    assert ledger.failures() == {("mine.rms_norm", "norm.rms"): ("RuntimeError: planted",)}
    (note,) = ledger.notes()
    assert "cannot be written" in note
    ENGINE.ledger = ledger
    lz.rms_norm(torch.randn(3000, 64), torch.randn(64))  # a call works as ever


def test_a_user_without_a_home_gets_no_folder_below_the_current_one_and_one_warning(monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: Path("~nobody-is-called-so/.cache/layerzero"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        assert cache_folder({}) is None
        assert cache_folder({}) is None
    assert [each.category for each in told] == [lz.LayerZeroWarning]


def test_the_folder_is_the_variables_else_the_users(monkeypatch):
    assert cache_folder({"LAYERZERO_CACHE_DIR": "/somewhere"}) == Path("/somewhere")
    assert cache_folder({"LAYERZERO_CACHE_DIR": ""}) is None
    assert cache_folder({}).name == "layerzero"
    from layerzero import _assembly

    assert type(_assembly.ledger().markers) is Ledger
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", "/somewhere")
    assert _assembly.ledger().markers.files.path == Path("/somewhere/ledger-1")


CROWD = """
import sys
from pathlib import Path
import torch
import layerzero as lz
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.files import FileLedger
lz.register_kernel("norm.rms", "mine.rms_norm")(lambda input, weight: input)
kernel, me = REGISTRY.kernel("mine.rms_norm"), int(sys.argv[2])
every = [lz.facts("rms_norm", torch.randn(2 ** n, 64), torch.randn(64)) for n in range(8)]
ledger = FileLedger(Path(sys.argv[1]))
for turn in range(20):
    for facts in every:
        marker = FileLedger(Path(sys.argv[1])).begin(kernel, facts) if turn % 2 else ledger.begin(kernel, facts)
        if marker is not None:
            assert ledger.suspicion(kernel, facts) is None
            ledger.accept(marker) if (turn + me) % 3 else ledger.withdraw(marker)
    ledger.record_failure(kernel, every[0], f"{me} {turn}")
    assert not ledger.suspects(), ledger.suspects()
assert ledger.notes() == (), ledger.notes()
"""


@pytest.mark.slow
def test_two_processes_at_once_disturb_nothing(tmp_path, kernel, monkeypatch):
    monkeypatch.setattr(records, "source_of", lambda _: "")  # the crowd's kernel comes from no file
    run = [
        subprocess.Popen([sys.executable, "-c", CROWD, str(tmp_path), str(each)], stderr=subprocess.PIPE, text=True)
        for each in range(2)
    ]
    said = [process.communicate()[1] for process in run]
    assert [process.returncode for process in run] == [0, 0], said
    ledger = FileLedger(tmp_path)
    assert ledger.suspects() == ()
    assert {name.split(".")[-2] for name in files(tmp_path)} == {"failures", "proved"}
    assert len(ledger.failures()["mine.rms_norm", "norm.rms"]) >= 20


# making a call again


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(number=st.integers(0, 10_000))
@example(number=6186)  # a packed weight that may not be dense, of an operation whose weights may be
def test_a_call_that_is_made_again_has_the_same_facts(number):
    first = route(random_call(1, number))
    wanted = FactsBuilder(first.operation).of_valid(first.arguments, layout=first.layout)
    recipe = CallRecipe.of(wanted)
    again = route(child.rebuilt(recipe))
    got = FactsBuilder(again.operation).of_valid(again.arguments, layout=again.layout)
    assert again.operation is first.operation
    assert CallRecipe.of(got).params == recipe.params
    assert class_text(got) == class_text(wanted)
    for name, tensor in wanted.tensors.items():
        rebuilt = got.tensors[name]
        assert (rebuilt.shape, rebuilt.dtype) == (tensor.shape, tensor.dtype)
        if 0 not in tensor.shape:
            assert (rebuilt.strides, rebuilt.alignment_bytes) == (tensor.strides, tensor.alignment_bytes)


def test_a_record_survives_being_written(tmp_path, kernel):
    FileLedger(tmp_path).suspect(kernel, facts(), "because")
    (name,) = files(tmp_path)
    record = records.read(tmp_path / "ledger-1" / name, records.name_of(name))
    assert record.call == CallRecipe.of(facts())
    assert record.module == right.__module__
    assert record.text == "because"
