"""The collector is held off while this package loads, and is afterwards as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from layerzero.core.graph_capture import held_off

COUNTED = """
import gc
gc.set_threshold(700, 10, 10)  # as a process begins, whatever the tests' children do
import torch
before, frozen = gc.get_threshold(), gc.get_freeze_count()  # Python 3.12 begins with some
seen = []
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
import layerzero as lz
lz.rms_norm
lz.list_kernels()
assert 2 not in seen, "a look through everything that torch made"
assert gc.isenabled() and gc.get_threshold() == before
assert gc.get_freeze_count() == frozen
"""


@pytest.mark.slow
def test_a_collector_that_was_off_stays_off():
    script = "import gc, torch; gc.disable()\nimport layerzero as lz\nlz.rms_norm\nassert not gc.isenabled()"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_inside_a_collector_that_was_off_nothing_changes():
    gc.disable()
    try:
        with held_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_inside_leaves_it_as_it_was():
    with pytest.raises(ImportError), held_off():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    with held_off(), held_off():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_who_holds_it_off_last_switches_it_on():
    """A thread that loads a module ends while another captures a graph."""
    loads, captures = held_off(), held_off()
    loads.__enter__()
    captures.__enter__()
    loads.__exit__(None, None, None)
    try:
        assert not gc.isenabled()
    finally:
        captures.__exit__(None, None, None)
    assert gc.isenabled()


FORKED = """
import gc, os, threading, warnings
from layerzero.core.graph_capture import held_off
warnings.simplefilter("ignore")
inside, over = threading.Event(), threading.Event()
def imports():
    with held_off():
        inside.set()
        over.wait()
threading.Thread(target=imports).start()
inside.wait()
child = os.fork()
if child == 0:
    os._exit(0 if gc.isenabled() else 1)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert not gc.isenabled()
over.set()
assert ended == 0, "the collector stays off in a child that was forked while another thread imported"
"""


def test_importing_looks_through_nothing_of_torch_and_a_child_that_is_forked_meanwhile_collects():
    subprocess.run([sys.executable, "-c", COUNTED + FORKED], check=True)
