"""The capture of a CUDA graph: the garbage collector is off meanwhile, and a failed capture leaves nothing behind.

``torch.cuda.graph`` (2.11 to 2.13) ends the capture before it leaves its stream. Where ending it raises, as after any
call that a capture forbids, the thread goes on in the capture's stream, the allocators go on asking whether memory
belongs to the capture's pool, which no later capture may use, and the generator believes itself captured.
Source: ``torch/cuda/graphs.py`` and ``CUDAGraph::capture_end`` of ``aten/src/ATen/cuda/CUDAGraph.cpp``.
"""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError, LayerZeroWarning
from layerzero.core.system import forking, log, warn

_HELD: list[bool] = []
"""One for each that holds the collector off: it is switched on when the last of them lets go."""

_CHANGING = forking.rlock()  # reentrant: what is collected meanwhile may end with something that loads a module


@contextmanager
def held_off() -> Iterator[None]:
    """Let nothing be collected inside; after it the collector is as it was.

    What a module makes stays, so there is nothing to find, but what it makes counts: importing this package made the
    collector look through every object of torch, 80 of 190 ms (docs/measurements/first_call.md). Nothing is frozen, no
    threshold is changed, and what was made inside is looked at later, like everything else. A thread that switches the
    collector off meanwhile finds it on afterwards: Python does not say which code switched it.

    A CUDA graph without an owner may lie in a cycle of references, and to free one while another is captured breaks the
    capture: FlashAttention 3 ended the process over it (vllm 0.20.0, torch 2.11, H200, 2026-11-23).
    """
    with _CHANGING:
        ours = gc.isenabled() or bool(_HELD)  # a capture goes on where the module is loaded that another thread loads
        if ours:
            _HELD.append(True)
            gc.disable()
    try:
        yield
    finally:
        if ours:
            _collect()


def _collect() -> None:
    with _CHANGING:
        if _HELD:
            _HELD.pop()
            if not _HELD:
                gc.enable()


def _in_child() -> None:
    """Switch it on in a forked child, too: it was a thread of its parent that held it off."""
    if _HELD:
        _HELD.clear()
        gc.enable()


forking.in_child(_in_child)


_FAILED: list[Any] = []
"""Graphs whose capture failed: torch's allocator of host memory may ask them as long as the process lives."""

_INSTEAD: dict[tuple[int, Any], Any] = {}
"""By device and the pool that was given to a capture that was lost: the pool of those that are given it later."""

_STREAMS: dict[int, torch.cuda.Stream] = {}
"""Where captures take place on devices for which torch has no stream of its own."""

KEEPERS: list[Callable[[], object]] = []
"""Tell what a capture may use: what kernels made for calls, which would be freed when something else is chosen."""

_KEPT: WeakKeyDictionary[Any, tuple[object, ...]] = WeakKeyDictionary()
"""By graph, what its capture may have used: its kernels read that memory at each replay."""

_ALWAYS: dict[int, object] = {}
"""The same of captures that did not begin here, whose graphs are not known; by identity, each once."""

_HERE = threading.local()
"""The mark and device of the capture that this thread is in, and what it used; devices whose libraries are ready."""


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    capture_error_mode: str = "thread_local",
) -> Iterator[None]:
    """Capture what the block launches: ``torch.cuda.graph``, with Python's garbage collector held off.

        graph = torch.cuda.CUDAGraph()
        with lz.capturing(graph):
            output = step()  # that ran before, so that what is chosen, built and planned on the way is there
        graph.replay()

    cuBLAS and cuDNN are ready when it begins. A call on another device is an error inside: it would be in no graph.
    Plans of kernels that are kept when it begins or ends live as long as the graph. A later choice for the same calls
    frees nothing that a replay reads. Without it the collector may free an old graph in the middle of the capture,
    which breaks it, or ends the process. Objects that lose their last reference meanwhile are freed as ever: drop no
    graph in the block.

    Args:
        graph: what is captured into.
        pool: memory that graphs share, as of ``torch.cuda.graph_pool_handle()`` or ``other.pool()``; its own if None.
        stream: where the capture takes place; one of the current device if None.
        capture_error_mode: whose calls may break it. ``thread_local``, this thread's alone, unlike torch's ``global``:
            kernels are built in the background (``jit: background``), whose calls have nothing to do with the capture.
    Raises: InvalidCallError for what is no CUDAGraph; whatever capturing raises, RuntimeError mostly: stream, memory
        and generator are as before then. Later captures that are given the same pool share another one, since torch
        refuses the pool of a lost capture; its earlier graphs keep it.
    """
    if not isinstance(graph, torch.cuda.CUDAGraph):
        raise InvalidCallError("capturing", [f"graph: wanted a torch.cuda.CUDAGraph, got {told(graph)}"])
    device = torch.cuda.current_device() if stream is None else stream.device_index
    _warm(device)
    elsewhere = _allocations_elsewhere(device)
    before = torch.cuda.current_stream(device), torch.cuda.current_stream()
    given, pool = pool, torch.cuda.graph_pool_handle() if pool is None else _INSTEAD.get((device, pool), pool)
    stream = _stream_on(device) if stream is None else stream
    outer = tuple(getattr(_HERE, name, None) for name in ("mark", "device", "used"))
    used: list[object] = []
    _HERE.mark, _HERE.device, _HERE.used = object(), device, used
    began = False
    kept = [tell() for tell in KEEPERS]
    try:
        with held_off(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode):
            began = True
            yield
        _KEPT[graph] = (*kept, *(tell() for tell in KEEPERS), *used)
        strange = [f"cuda:{each}" for each, count in _allocations_elsewhere(device).items() if count != elsewhere[each]]
        if strange:
            text = f"while a graph of cuda:{device} was captured, this process allocated memory on {', '.join(strange)}"
            warn(f"{text}: what the block did there is in no graph", LayerZeroWarning, stacklevel=3)
    except BaseException:
        for each in before:  # the last one makes its device the current one
            torch.cuda.set_stream(each)
        _FAILED.append(graph)
        with suppress(RuntimeError):
            graph.reset()
        if began and _memory_freed(device, pool) and given is not None:
            _INSTEAD[device, given] = torch.cuda.graph_pool_handle()
        _generator_freed(device)
        raise
    finally:
        _HERE.mark, _HERE.device, _HERE.used = outer


