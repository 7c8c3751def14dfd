"""Kernels that kill their process: the next process does not choose them until a child process has cleared them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main
from layerzero.core.ledger import Verdict
from layerzero.core.system import resources
from layerzero.core.system.resources import Kills
from layerzero.engine import first_run
from layerzero.engine.dispatch import ENGINE
from layerzero.tuning.storage.files import FileLedger

KERNEL = """
import ctypes, os, signal, time
from pathlib import Path
import torch
import layerzero as lz

MODE = Path(__file__).with_name("mode")

@lz.register_kernel("norm.rms", "planted.rms_norm", priority=100)
def planted(input, weight, *, eps=1e-6):
    mode = MODE.read_text()
    if mode == "SIGSEGV":
        ctypes.string_at(0)
    elif mode == "SIGFPE":
        os.kill(os.getpid(), signal.SIGFPE)
    elif mode == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "exit":
        os._exit(3)
    elif mode == "hang":
        time.sleep(600)
    elif mode == "raise":
        raise RuntimeError("planted failure")
    result = torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
    return result + 1 if mode == "wrong" else result
"""

CALL = """
import json
import torch
import layerzero as lz
import planted_kernels
x, w = torch.randn({rows}, 64), torch.randn(64)
report = lz.explain("rms_norm", x, w)
lz.rms_norm(x, w)
reasons = report.reasons("planted.rms_norm")
print(json.dumps({{"chosen": report.kernel_id, "reasons": [[str(r.code), r.message] for r in reasons]}}))
"""


class Place:
    """A folder with a kernel whose behaviour a file decides, and a cache folder, for processes to share."""

    def __init__(self, folder):
        self.folder, self.cache = folder, folder / "cache"
        (folder / "planted_kernels.py").write_text(KERNEL)
        self.behave("well")

    def behave(self, mode):
        (self.folder / "mode").write_text(mode)

    def python(self, *arguments):
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "LAYERZERO_CACHE_DIR": str(self.cache)}
        environment["LAYERZERO_ALLOW"] = "torch,user"  # what else is installed here takes seconds to load
        return subprocess.run(
            [sys.executable, "-W", "ignore", *arguments],
            env=environment, cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def call(self, rows=4):
        """Run one call in a process; what it chose and why not the planted kernel, or how the process ended."""
        ended = self.python("-c", CALL.format(rows=rows))
        assert ended.returncode != 1, ended.stderr
        return json.loads(ended.stdout) if ended.returncode == 0 else ended.returncode

    def doctor(self, *arguments):
        ended = self.python("-m", "layerzero", "doctor", "--json", *arguments)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    def files(self, kind):
        return sorted(self.cache.glob(f"ledger-1/*.{kind}*.json"))


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture
def known(place, monkeypatch):
    """The planted kernel, known in this process too, which shares the files."""
    monkeypatch.syspath_prepend(str(place.folder))
    monkeypatch.delitem(sys.modules, "planted_kernels", raising=False)
    __import__("planted_kernels")
    lz.configure(allow=["torch", "user"])
    ENGINE.ledger = FileLedger(place.cache)
    yield place
    monkeypatch.delitem(sys.modules, "planted_kernels")


@pytest.fixture
def suspected(known):
    """The planted kernel, suspected for calls of four rows."""
    facts = lz.facts("rms_norm", *arguments())
    ENGINE.ledger.suspect(lz.list_kernels("norm.rms")[0], facts, "planted suspicion")
    ENGINE.ledger = FileLedger(known.cache)  # as another process sees it
    return known


def arguments(rows=4):
    return torch.randn(rows, 64), torch.randn(64)


def chosen():
    return lz.which("rms_norm", *arguments())["kernel_id"]


@pytest.mark.parametrize(("mode", "status"), [
    ("SIGSEGV", -11),
    pytest.param("SIGFPE", -8, marks=pytest.mark.slow),
    pytest.param("SIGKILL", -9, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_crash_leaves_a_marker_and_the_next_process_goes_around_it(place, known, mode, status):
    place.behave(mode)
    assert place.call() == status
    (marker,) = place.files("running")
    assert marker.name.startswith("planted.rms_norm@")

    assert chosen() == "torch.rms_norm"
    (reason,) = lz.explain("rms_norm", *arguments()).reasons("planted.rms_norm")
    assert reason.code is lz.ReasonCode.UNHEALTHY
    assert "ended during its first run" in reason.message
    assert "layerzero doctor --confirm" in reason.message
    assert not place.files("running")
    assert len(place.files("suspect")) == 1
    assert lz.which("rms_norm", *arguments(500))["kernel_id"] == "planted.rms_norm", "another class is not suspected"


@pytest.mark.parametrize(
    ("more", "group", "kernel"),
    [
        (0, "a", "torch.rms_norm"),
        (1, "a", "planted.rms_norm"),
        (1, "another's count", "torch.rms_norm"),
        (1, "", "torch.rms_norm"),
    ],
)
def test_a_process_that_was_killed_for_memory_leaves_no_suspect(known, monkeypatch, more, group, kernel):
    monkeypatch.setattr(resources, "kills", lambda: Kills(3, "a" if group else ""))
    marker = ENGINE.ledger.begin(lz.list_kernels("norm.rms")[0], lz.facts("rms_norm", *arguments()))
    first_run.end(marker.file)
    os.close(marker.file)  # as the system does when it kills a process
    monkeypatch.setattr(resources, "kills", lambda: Kills(3 + more, group.replace(" ", "_")))
    ENGINE.ledger = FileLedger(known.cache)
    assert chosen() == kernel
    assert not known.files("running")
    assert len(known.files("suspect")) == int(kernel == "torch.rms_norm")


@pytest.mark.slow
def test_from_the_crash_to_the_repair(place):
    place.behave("SIGSEGV")
    assert place.call() == -11
    place.behave("well")
    assert place.call()["chosen"] == "torch.rms_norm", "repaired, but nobody has looked"
    (unknown,) = place.doctor("--confirm")["confirmed"]
    assert unknown["verdict"] == "unknown", "what only a record names is not imported"
    assert "its record says that planted_kernels registers it" in unknown["detail"]
    found = place.doctor("--confirm", "--module", "planted_kernels")
    assert [(each["kernel_id"], each["verdict"]) for each in found["confirmed"]] == [("planted.rms_norm", "passed")]
    assert found["suspects"] == []
    assert place.call() == {"chosen": "planted.rms_norm", "reasons": []}


@pytest.mark.slow
def test_the_kernel_of_a_script_needs_its_module_named(place):
    run = "\nif __name__ == '__main__':\n    lz.rms_norm(torch.randn(4, 64), torch.randn(64))\n"
    (place.folder / "script.py").write_text(KERNEL + run)
    place.behave("SIGSEGV")
    assert place.python("script.py").returncode == -11
    place.behave("well")
    (unknown,) = place.doctor("--confirm")["confirmed"]
    assert unknown["verdict"] == "unknown"
    for part in ("cannot be run in a child process", "entry point", "--module"):
        assert part in unknown["detail"]
    (cleared,) = place.doctor("--confirm", "--module", "script")["confirmed"]
    assert cleared["verdict"] == "passed"


def test_a_suspect_is_refused_with_its_class_only(suspected):
    assert chosen() == "torch.rms_norm"
    assert lz.which("rms_norm", *arguments(500))["kernel_id"] == "planted.rms_norm"
    (reason,) = lz.explain("rms_norm", *arguments()).reasons("planted.rms_norm")
    assert reason.code is lz.ReasonCode.UNHEALTHY
    assert "planted suspicion" in reason.message
    with lz.scope(locks={"norm.rms": "planted.rms_norm"}), pytest.raises(lz.NoKernelFoundError, match="planted susp"):
        lz.rms_norm(*arguments())  # no lock overrides it
    diagnosis = lz.doctor()
    assert [suspect.verdict for suspect in diagnosis.suspects] == [None]
    assert diagnosis.to_dict()["suspects"][0]["why"] == "planted suspicion"
    assert any("layerzero doctor --confirm" in issue for issue in diagnosis.issues)


@pytest.mark.parametrize(("mode", "verdict", "said"), [
    ("SIGSEGV", Verdict.CRASHED, "SIGSEGV"),
    pytest.param("SIGFPE", Verdict.CRASHED, "SIGFPE", marks=pytest.mark.slow),
    pytest.param("exit", Verdict.CRASHED, "exit code 3", marks=pytest.mark.slow),
    pytest.param("raise", Verdict.CRASHED, "planted failure", marks=pytest.mark.slow),
    pytest.param("wrong", Verdict.WRONG, "elements too far", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_child_bans_what_fails(suspected, mode, verdict, said):
    suspected.behave(mode)
    (found,) = lz.confirm_suspects()
    assert found.verdict is verdict
    assert said in found.detail
    suspected.behave("well")
    ENGINE.ledger = FileLedger(suspected.cache)
    assert chosen() == "torch.rms_norm"
    assert lz.confirm_suspects() == (), "the banned are left alone"
    assert any("planted.rms_norm" in issue and "--again" in issue for issue in lz.doctor().issues)


@pytest.mark.slow
def test_a_ban_is_lifted_by_running_it_again(suspected):
    lz.confirm_suspects()
    assert chosen() == "planted.rms_norm"
    assert [each.name.split(".")[-2] for each in suspected.files("")] == ["proved"]
    suspect = ENGINE.ledger.suspects()
    assert suspect == ()
    kernel, facts = lz.list_kernels("norm.rms")[0], lz.facts("rms_norm", *arguments())
    ENGINE.ledger.record_verdict(kernel, facts, Verdict.WRONG)
    ENGINE.bump()
    ENGINE.ledger = FileLedger(suspected.cache)
    assert chosen() == "torch.rms_norm"
    (found,) = lz.confirm_suspects(again=True)
    assert found.verdict is Verdict.PASSED
    assert chosen() == "planted.rms_norm"


@pytest.mark.slow
def test_a_child_that_hangs_is_ended_and_the_class_is_banned(suspected):
    suspected.behave("hang")
    (found,) = lz.confirm_suspects(timeout_s=20)
    assert found.verdict is Verdict.HUNG
    assert found.detail == "it did not end within 20 s"
    assert chosen() == "torch.rms_norm"


def test_a_class_is_proved_once_and_marked_no_more(suspected):
    lz.rms_norm(*arguments(500))
    (proof,) = suspected.files("proved")
    written = proof.stat()
    ENGINE.ledger = FileLedger(suspected.cache)
    ENGINE.bump()
    lz.rms_norm(*arguments(501))  # another size, the same class
    assert suspected.files("proved") == [proof]
    assert (proof.stat().st_mtime_ns, proof.stat().st_ino) == (written.st_mtime_ns, written.st_ino)
    assert not suspected.files("running")


def test_an_exception_leaves_no_marker_and_is_remembered(suspected):
    suspected.behave("raise")
    with pytest.warns(lz.LayerZeroFallbackWarning, match="planted failure"):
        lz.rms_norm(*arguments(500))
    assert not suspected.files("running")
    assert not suspected.files("proved")
    ENGINE.health.reset()
    ENGINE.ledger = FileLedger(suspected.cache)
    found = lz.doctor()
    assert found.failures == {"planted.rms_norm in norm.rms": "RuntimeError: planted failure"}
    assert "failed in an earlier process" in str(found)


def test_torchs_own_kernels_are_not_marked(suspected):
    lz.rms_norm(*arguments())
    assert not suspected.files("proved")
    assert not suspected.files("running")


def test_module_without_confirm_is_a_mistake():
    ended = CliRunner().invoke(main, ["doctor", "--module", "planted_kernels"])
    assert ended.exit_code == 2
    assert "--confirm" in ended.stderr


@pytest.mark.slow
def test_importing_touches_no_disk_and_an_empty_variable_keeps_it_so(place):
    script = "import layerzero as lz; lz.attention; lz.list_kernels()\n"
    assert place.python("-c", script).returncode == 0
    assert not place.cache.exists()
    empty = f"import os; os.environ.update(HOME={str(place.folder / 'home')!r}, LAYERZERO_CACHE_DIR='')\n"
    assert place.python("-c", empty + CALL.format(rows=4)).returncode == 0
    assert not (place.folder / "home").exists()
    assert not place.cache.exists()
