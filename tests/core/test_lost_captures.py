"""A capture that fails leaves the thread's stream, torch's memory and its generator as they were.

torch's own ``torch.cuda.graph`` and ``torch.cuda.stream`` run here, on stand-ins for what CUDA does.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import textwrap
import types
from typing import Any

import pytest
import torch
from packaging.version import Version

from layerzero.core import graph_capture as module
from layerzero.core.errors import LayerZeroWarning
from layerzero.core.graph_capture import capturing

LOST = "operation failed due to a previous error during capture"


class Stream(types.SimpleNamespace):
    def __init__(self, name: str, device: int = 0) -> None:
        super().__init__(name=name, device=device, device_index=device)


class Cuda:
    """Two devices with a stream each, and the pools that an allocator goes on taking memory from."""

    def __init__(self) -> None:
        self.streams = [Stream("first's", 0), Stream("second's", 1)]
        self.device, self.pools, self.released, self.freed, self.made = 0, [], [], [], 0
        self.holders: dict[tuple[int, Any], int] = {}
        self.host: list[tuple[int, Any]] = []

    def current_stream(self, device: int | None = None) -> Stream:
        return self.streams[self.device if device is None else device]

    def set_stream(self, stream: Stream) -> None:
        self.device = stream.device
        self.streams[stream.device] = stream

    def pool(self) -> tuple[int, int]:
        self.made += 1
        return (0, self.made)

    def ended(self, device: int, pool: tuple[int, int]) -> None:
        if (device, pool) not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove((device, pool))

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.released.append((device, pool))
        self.holders[device, pool] -= 1


class Graph:
    """A graph as CUDAGraph.cpp writes it: ending a lost capture raises before anything else."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.lost, self.resets = cuda, False, 0

    def capture_begin(self, pool: tuple[int, int], **options: Any) -> None:
        assert options["capture_error_mode"] == "thread_local"
        self.where = self.cuda.device, pool
        if self.where in self.cuda.pools:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if self.cuda.holders.get(self.where) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.cuda.holders[self.where] = self.cuda.holders.get(self.where, 0) + 1
        self.cuda.pools.append(self.where)
        if self.where in self.cuda.host:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.cuda.host.append(self.where)

    def capture_end(self) -> None:
        if self.lost:
            raise RuntimeError(LOST)
        self.cuda.ended(*self.where)
        self.cuda.host.remove(self.where)

    def reset(self) -> None:
        self.resets += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    generators = [
        types.SimpleNamespace(
            clone_state=lambda: types.SimpleNamespace(graphsafe_get_state=lambda: "clean"),
            graphsafe_set_state=lambda state, number=number: made.freed.append((number, state)),
        )
        for number in range(2)
    ]
    for name, stub in {
        "current_stream": made.current_stream, "set_stream": made.set_stream, "current_device": lambda: made.device,
        "graph_pool_handle": made.pool, "synchronize": lambda: None, "empty_cache": lambda: None,
        "CUDAGraph": Graph, "default_generators": generators, "Stream": lambda device=0: Stream("torch's own", device),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda, "_get_device_index", lambda *_, **__: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda.graphs.graph, "default_capture_stream", None)
    monkeypatch.setattr(module, "_STREAMS", {})
    monkeypatch.setattr(module, "_INSTEAD", {})
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.ended, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    return made


def lose(cuda: Cuda, **options: Any) -> Graph:
    graph = Graph(cuda)
    with pytest.raises(RuntimeError, match=LOST), capturing(graph, **options):
        assert not gc.isenabled()
        graph.lost = True
    assert gc.isenabled()
    return graph


@pytest.mark.skipif(Version(torch.__version__) >= Version("2.15.0.dev0"), reason="torch 2.15 mended it")
def test_torch_alone_leaves_its_stream_and_pool_behind(cuda: Cuda) -> None:
    """Once it does not, the mending may go."""
    graph = Graph(cuda)
    with (
        pytest.raises(RuntimeError, match=LOST),
        torch.cuda.graph(graph, pool=(0, 9), capture_error_mode="thread_local"),
    ):
        graph.lost = True
    assert cuda.current_stream().name == "torch's own"
    assert cuda.pools == [(0, (0, 9))]


