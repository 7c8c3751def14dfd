"""What never ran on this machine runs in a child before it is tuned."""

from __future__ import annotations

import pytest
import torch
from norm_tuning import tuned
from torch.nn.functional import rms_norm
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli import tune as command
from layerzero.cli.app import main
from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.ops.norm.declare import norm_case
from layerzero.ops.paged.append import slots_case
from layerzero.tuning.measurement import tune_run
from layerzero.tuning.measurement.contest import Status
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.folder import RecordFolder
from layerzero.tuning.storage.store import StoreLedger
from layerzero.tuning.verification import rehearsal

CRASHES = """
import ctypes, os, time
from torch.nn.functional import rms_norm
from typer.testing import CliRunner
import layerzero as lz

@lz.register_kernel("norm.rms", "risky.crashes", supported_dtypes=["float32"])
def crashes(input, weight, *, eps):
    os.kill(os.getpid(), 11)

@lz.register_kernel("norm.rms", "risky.hangs", supported_dtypes=["float32"])
def hangs(input, weight, *, eps):
    time.sleep(3600)

@lz.register_kernel("norm.rms", "risky.wrong", supported_dtypes=["float32"])
def wrong(input, weight, *, eps):
    return input * 1

@lz.register_kernel("norm.rms", "risky.right", supported_dtypes=["float32"])
def right(input, weight, *, eps):
    return rms_norm(input, weight.shape, weight, eps)
"""


