"""Free-threaded interpreters: the extension needs the GIL, and Python serves rather than switch it on for all."""

import functools
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from importlib.util import find_spec

import pytest
import torch

import layerzero as lz
from layerzero.core.system import resources
from layerzero.engine import accelerator
from layerzero.engine.cache import PlanCache
from layerzero.engine.config import CONFIGURATION, SCOPES, current_policy
from layerzero.ops.kv import storage
from layerzero.tuning.measurement import loop
from layerzero.tuning.measurement.timing import Deadline

SAYS = "import sys, layerzero as lz; lz.rms_norm; print(sys._is_gil_enabled(), lz.doctor().versions['hit path'])"


@pytest.mark.skipif(accelerator.HOT is None, reason=accelerator.ABSENT)
@pytest.mark.parametrize(("wish", "why"), [("", "would switch it on"), ("1", "which this process keeps off")])
def test_python_serves_in_a_process_without_a_gil_and_says_why(monkeypatch, wish, why):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setenv("LAYERZERO_NATIVE", wish)
    with pytest.raises(accelerator._Absent, match=why):
        accelerator._load()


def test_a_wish_of_no_meaning_is_told_and_decides_nothing(monkeypatch, caplog):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setenv("LAYERZERO_NATIVE", "of")
    with pytest.raises(accelerator._Absent, match="would switch it on"):
        accelerator._load()
    assert "LAYERZERO_NATIVE: wanted 1, 0 or dlpack, got 'of'" in caplog.text


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="wanted a free-threaded interpreter")
@pytest.mark.skipif(find_spec("layerzero._native.hot") is None, reason="wanted the extension, built for it")
@pytest.mark.parametrize(("wish", "gil", "said"), [
    ("", None, "False in Python (this process has no GIL, and the extension would"),
    ("1", None, "True in C"),
    ("1", "0", "False in Python (the extension needs the GIL, which this process keeps off"),
])  # fmt: skip
def test_a_free_threaded_interpreter_has_no_gil_unless_the_extension_is_asked_for(monkeypatch, wish, gil, said):
    monkeypatch.setenv("LAYERZERO_NATIVE", wish)
    monkeypatch.delenv("PYTHON_GIL", raising=False)
    if gil is not None:
        monkeypatch.setenv("PYTHON_GIL", gil)
    command = [sys.executable, "-W", "ignore", "-c", SAYS]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.startswith(said)


def of_its_own(told, monkeypatch):
    resources.started("test", told).join()


def of_a_cache_that_grows(told, monkeypatch):
    cache = lz.KVCache(1, 2, 32, max_sequences=1, max_length=8192, dtype=torch.float32, strategy="virtual")
    monkeypatch.setattr(storage.Virtual, "_grow", told)
    cache._storage.soon(0, 8000)
    cache._storage._coming.pop(0).result()


def of_a_tuning(told, monkeypatch):
    party = loop.Party(jobs=(), device=torch.device("cuda"), deadline=Deadline(100.0))
    monkeypatch.setattr(loop.Party, "may_build", lambda *_: True)
    monkeypatch.setattr(loop, "build_apart", told)
    children = loop.Children(party)
    children.ask((), [(None, None)])
    children.end()


@pytest.mark.parametrize("starts", [of_its_own, of_a_cache_that_grows, of_a_tuning])
def test_a_thread_of_layerzero_has_no_scope_of_the_thread_that_started_it(monkeypatch, starts):
    """Without a GIL, Python's threads inherit those that are open: here they do with one, too."""

    def start(thread, begin=threading.Thread.start):
        thread.run = functools.partial(copy_context().run, thread.run)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    seen = []
    with lz.scope(debug=True):
        starts(lambda *_, **__: seen.append(current_policy().debug), monkeypatch)
    assert seen == [False]


def test_calls_that_threads_count_at_once_are_all_counted():
    class Read(int):
        """A count that other threads may read before it is written."""

        def __add__(self, more):
            time.sleep(0.001)
            return Read(int(self) + more)

    cache = PlanCache()
    cache.misses = Read(0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: cache.missed(), range(20)))
    assert cache.misses == 20


@pytest.mark.skipif(getattr(sys, "_is_gil_enabled", lambda: True)(), reason="wanted a process without a GIL")
def test_open_scopes_are_read_whole_while_others_open_and_close(monkeypatch):
    """An explanation reads them: one step under a GIL, and none without."""
    counts = []
    monkeypatch.setattr(SCOPES, "_open", dict.fromkeys(range(2000), CONFIGURATION.policy))

    def work(number):
        for _ in range(120):
            with SCOPES.scope({}):
                counts.append(len(SCOPES.policies))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert 2001 <= min(counts) <= max(counts) <= 2004
