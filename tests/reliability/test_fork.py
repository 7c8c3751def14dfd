"""A forked child goes on, whatever the other threads of its parent were doing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from layerzero.core import import_hook
from layerzero.core.system import forking

BEGIN = """
import os, random, signal, threading, time, torch, warnings
import layerzero as lz
from layerzero.core.system import forking
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import database
from layerzero.tuning.storage.row_exchange import WATCH

warnings.simplefilter("ignore")
torch.set_num_threads(1)
x, w = torch.randn(8, 64), torch.randn(64)
q = torch.randn(1, 8, 2, 64)
tables, lens = torch.arange(4, dtype=torch.int32).view(1, 4), torch.tensor([40], dtype=torch.int32)
caches = torch.randn(4, 16, 2, 64), torch.randn(4, 16, 2, 64)

def everything(rows):
    lz.rms_norm(torch.randn(rows, 64), w)
    lz.layer_norm(torch.randn(rows, 64), (64,))
    lz.add_residual_rms_norm_(torch.randn(rows, 64), torch.randn(rows, 64), w)
    lz.attention(q, q, q, layout="BSHD")
    step = lz.StepMetadata(tables, lens)
    lz.append_paged_kv_(torch.randn(1, 2, 64), torch.randn(1, 2, 64), *caches, step.slot_mapping(16))
    lz.paged_attention(torch.randn(1, 1, 2, 64), *caches, tables, lens, step=step)
    step.advance()
    lz.configure(tune_samples=7)
    lz.lock("norm.rms", "torch.rms_norm")
    lz.unlock("norm.rms")
    lz.explain("rms_norm", x, w)
    lz.doctor()
    lz.register_kernel("norm.rms", "user.child")(lambda input, weight, eps: input)
    lz.unregister_kernel("user.child")
    lz.freeze()
    lz.thaw()
    facts = lz.facts("rms_norm", x, w)
    ENGINE.ledger.record_failure(REGISTRY.kernel("torch.rms_norm"), facts, "x")
    ENGINE.ledger.record_time(REGISTRY.kernel("torch.rms_norm"), facts, Measurement(1.0, 1.0, 0.0, 20))

def child(rows):
    # End as the child goes; 120 s are far more than it needs, and less than anybody waits.
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    signal.alarm(120)
    try:
        everything(rows)
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
        os._exit(1)
    os._exit(0)

everything(3)
"""

HELD = """
ours = {id(each) for base in database._DATABASES for each in base.locks()} | {id(database._FORKING)}
ours |= {id(WATCH._lock), id(WATCH._looking)}
held = [each for each in forking._LOCKS if id(each) not in ours]  # those are taken before a fork, by whoever forks
taken, done = threading.Event(), threading.Event()
def hold():
    for each in held:
        each.acquire()
    taken.set()
    done.wait()
threading.Thread(target=hold, daemon=True).start()
taken.wait()
print(len(held), child(100), flush=True)
os._exit(0)
"""

BUSY = """
stop = False
def loop(work):
    number = 0
    while not stop:
        number += 1
        work(number)
def misses(number): lz.rms_norm(torch.empty(1 + number % 5000, 64), w)
def settings(number): lz.configure(tune_samples=5 + number % 40)
def questions(number): lz.explain("rms_norm", x, w); lz.doctor()
def first_runs(number):
    with lz.scope(locks={"norm.rms": "torch.rms_norm"}):
        lz.rms_norm(torch.empty(1 << number % 12, 64), w)
def records(number):
    facts = lz.facts("rms_norm", x, w)
    ENGINE.ledger.record_failure(REGISTRY.kernel("torch.rms_norm"), facts, "x")
for work in (misses, settings, questions, first_runs, records):
    threading.Thread(target=loop, args=(work,), daemon=True).start()
