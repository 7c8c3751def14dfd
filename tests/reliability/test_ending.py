"""Who ended a process in a kernel's first run: a crash accuses the kernel, a signal from outside nobody."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, threading, torch
import layerzero as lz
from layerzero.core.kernel import Backend, Kernel
from layerzero.engine.dispatch import ENGINE

how = sys.argv[1]
def planted(input, weight, *, eps=1e-6):
    if how == "thread":
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()
        signal.pause()
    if how != "none":
        os.kill(os.getpid(), getattr(signal, how))
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

lz.register_kernel("norm.rms", "user.planted", priority=100)(planted)
print(ENGINE.ledger.suspects())
lz.rms_norm(torch.randn(4, 32), torch.randn(32))
print(lz.which("rms_norm", torch.randn(4, 32), torch.randn(32))["kernel_id"])
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
os.kill(os.getpid(), signal.SIGTERM)
"""


def run(how, folder):
    environment = os.environ | {"LAYERZERO_CACHE_DIR": str(folder)}
    command = [sys.executable, "-u", "-c", SCRIPT, how]  # it ends itself with what it printed last
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1", "thread"])
def test_a_signal_from_outside_accuses_nobody(how, tmp_path):
    ended = run(how, tmp_path)
    assert ended.returncode == (-15 if how != "SIGUSR1" else -10)  # as without LayerZero
    after = run("none", tmp_path)
    assert after.stdout.splitlines() == ["()", "user.planted", "True"]
    assert after.returncode == -15
    assert not list(tmp_path.rglob("*running*"))


@pytest.mark.slow  # test_suspects.py has such a crash
def test_a_crash_accuses_the_kernel(tmp_path):
    assert run("SIGSEGV", tmp_path).returncode == -11
    suspects, chosen, _ = run("none", tmp_path).stdout.splitlines()
    assert "user.planted" in suspects
    assert chosen != "user.planted"