def test_a_lost_capture_leaves_nothing_behind(cuda: Cuda) -> None:
    graph = lose(cuda)
    assert cuda.current_stream().name == "first's"
    assert cuda.pools == []
    assert cuda.released == [graph.where]
    assert cuda.freed == [(0, "clean")]
    assert graph.resets == 1


@pytest.mark.parametrize("lost", [1, 3])
@pytest.mark.parametrize("before", [0, 1])
def test_a_pool_that_was_given_stands_for_another_after_a_lost_capture(cuda: Cuda, lost: int, before: int) -> None:
    given = {"pool": (0, 500), "stream": Stream("side")}
    for _ in range(before):
        with capturing(Graph(cuda), **given):
            pass
    for _ in range(lost):
        lose(cuda, **given)
    assert cuda.holders[0, (0, 500)] == before, "earlier graphs keep it, and nobody else"
    later = [Graph(cuda), Graph(cuda)]
    for each in later:
        with capturing(each, **given):
            assert cuda.current_stream().name == "side"
    assert cuda.current_stream().name == "first's"
    assert later[0].where == later[1].where != (0, (0, 500)), "they share one"
    assert cuda.holders[later[0].where] == 2
    other = Graph(cuda)
    cuda.device = 1
    with capturing(other, pool=(0, 500), stream=Stream("there", 1)):
        pass
    assert other.where == (1, (0, 500)), "each device has pools of its own"


def test_streams_of_both_devices_are_as_before(cuda: Cuda) -> None:
    graph = lose(cuda, stream=Stream("side", 1))
    assert graph.where[0] == 1
    assert (cuda.device, [each.name for each in cuda.streams]) == (0, ["first's", "second's"])
    assert cuda.freed == [(1, "clean")]


def test_an_error_that_the_capture_outlives_is_no_second_release(cuda: Cuda) -> None:
    with pytest.raises(ValueError, match="mine"), capturing(Graph(cuda)):
        raise ValueError("mine")
    assert (cuda.pools, cuda.released) == ([], [])
    assert cuda.current_stream().name == "first's"


def test_each_device_is_captured_in_a_stream_of_its_own(cuda: Cuda) -> None:
    """torch's own lies on the device of the first capture: a later one on another device would hold nothing."""
    for device in (0, 1, 0, 1):
        cuda.device, graph = device, Graph(cuda)
        with capturing(graph):
            assert cuda.current_stream().device == device
        assert graph.where[0] == device
    assert list(module._STREAMS) == [1]


def test_memory_that_the_process_takes_elsewhere_meanwhile_is_told(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [0, 0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a build for CUDA goes by the number of devices
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: {"allocation.all.allocated": counted[index]})
    with pytest.warns(LayerZeroWarning, match="this process allocated memory on cuda:1: what the block did there"):
        with capturing(Graph(cuda)):
            counted[:] = [5, 1]


def test_the_example_is_python() -> None:
    text = inspect.getdoc(capturing)  # Python 3.13 takes the indentation of a docstring off itself
    assert text is not None
    indented = [line for line in text.split("Args:")[0].splitlines() if line.startswith(" " * 4)]
    assert len(ast.parse(textwrap.dedent("\n".join(indented))).body) == 3


def test_a_capture_that_never_began_ends_no_other(cuda: Cuda) -> None:
    first = Graph(cuda)
    with capturing(first, pool=(0, 500)):
        with pytest.raises(RuntimeError, match="already recording"), capturing(Graph(cuda), pool=(0, 500)):
            pass
        assert cuda.pools == [(0, (0, 500))]
    assert (cuda.pools, cuda.released, module._INSTEAD) == ([], [], {})


def test_pools_that_nobody_named_are_not_remembered(cuda: Cuda) -> None:
    for _ in range(3):
        lose(cuda)
        lose(cuda, pool=(0, 500))
    assert list(module._INSTEAD) == [(0, (0, 500))]
