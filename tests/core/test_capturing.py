"""A capture of a CUDA graph is torch's own, with nothing collected meanwhile: shown by stand-ins for torch's."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import layerzero as lz
from engine_example import loaded
from layerzero.core import graph_capture
from layerzero.core.device import Device
from layerzero.engine import transforms
from layerzero.engine.registry import REGISTRY

example = pytest.fixture(scope="module")(loaded)


POOL = (0, 7)


class Graph:
    """Stands for a CUDA graph."""

    replayed = 0

    def reset(self):
        """Torch's lets its memory go."""

    def replay(self):
        self.replayed += 1


class Stream:
    """Stands for a stream."""

    device_index = 0

    def wait_stream(self, other):
        assert isinstance(other, Stream)


@pytest.fixture
def captures(monkeypatch):
    """What captures were asked for, and those that are open."""
    asked, opened = [], []

    @contextlib.contextmanager
    def graph(made, **options):
        asked.append(options)
        opened.append(made)
        try:
            yield
        finally:
            opened.pop()

    stand_ins = {"CUDAGraph": Graph, "graph": graph, "Stream": Stream, "current_stream": lambda *_: Stream()}
    stand_ins |= {"current_device": lambda: 0, "graph_pool_handle": lambda: POOL, "set_stream": lambda _: None}
    monkeypatch.setattr(graph_capture, "_memory_freed", lambda *_: False)
    monkeypatch.setattr(graph_capture, "_generator_freed", lambda _: None)
    for name, stub in (stand_ins | {"stream": lambda _: contextlib.nullcontext()}).items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return asked, opened


def test_nothing_is_collected_inside_and_other_threads_may_build(captures):
    asked, opened = captures
    with lz.capturing(Graph()):
        assert opened
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not opened
    assert asked == [{"pool": POOL, "stream": None, "capture_error_mode": "thread_local"}]


def test_each_capture_has_a_mark_of_its_own_while_it_lasts(captures, monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda = True

    tensor = torch.zeros(1).as_subclass(OnDevice)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(captures[1]))
    assert graph_capture.capture_of(tensor) is None
    marks = []
    for _ in range(2):
        with lz.capturing(Graph()):
            marks.append(graph_capture.capture_of(tensor))
            assert graph_capture.capture_of(tensor) is marks[-1]
            assert graph_capture.capture_of(torch.zeros(1)) is None
    assert None is not marks[0] is not marks[1] is not None
    with pytest.raises(ZeroDivisionError), lz.capturing(Graph()):
        raise ZeroDivisionError
    assert graph_capture.capture_of(tensor) is None


def test_what_torch_takes_is_handed_on_and_an_error_inside_ends_the_capture(captures):
    asked, opened = captures
    stream = Stream()
    with (
        pytest.raises(ZeroDivisionError),
        lz.capturing(Graph(), pool=(0, 1), stream=stream, capture_error_mode="relaxed"),
    ):
        raise ZeroDivisionError
    assert asked == [{"pool": (0, 1), "stream": stream, "capture_error_mode": "relaxed"}]
    assert not opened
    assert gc.isenabled()


@pytest.mark.parametrize("graph", [None, "graph", Graph])
def test_what_is_no_graph_is_told_before_anything_is_captured(captures, graph):
    with pytest.raises(lz.InvalidCallError, match=r"graph: wanted a torch.cuda.CUDAGraph, got"), lz.capturing(graph):
        pytest.fail("nothing to capture into")
    assert not captures[0]
    assert gc.isenabled()


def test_the_example_engine_collects_nothing_in_a_capture(captures, example):
    ran = []
    replay = example.captured(lambda: ran.append((bool(captures[1]), gc.isenabled())))
    assert ran == [(False, True), (False, True), (True, False)]
    replay()


def made(kept, anew=False):
    """A kernel that holds something of its own, as a constant on a device; and a call of it.

    ``anew``: what it holds depends on whether a capture is open.
    """

    class Constant:
        """Stands for memory that a captured kernel reads at each replay."""

    def load(facts):
        constant = Constant()
        if not anew or facts["capturing"]:
            kept.append(weakref.ref(constant))

        def norm(input, weight, *, eps):
            assert constant is not None
            return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

        return norm

    backend = lz.Backend("mine", "holds things", import_name="torch", distribution="torch")
    REGISTRY.register_kernel(
        lz.Kernel(
            id="mine.norm",
            operations=("norm.rms",),
            backend=backend,
            load=load,
            accepts=("eps",),
            priority=100,
            graph_safe=True,
        )
    )
    lz.lock("norm.rms", "mine.norm")
    return lambda: lz.rms_norm(torch.ones(2, 8), torch.ones(8))


