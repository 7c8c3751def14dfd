"""A capture of a CUDA graph is torch's own, with nothing collected meanwhile: shown by stand-ins for torch's."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import layerzero as lz
from engine_example import loaded
from layerzero.core import capturing

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
    monkeypatch.setattr(capturing, "_memory_freed", lambda *_: False)
    monkeypatch.setattr(capturing, "_generator_freed", lambda _: None)
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
    assert capturing.capture_of(tensor) is None
    marks = []
    for _ in range(2):
        with lz.capturing(Graph()):
            marks.append(capturing.capture_of(tensor))
            assert capturing.capture_of(tensor) is marks[-1]
            assert capturing.capture_of(torch.zeros(1)) is None
    assert None is not marks[0] is not marks[1] is not None
    with pytest.raises(ZeroDivisionError), lz.capturing(Graph()):
        raise ZeroDivisionError
    assert capturing.capture_of(tensor) is None


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
