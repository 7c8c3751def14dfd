"""CUDA graphs as far as a CPU has them: a capture writes down torch's operators, and a replay runs them again.

Imported, it takes the place of torch's own in this process: for a child that proves captures. What a kernel computes
outside of torch's operators, or keeps from before, no replay computes anew, as on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import types
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import layerzero as lz
from layerzero.core import graph_capture

OPEN: list[Any] = []
"""The graph that is captured now."""

WAITS = ("_local_scalar_dense", "nonzero")


class Graph:
    """Stands for a CUDA graph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def replay(self) -> None:
        for func, args, named, result in self.calls:
            given = {id(each) for each in tree_leaves((args, named))}
            for new, kept in zip(tree_leaves(func(*args, **named)), tree_leaves(result), strict=True):
                if isinstance(kept, torch.Tensor) and id(kept) not in given:
                    kept.copy_(new)

    def reset(self) -> None:
        self.calls.clear()


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in WAITS):
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}, result))
        return result


@contextlib.contextmanager
def graph(made: Graph, **_: Any) -> Any:
    OPEN.append(made)
    try:
        with _Capture(made):
            yield
    finally:
        OPEN.pop()


def install(put: Any = setattr) -> None:
    """Take the place of what captures ask of ``torch.cuda``."""
    stream = types.SimpleNamespace(wait_stream=lambda _: None, device_index=0)
    stubs = {"Stream": lambda *_: stream, "current_stream": lambda *_: stream, "CUDAGraph": Graph, "graph": graph}
    stubs |= {"stream": lambda _: contextlib.nullcontext(), "synchronize": lambda *_: None, "current_device": lambda: 0}
    stubs |= {"graph_pool_handle": lambda: (0, 1), "set_stream": lambda _: None, "device_count": lambda: 1}
    stubs |= {"get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": lambda _: None, "memory_stats": lambda _: {}}
    stubs["is_current_stream_capturing"] = lambda: False  # as a build for the CPU says; one for CUDA asks a driver
    for name, stub in stubs.items():
        put(torch.cuda, name, stub)
    put(graph_capture, "_memory_freed", lambda *_: False)
    put(graph_capture, "_generator_freed", lambda _: None)


KEPT: dict[tuple[int, ...], torch.Tensor] = {}


def _right(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rms_norm(input, weight.shape, weight, eps)


@lz.register_kernel("norm.rms", "capture.right", graph_safe=True)
def right(input, weight, *, eps):
    return _right(input, weight, eps)


@lz.register_kernel("norm.rms", "capture.waits", graph_safe=True)
def waits(input, weight, *, eps):
    return _right(input, weight, eps) if float(input.sum()) < 1e30 else input


@lz.register_kernel("norm.rms", "capture.remembers", graph_safe=True)
def remembers(input, weight, *, eps):
    """In a capture it reads what an earlier run left: right for the values of that run alone."""
    if OPEN:
        return KEPT[tuple(input.shape)] * 1.0
    result = KEPT[tuple(input.shape)] = _right(input, weight, eps)
    return result


@lz.register_kernel("norm.rms", "capture.dies", graph_safe=True)
def dies(input, weight, *, eps):
    if OPEN:
        os.abort()
    return _right(input, weight, eps)


@lz.register_kernel("norm.rms", "capture.killed", graph_safe=True)
def killed(input, weight, *, eps):
    """As where a system short of memory ends the process."""
    if OPEN:
        os.kill(os.getpid(), signal.SIGKILL)
    return _right(input, weight, eps)


@lz.register_kernel("norm.rms", "capture.hangs", graph_safe=True)
def hangs(input, weight, *, eps):
    while OPEN:
        time.sleep(1.0)
    return _right(input, weight, eps)


if os.environ.get("LAYERZERO_CACHE_DIR") == "":  # a child of a proof
    install()
