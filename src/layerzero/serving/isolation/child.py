"""What the child does: load kernels, and call them on tensors in the memory that it shares with the process that asks.

``layerzero.testing.child_main`` starts it with one job, :class:`messages.Serve`, which ends when the other end is
closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from layerzero import __version__
from layerzero.core.dtypes import dtype_named
from layerzero.core.errors import printable
from layerzero.engine.registry import REGISTRY
from layerzero.serving.isolation import messages
from layerzero.serving.isolation.arena import (
    GIVEN,
    KEPT_BYTES,
    MARK_BYTES,
    MAX_KEPT,
    RESULTS,
    Copier,
    DeviceMemory,
    Mapping,
)
from layerzero.testing.child_main import Tell

MOST_BYTES = 1 << 18
"""Of a message."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LINE = 64  # where a result begins, in bytes: a line of the cache


def work(job: messages.Serve, tell: Tell) -> None:
    """Serve calls until there is nothing that could make any."""
    calls = socket.socket(fileno=job.calls)
    keep_freed_memory()
    server = Server(Mapping(job.memory))
    os.close(job.memory)
    tell.found(messages.Hello(__version__))
    encoder, awake = msgspec.msgpack.Encoder(), messages.Awake(calls)
    with torch.no_grad():
        while request := calls.recv(MOST_BYTES):
            calls.send(encoder.encode(server.answer(request)))
            awake.came()
    os._exit(0)  # what a library does at the end of a process is not waited for