ends = [child(random.randrange(1, 9999)) for _ in range(12)]
print(ends, flush=True)
os._exit(0)
"""


def run(script, tmp_path):
    environment = os.environ | {"LAYERZERO_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", BEGIN + script]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_a_child_needs_no_lock_that_another_thread_held(tmp_path):
    held, end = run(HELD, tmp_path).split()
    assert int(held) > 20
    assert end == "0"


RESTING = """
@lz.register_kernel("norm.rms", "user.broken", priority=100)
def broken(input, weight, *, eps=1e-6):
    raise RuntimeError("planted")

lz.rms_norm(x, w)
if pid := os.fork():
    print(os.waitpid(pid, 0)[1])
    os._exit(0)
os._exit(sum(isinstance(each, threading.Timer) for each in threading.enumerate()) != 1)
"""


def test_a_kernel_that_rests_is_tried_again_in_a_child_too(tmp_path):
    assert run(RESTING, tmp_path).split() == ["0"]


IMPORTING = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import layerzero  # and nothing of it is called before the fork
import events
thread = threading.Thread(target=__import__, args=("slow",))
thread.start()
events.begun.wait()
pause = time.sleep
time.sleep = lambda seconds: (events.go.set(), pause(seconds))  # it ends because the fork waits for it
child = os.fork()
if child == 0:
    signal.alarm(60)
    import slow
    os._exit(0 if slow.whole else 1)
print(os.waitpid(child, 0)[1], flush=True)
thread.join()
"""


def test_a_child_can_import_what_another_thread_was_importing(tmp_path):
    (tmp_path / "events.py").write_text("import threading; begun, go = threading.Event(), threading.Event()")
    (tmp_path / "slow.py").write_text("import events; events.begun.set(); events.go.wait(); import json; whole = True")
    (tmp_path / "script.py").write_text(IMPORTING)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    assert ended.stdout.strip() == "0", ended.stderr


@pytest.mark.slow
def test_children_of_a_busy_process_go_on(tmp_path):
    assert set(run(BUSY, tmp_path).strip("[]\n").split(", ")) == {"0"}


def test_what_two_threads_add_at_once_hears_of_a_fork(monkeypatch):
    class Heard:
        def hear(self):
            pass

    kept = [Heard() for _ in range(800)]
    methods = []
    turns = threading.Barrier(4)

    def add(some):
        turns.wait()
        for each in some:
            forking._add(methods, each.hear)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=add, args=(kept[number::4],)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(methods) == len(kept)


def test_a_fork_that_waited_for_the_import_that_adds_hooks_calls_none_of_them_behind_it(monkeypatch):
    """It began without them, and printed that a lock which it never took could not be released."""
    hooks, called = {}, []
    monkeypatch.setattr(os, "register_at_fork", lambda **each: hooks.update(each))
    forking.around(lambda: called.append("before"), lambda: called.append("after"))
    hooks["after_in_parent"]()
    assert not called
    for _ in range(2):
        hooks["before"]()
        hooks["after_in_child"]()
    assert called == ["before", "after"] * 2


def in_thread(*functions):
    found = []
    thread = threading.Thread(target=lambda: found.extend(each() for each in functions))
    thread.start()
    thread.join()
    return found


def test_a_thread_that_gave_up_waiting_for_a_lock_forks_and_leaves_it_to_the_other_that_forks(monkeypatch):
    hooks = []
    monkeypatch.setattr(forking, "around", lambda *both: hooks.extend(both))
    monkeypatch.setattr(forking, "HELD_S", 0.0)
    held = forking.held_by_forks()
    before, after = hooks
    before()
    assert in_thread(before, after) == [None, None]
    assert in_thread(lambda: held.acquire(blocking=False)) == [False]
    after()
    assert in_thread(lambda: held.acquire(blocking=False), held.release) == [True, None]


def test_a_thread_that_gave_up_waiting_for_imports_leaves_their_lock_to_the_other_that_forks():
    import_hook._let_imports_end()
    try:
        assert in_thread(import_hook._let_imports_begin) == [None]
    finally:
        import_hook._let_imports_begin()
    assert in_thread(lambda: (import_hook._imp.acquire_lock(), import_hook._imp.release_lock())) == [(None, None)]
    assert not import_hook._holding