def check_device(index: int | None, *, inside: bool) -> None:
    """Let a call work on the device that this thread captures a graph on, and on no other.

    ``inside``: whether the current stream is being captured. Raises: InvalidCallError for tensors elsewhere.
    """
    device = getattr(_HERE, "device", None)
    if index is None or (device is None and not inside):
        return
    device = torch.cuda.current_device() if device is None else device
    if index != device:
        problem = f"wanted tensors on cuda:{device}, where a graph is captured, got some on cuda:{index}"
        raise InvalidCallError("capturing", [f"{problem}: no replay would do their work; call it outside of the block"])


def _allocations_elsewhere(device: int) -> dict[int, int]:
    """How often torch has allocated on each other device; nothing else tells of work that a capture does not see."""
    others = (each for each in range(torch.cuda.device_count()) if each != device)
    return {each: torch.cuda.memory_stats(each).get("allocation.all.allocated", 0) for each in others}


def _warm(device: int) -> None:
    """Let cuBLAS and cuDNN make what they make at a thread's first call, which breaks a capture; once, aside of others.

    cuBLAS keeps the workspace of that stream, which torch makes of 32 MiB on Hopper. A captured one lies in the graph's
    pool, where nothing takes it from a replay. Source: github.com/pytorch/pytorch issue 99397.
    """
    warm = _HERE.__dict__.setdefault("warm", set())
    if device in warm or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return
    warm.add(device)
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(side), torch.no_grad():
            _first_calls(torch.device("cuda", device))
    except RuntimeError as error:
        log.warning("cuBLAS and cuDNN could not be made ready for a capture on cuda:%d: %s", device, error)
    torch.cuda.current_stream(device).wait_stream(side)


def _first_calls(device: torch.device) -> None:
    square = torch.zeros(64, 64, device=device)
    torch.mm(square, square)
    half = square.half()
    torch.addmm(half[0], half, half)  # by cublasLt
    if torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled:  # type: ignore[no-untyped-call]
        image, filters = square.view(1, 1, 64, 64), square[None, None, :3, :3]
        torch.convolution(image, filters, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def keep(thing: object) -> None:
    """Keep what is used in a capture for the life of its graph, or of the process where the graph is not known."""
    if getattr(_HERE, "mark", None) is None:
        _ALWAYS[id(thing)] = thing
    else:
        _HERE.used.append(thing)


def _let_go() -> None:
    """End what is kept before libraries are unloaded, which tell of what outlives them."""
    _KEPT.clear()
    _ALWAYS.clear()


atexit.register(_let_go)


def capture_of(tensor: Tensor) -> object | None:
    """A mark of the capture that work on a tensor falls into; None where nothing is captured.

    What a capture makes holds numbers once its own graph was replayed, so that its owner keeps the mark with it and
    uses it in that capture alone. Captures that did not begin by :func:`capturing` cannot be distinguished: each query
    gets another mark.
    """
    if not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return getattr(_HERE, "mark", None) or object()


def _stream_on(device: int) -> torch.cuda.Stream | None:
    """The stream that a capture on a device takes place in where none was given; None where torch's own will do.

    Torch has one for all captures, on the device of the first: there it would capture nothing of another device.
    """
    torchs = getattr(torch.cuda.graph, "default_capture_stream", None)
    if torchs is None or torchs.device_index == device:
        return None
    return _STREAMS.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _memory_freed(device: int, pool: Any) -> bool:
    """Take no more memory of the pool, and let go what the capture held of it; the graph itself never will.

    Returns: whether the capture was lost. The allocator of host memory goes on recording to its pool then, which
        nothing ends, and lets no other capture in ("already recording to mempool_id", torch 2.11, H200, 2026-11-24).
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # "not currently recording": the capture was ended, and the graph lets go by itself
        return False
    torch._C._cuda_releasePool(device, pool)
    return True


def _generator_freed(device: int) -> None:
    """A capture that failed leaves the default generator in it, and the next draw would raise (torch 2.11)."""
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state().graphsafe_get_state())