def opened(handle: tuple[Any, ...], mark: bytes) -> DeviceMemory:
    """What a handle of another process opens. Raises: RuntimeError where the system or the device forbids it."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    made = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    if bytes(made[:MARK_BYTES].tolist()) != mark:
        raise RuntimeError("the handle opened other memory than was shared")
    return DeviceMemory(made)


def keep_freed_memory() -> None:
    """Have results of mixed sizes find the memory of earlier ones.

    Six sizes of 64 KiB to 24 MiB in turns made 12,000 page faults a round without this, and none with it. New pages
    for 1 MiB take 0.6 ms (EPYC Zen 4 in a VM, 2026-11-27).
    """
    with contextlib.suppress(AttributeError):  # a C library without it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * KEPT_BYTES)


_Given = list[tuple[int, messages.Dtyped]]


class _Call(NamedTuple):
    """A call as it is made: of equal requests, one. ``device`` names a GPU, or is empty for the CPU."""

    run: messages.Run
    kernel: Callable[..., Any]
    arguments: list[Any]
    named: dict[str, Any]
    given: _Given
    memory: Mapping | DeviceMemory
    device: str


class Server:
    """Loaded kernels, forms of calls, and the results that wait for room."""

    def __init__(self, memory: Mapping) -> None:
        self.memory, self._copied = memory, Copier()
        self._kernels: dict[int, Callable[..., Any]] = {0: _same}
        self._forms: dict[int, messages.Form] = {}
        self._waiting: tuple[_Call, Any] | None = None
        self._opened: dict[tuple[str, int], DeviceMemory] = {}
        self._device = ""
        self._state: tuple[int, int] | None = None
        self._decoded = msgspec.msgpack.Decoder(messages.Request).decode
        self._calls: dict[bytes, _Call] = {}

    def answer(self, text: bytes) -> messages.Answer:
        """Serve a request; what a kernel raises is an answer."""
        call = self._calls.get(text)
        request = self._decoded(text) if call is None else call.run
        try:
            if isinstance(request, messages.Run):
                return self._run(text, request, call)
            if isinstance(request, messages.Fetch):
                assert self._waiting is not None
                return self._put(*self._waiting, request.room)
            if isinstance(request, messages.Open):
                return self._open(request)
            return self._load(request)
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises
            where = "".join(traceback.format_exception(error)[-4:])[-2000:]
            return messages.Failed(type(error).__name__, printable(error)[:4000], printable(where), _context_lost())

    def _open(self, wanted: messages.Open) -> messages.Answer:
        self._calls.clear()  # their tensors lie in what was opened before
        if wanted.use == GIVEN:
            self._waiting = None
        self._opened.pop((wanted.device, wanted.use), None)
        self._work_on(wanted.device)
        self._opened[wanted.device, wanted.use] = opened(wanted.handle, wanted.mark)
        return messages.Done((), several=False)

    def _work_on(self, device: str) -> None:
        if device and device != self._device:
            torch.cuda.set_device(device)
            self._device = device

    def _load(self, load: messages.Load) -> messages.Answer:
        self._work_on(load.device)
        for module in load.modules:
            importlib.import_module(module)
        kernel = REGISTRY.kernel(load.kernel)
        self._calls.clear()  # numbers may begin anew
        self._kernels[load.number] = kernel.load(messages.facts_of(load, REGISTRY.operation(load.operation)))
        return messages.Done((), several=False)

    def _run(self, text: bytes, run: messages.Run, call: _Call | None) -> messages.Answer:
        if self._state != (run.threads, run.deterministic):
            torch.set_num_threads(run.threads)
            if torch.get_deterministic_debug_mode() != (mode := run.deterministic):  # this imports Inductor: 1 s
                torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
            self._state = run.threads, run.deterministic
        if call is None:
            call = self._call_of(run)
            if run.new is None and run.host is None:
                if len(self._calls) >= MAX_KEPT:
                    self._calls.clear()
                self._calls[text] = call
        self._work_on(call.device)
        result = call.kernel(*call.arguments, **call.named)
        if run.host is not None and run.host[2]:
            assert isinstance(call.memory, DeviceMemory)
            self._host_bytes(run.host).copy_(call.memory.data)
        return self._put(call, result, run.room)

    def _host_bytes(self, host: tuple[int, int, bool]) -> torch.Tensor:
        return self.memory.tensor(host[0], torch.uint8, (host[1],), (1,))

    def _call_of(self, run: messages.Run) -> _Call:
        if run.new is not None:
            self._calls.clear()  # the number may have been another form's
            self._forms[run.form] = run.new
        form = self._forms[run.form]
        memory: Mapping | DeviceMemory = self.memory
        if run.host is not None:
            memory = DeviceMemory(self._host_bytes(run.host).to(form.device), run.host[0])
        elif form.device:
            memory = self._opened[form.device, GIVEN]
        tensor = memory.tensor
        given = list(zip(run.at, form.tensors, strict=True))
        tensors = iter([tensor(at, dtype_named(dtype), shape, strides) for at, (dtype, shape, strides) in given])
        others = iter(run.values)
        arguments = [next(tensors) if each else messages.unpacked(next(others)) for each in form.is_tensor]
        positional = len(arguments) - len(form.keywords)
        named = dict(zip(form.keywords, arguments[positional:], strict=True))
        return _Call(run, self._kernels[run.kernel], arguments[:positional], named, given, memory, form.device)

    def _put(self, call: _Call, result: Any, room: tuple[int, int]) -> messages.Answer:
        several, given, memory = isinstance(result, tuple), call.given, call.memory
        told: list[int | tuple[int, messages.Dtyped] | None] = []
        copies: list[tuple[int, messages.Dtyped, torch.Tensor]] = []
        size = 0
        for each in result if several else (result,):
            if each is None:
                told.append(None)
                continue
            if call.device and str(each.device) != call.device:
                raise TypeError(f"wanted results on {call.device}, got one on {each.device}")
            place = each.data_ptr() - memory.base + memory.first
            if 0 <= place - memory.first < memory.size and (place, messages.dtyped(each)) in given:
                told.append(given.index((place, messages.dtyped(each))))
                continue
            laid = _dense(each)
            told.append((size, laid))
            copies.append((size, laid, each))
            size += -(-each.numel() * each.itemsize // _LINE) * _LINE
        if size > room[1]:
            self._waiting = call, result
            return messages.Wanted(size)
        self._waiting = None
        by_ipc = call.device and call.run.host is None
        to = self._opened[call.device, RESULTS] if by_ipc else self.memory
        for offset, (dtype, shape, strides), each in copies:
            if not call.device and each.stride() == strides and not (each.is_neg() or each.is_conj()):  # as it lies
                self._copied(self.memory.base + room[0] + offset, each.data_ptr(), each.numel() * each.itemsize)
            else:
                to.tensor(room[0] + offset, dtype_named(dtype), shape, strides).copy_(each)
        if call.device:
            torch.cuda.synchronize(call.device)  # a kernel's error is raised here; the other process reads next
        return messages.Done(tuple(told), several)


def _context_lost() -> bool:
    """Whether an error of the GPU stays: nothing can run there in this process any more."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _same(tensor: torch.Tensor) -> torch.Tensor:
    """Give a vector back in another shape: a result of its own, for which nothing is computed."""
    return tensor.view(1, -1)


def _dense(result: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The dtype, shape and strides that a result is told by: its own strides where they leave no gaps."""
    if result.is_contiguous():
        return messages.dtyped(result)
    return messages.dtyped(torch.empty_like(result, device="meta"))
