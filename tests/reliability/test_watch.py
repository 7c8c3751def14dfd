"""A process that only makes hits hears of a ban, through a thread that costs a hit nothing and keeps nobody alive."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from one_time import right

import layerzero as lz
from layerzero.core.ledger import Verdict
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import row_exchange
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.row_exchange import Watch

SERVER = """
import os, signal, sys, threading, torch
import layerzero as lz
signal.alarm(240)  # far more than it takes
x, w = torch.randn(4, 64), torch.randn(64)
lz.configure(allow=["torch", "user"], vet_in_background=False)
ran = threading.Event()

@lz.register_kernel("norm.rms", "mine.rms_norm", priority=100)
def mine(input, weight, *, eps=1e-6):
    ran.set()
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

lz.configure(prefer=["mine.rms_norm"])
if "ban" in sys.argv:
    from layerzero.core.ledger import Verdict
    from layerzero.engine.dispatch import ENGINE
    facts = lz.facts("rms_norm", torch.empty(500, 64), w)
    ENGINE.ledger.record_verdict(lz.list_kernels("norm.rms")[0], facts, Verdict.WRONG, "planted")
    sys.exit(0)

def say(*words):  # in one write: two processes share the pipe
    os.write(1, (" ".join(words) + "\\n").encode())

def serve(name):
    say(name, "serves")
    while True:  # nothing but hits
        ran.clear()
        lz.rms_norm(x, w)
        if not ran.is_set():
            say(name, "heard")
            return

lz.rms_norm(x, w)
lz.rms_norm(x, w)
if "fork" in sys.argv and os.fork() == 0:
    serve("child")
    os._exit(0)
serve("parent")
if "fork" in sys.argv:
    os.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_server_that_makes_hits_only_hears_of_a_ban(tmp_path, monkeypatch, how):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    variables = {**os.environ, "LAYERZERO_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(script), how]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    wanted = {"parent"} if how == "alone" else {"parent", "child"}
    assert {server.stdout.readline().split()[0] for _ in wanted} == wanted
    subprocess.run([sys.executable, str(script), "ban"], check=True, env=variables)
    said = server.communicate()[0].split("\n")
    assert {line.split()[0] for line in said if "heard" in line} == wanted
    assert server.returncode == 0


class Target:
    def __init__(self):
        self.looked = threading.Event()

    def look(self):
        self.looked.set()


def test_the_thread_ends_with_what_it_looks_at(monkeypatch):
    monkeypatch.setattr(row_exchange, "EVERY_S", 0.01)
    watch, target = Watch(), Target()
    watch.add(target)
    assert target.looked.wait(60)
    thread = watch._thread
    assert thread.daemon, "it keeps no process alive"
    del target
    thread.join(60)
    assert not watch.running()
    again = Target()
    watch.add(again)
    assert again.looked.wait(60)
    watch.stop()
    assert not watch.running()


def test_what_a_look_raises_is_logged_and_the_thread_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(row_exchange, "EVERY_S", 0.01)
    looks = []
    more = threading.Event()

    class Bad:
        def look(self):
            looks.append(1)
            if len(looks) > 2:
                more.set()
            raise RuntimeError("planted")

    watch, bad = Watch(), Bad()
    watch.add(bad)
    assert more.wait(60)
    watch.stop()
    assert "could not be looked at" in caplog.text


def test_where_no_thread_can_be_started_misses_look(tmp_path, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start")))
    watch = Watch()
    watch.add(Target())
    assert not watch.running()
    lz.register_kernel("norm.rms", "mine.rms_norm", priority=100)(right)
    kernel = REGISTRY.kernel("mine.rms_norm")
    facts = lz.facts("rms_norm", torch.empty(4, 64), torch.empty(64))
    mine, other = FileLedger(tmp_path), FileLedger(tmp_path)
    mine.watched = watch.running
    assert mine.verdict(kernel, facts) is None
    other.record_verdict(kernel, facts, Verdict.WRONG)
    mine._look_at = 0.0
    assert mine.verdict(kernel, facts) is Verdict.WRONG


@pytest.fixture
def watch(monkeypatch):
    """One whose forks are heard of, as those of the process's own are."""
    watch, children = Watch(), []
    fork = os.fork

    def heard():
        watch.before_fork()
        child = fork()
        watch.after_fork()
        children.append(child)
        return child

    monkeypatch.setattr(os, "fork", heard)
    yield watch
    watch.stop()


def test_forks_never_put_off_a_look(watch):
    target = Target()
    watch.add(target)
    thread = watch._thread
    child = os.fork()
    if child == 0:
        mine = watch._thread
        os._exit(0 if mine is not thread and mine.is_alive() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert watch._thread is thread, "it began anew, and waits its second again"
    assert thread.is_alive()


def test_a_fork_waits_for_a_look_and_not_for_a_thread_that_ends(watch, monkeypatch):
    monkeypatch.setattr(row_exchange, "EVERY_S", 0.0)
    inside, fork = threading.Event(), threading.Event()

    class Slow:
        def look(self):
            inside.set()
            fork.wait(60)

    slow = Slow()
    watch.add(slow)
    assert inside.wait(60)
    monkeypatch.setattr(row_exchange, "_STOP_S", 1e-3)
    watch.before_fork()  # a look that does not end is waited for no longer than that
    assert not watch._still
    thread = watch._thread
    del slow
    fork.set()
    watch.after_fork()
    thread.join(60)
    assert not thread.is_alive()
    again = Target()
    watch.add(again)
    assert again.looked.wait(60)


def test_a_look_goes_on_while_others_add(watch):
    kept = [Target() for _ in range(3000)]
    failures = []

    def look():
        try:
            while len(watch._living()) < len(kept):
                pass
        except Exception as error:  # noqa: BLE001  # told below
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=look)
        thread.start()
        for each in kept:
            watch.add(each)
        thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not thread.is_alive()
    assert not failures