@pytest.mark.slow
def test_what_kills_its_process_is_banned_and_the_others_are_measured(tmp_path, monkeypatch):
    (tmp_path / "risky_kernels.py").write_text(CRASHES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(rehearsal.rehearse, "__kwdefaults__", {"modules": (), "timeout_s": 60.0})
    ENGINE.ledger = FileLedger(tmp_path / "cache")
    import risky_kernels  # noqa: F401  # registers them

    found = tuned("rms_norm", shapes=[(8, 64)], isolate=True, modules=["risky_kernels"])
    entries = {each.kernel.id: each for each in found.contests[0].entries}
    assert entries["risky.right"].status is Status.TIMED
    assert entries["torch.rms_norm"].status in (Status.TIMED, Status.STOPPED)
    assert {name: each.status for name, each in entries.items() if each.measurement is None} == {
        "risky.crashes": Status.BANNED,
        "risky.hangs": Status.BANNED,
        "risky.wrong": Status.WRONG,  # a child only tells whether it survives
    }
    assert "SIGSEGV" in entries["risky.crashes"].detail
    facts = found.contests[0].facts
    verdicts = {name: ENGINE.ledger.verdict(each.kernel, facts) for name, each in entries.items()}
    assert verdicts["risky.crashes"] is Verdict.CRASHED
    assert verdicts["risky.hangs"] is Verdict.HUNG
    assert verdicts["risky.wrong"] is Verdict.WRONG
    assert lz.which("rms_norm", torch.randn(8, 64), torch.ones(64))["kernel_id"] in ("risky.right", "torch.rms_norm")
    assert not rehearsal.is_new(entries["risky.right"].kernel, facts)  # it ran here now


def test_one_child_is_asked_for_many_calls(monkeypatch, tmp_path):
    @lz.register_kernel("norm.rms", "mine.new", supported_dtypes=["float32"])
    def new(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps)

    asked = []
    monkeypatch.setattr(tune_run, "rehearse", lambda pairs, **_: asked.append(len(pairs)) or [])
    ENGINE.ledger = FileLedger(tmp_path)
    tuned("rms_norm", shapes=[(8, 64), (8, 200), (900, 64)], isolate=True)
    assert asked == [3]


def test_what_no_child_knows_runs_here_and_is_told(monkeypatch, tmp_path):
    @lz.register_kernel("norm.rms", "mine.local", supported_dtypes=["float32"])
    def local(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps)

    def unasked(pairs, **_):
        return [(*pair, rehearsal.Reply(None, "no such module")) for pair in pairs]

    monkeypatch.setattr(tune_run, "rehearse", unasked)
    ENGINE.ledger = FileLedger(tmp_path)
    with pytest.warns(lz.LayerZeroWarning, match=r"mine\.local runs in this process .* no such module") as told:
        found = tuned("rms_norm", shapes=[(8, 64), (8, 200)], isolate=True)
    assert len([each for each in told if "mine.local" in str(each.message)]) == 1, "once a kernel"
    assert found.in_process == {"mine.local": "no such module"}
    assert found.to_dict()["in_process"] == {"mine.local": "no such module"}
    assert any("mine.local ran in this process" in str(each) for each in command.shown(found))


@pytest.mark.slow
def test_what_writes_and_returns_nothing_runs_in_a_child(tmp_path):
    ENGINE.ledger = FileLedger(tmp_path)
    kernel = next(each for each in lz.list_kernels() if each.id == "torch.paged_append")
    facts = Job("kv.append.paged", slots_case("small", ("tokens", 3), 16, 2, 64), "float32").facts("cpu")
    ((_, _, found),) = rehearsal.rehearse([(kernel, facts)])
    assert found.verdict is Verdict.PASSED, found.detail


def test_calls_of_a_kernel_go_to_one_child_and_what_may_compile_comes_last():
    facts = Job(*norm_case("norm.rms", 8, 64), "float32").facts("cpu")
    pairs = [(kernel, facts) for kernel in lz.list_kernels() for _ in range(2)]
    shares = rehearsal._shares(pairs, 3)
    assert sum(map(len, shares)) == len(pairs)
    homes = [{kernel.id for kernel, _ in share} for share in shares]
    assert not homes[0] & homes[1]
    assert not homes[1] & homes[2]
    assert [[kernel.jit for kernel, _ in share] for share in shares] == [
        sorted(kernel.jit for kernel, _ in share) for share in shares
    ]


def test_without_a_folder_nothing_is_known_about_the_machine_and_nothing_is_new():
    kernel = lz.list_kernels("norm.rms")[0]
    facts = Job(*norm_case("norm.rms", 8, 64), "float32").facts("cpu")
    assert not rehearsal.is_new(kernel, facts)


def test_asking_whether_a_kernel_is_new_writes_no_marker(tmp_path, monkeypatch):
    @lz.register_kernel("norm.rms", "mine.new", supported_dtypes=["float32"])
    def new(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps)

    kernel = next(each for each in lz.list_kernels("norm.rms") if each.id == "mine.new")
    facts = Job(*norm_case("norm.rms", 8, 64), "float32").facts("cpu")
    ledger = ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
    with monkeypatch.context() as watched:
        watched.setattr(RecordFolder, "write", lambda *_: pytest.fail("a kill would leave this marker"))
        assert rehearsal.is_new(kernel, facts)
    assert FileLedger(tmp_path).suspects() == ()
    ledger.accept(ledger.begin(kernel, facts))
    assert not rehearsal.is_new(kernel, facts)
    assert not FileLedger(tmp_path).unproved(kernel, facts)


def test_warmup_measures_where_it_is_asked_to():
    shapes, x, w = [(8, 64)], torch.randn(8, 64), torch.ones(64)
    lz.configure(allow=["torch"])
    lz.warmup("rms_norm", shapes=shapes)
    assert lz.explain("rms_norm", x, w).chosen.time_us is None
    lz.configure(perfdb={"auto_tune": True, "tune_samples": 4})
    lz.warmup("rms_norm", shapes=shapes)
    assert lz.explain("rms_norm", x, w).chosen.time_us > 0


def test_a_manifest_of_another_model_is_not_used(tmp_path):
    with lz.record(tmp_path / "calls.json", model="tiny-1"):
        lz.rms_norm(torch.randn(2, 8), torch.ones(8))
    wanted = r"calls.json: wanted a manifest of the model 'tiny-2', got one of 'tiny-1'"
    with pytest.raises(ValueError, match=wanted):
        lz.tune(manifest=tmp_path / "calls.json", model="tiny-2")
    result = CliRunner().invoke(main, ["tune", "--manifest", str(tmp_path / "calls.json"), "--model", "tiny-2"])
    assert result.exit_code == 2
    assert "wanted a manifest of the model 'tiny-2'" in result.stderr