def test_what_a_capture_used_lives_as_long_as_its_graph(captures):
    """Plans fall with each epoch; a graph reads what they hold at each replay."""
    kept = []
    call = made(kept)
    call()
    graph = Graph()
    with lz.capturing(graph):
        call()
    lz.configure(memory_headroom_mb=77)
    gc.collect()
    assert len(kept) == 1
    assert kept[0]() is not None
    del graph
    captures[1].clear()
    gc.collect()
    assert kept[0]() is None


def test_what_is_chosen_anew_in_a_capture_lives_as_long_as_its_graph(captures, monkeypatch):
    """No table keeps such a plan."""
    monkeypatch.setattr(Device, "supports_graphs", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(captures[1]))
    monkeypatch.setattr(transforms, "capturing", lambda _: bool(captures[1]))
    kept = []
    call = made(kept, anew=True)
    call()
    assert kept == []
    graph = Graph()
    with lz.capturing(graph):
        call()
    gc.collect()
    assert len(kept) == 1
    assert kept[0]() is not None
    del graph
    gc.collect()
    assert kept[0]() is None


def test_what_a_capture_of_torchs_own_chose_is_kept_for_good(captures, monkeypatch):
    monkeypatch.setattr(graph_capture, "_ALWAYS", {})
    graph_capture.keep("a plan")
    graph_capture.keep("a plan")
    with lz.capturing(Graph()):
        graph_capture.keep("another, which the graph keeps")
    assert list(graph_capture._ALWAYS.values()) == ["a plan"]


def test_libraries_are_ready_before_a_thread_captures_on_a_device(captures, monkeypatch, caplog):
    """Once for each, on a stream aside; where they fail, the log says so, and the capture goes on."""
    asked, aside = [], []

    @contextlib.contextmanager
    def stream(given):
        aside.append(given)
        yield
        aside.pop()

    def first_calls(device):
        asked.append((str(device), bool(aside), bool(captures[1])))
        raise RuntimeError("CUDNN_STATUS_NOT_INITIALIZED")

    for name, stub in {"is_available": lambda: True, "is_current_stream_capturing": lambda: bool(captures[1])}.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(graph_capture, "_first_calls", first_calls)
    monkeypatch.setattr(graph_capture, "_HERE", threading.local())
    for _ in range(2):
        with lz.capturing(Graph()):
            assert captures[1]
    assert asked == [("cuda:0", True, False)]
    assert "could not be made ready for a capture on cuda:0: CUDNN_STATUS_NOT_INITIALIZED" in caplog.text
    other = threading.Thread(target=graph_capture._warm, args=(0,))
    other.start()
    other.join(60)
    assert len(asked) == 2, "handles belong to a thread"


def test_a_call_on_another_device_is_an_error_in_a_capture(captures, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    graph_capture.check_device(1, inside=False)
    both = "wanted tensors on cuda:0, where a graph is captured, got some on cuda:1"
    with pytest.raises(lz.InvalidCallError, match=both), lz.capturing(Graph()):
        graph_capture.check_device(0, inside=True)
        graph_capture.check_device(1, inside=False)
    with pytest.raises(lz.InvalidCallError, match=both):
        graph_capture.check_device(1, inside=True)  # of a capture that torch began


def test_what_is_allocated_on_another_device_meanwhile_is_told(captures, monkeypatch):
    made = {0: 5, 1: 7}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a build for CUDA goes by the number of devices
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.allocated": made[device]})
    with lz.capturing(Graph()):
        made[0] += 1
    with pytest.warns(lz.LayerZeroWarning, match="a graph of cuda:0 was captured, .* on cuda:1"), lz.capturing(Graph()):
        made[1] += 1


ENDING = """
import atexit, weakref
kept = []
atexit.register(lambda: print("leaked" if any(each() is not None for each in kept) else "all ended"))  # the last to run
import torch, layerzero as lz
from layerzero.backends.shape_cache import Prepared
from layerzero.engine.registry import REGISTRY

class Thing:
    pass

def made():
    thing = Thing()
    kept.append(weakref.ref(thing))
    return thing

PREPARED = Prepared(lambda _: made(), 4)

def load(facts):
    thing, prepared = made(), PREPARED.get(1, capturing=False)

    def norm(input, weight, *, eps):
        assert thing is not None
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    return norm

backend = lz.Backend("mine", "holds things", import_name="torch", distribution="torch")
about = {"operations": ("norm.rms",), "backend": backend, "accepts": ("eps",), "priority": 100}
REGISTRY.register_kernel(lz.Kernel(id="mine.norm", load=load, **about))
lz.lock("norm.rms", "mine.norm")
lz.rms_norm(torch.ones(2, 8), torch.ones(8))
assert len(kept) == 2
"""


@pytest.mark.slow
def test_what_libraries_made_ends_before_them():
    """cuDNN's frontend prints what outlives it (nanobind: leaked ...) at the end of every command."""
    said = subprocess.run([sys.executable, "-c", ENDING], check=True, capture_output=True, text=True)
    assert said.stdout.split("\n")[0] == "all ended", said.stdout + said.stderr
