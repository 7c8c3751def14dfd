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
from layerzero.engine.registry import REGISTRY
from layerzero.serving.isolation import messages
from layerzero.serving.isolation.arena import KEPT_BYTES, MAX_KEPT, Copier, Mapping
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
    tell.found(messages.Hello(__version__, str(torch.__version__), os.getpid()))
    encoder, awake = msgspec.msgpack.Encoder(), messages.Awake(calls)
    with torch.no_grad():
        while request := calls.recv(MOST_BYTES):
            calls.send(encoder.encode(server.answer(request)))
            awake.came()
    os._exit(0)  # what a library does at the end of a process is not waited for


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
    """A call as it is made: of equal requests, one."""

    run: messages.Run
    kernel: Callable[..., Any]
    arguments: list[Any]
    named: dict[str, Any]
    given: _Given


class Server:
    """Loaded kernels, forms of calls, and the results that wait for room."""

    def __init__(self, memory: Mapping) -> None:
        self.memory, self._copied = memory, Copier()
        self._kernels: dict[int, Callable[..., Any]] = {0: _same}
        self._forms: dict[int, messages.Form] = {}
        self._waiting: tuple[_Given, Any] = [], None
        self._state: tuple[int, bool] | None = None
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
                return self._put(*self._waiting, request.room)
            return self._load(request)
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises
            where = "".join(traceback.format_exception(error)[-4:])[-2000:]
            return messages.Failed(type(error).__name__, str(error)[:4000], where)

    def _load(self, load: messages.Load) -> messages.Answer:
        for module in load.modules:
            importlib.import_module(module)
        kernel = REGISTRY.kernel(load.kernel)
        self._calls.clear()  # numbers may begin anew
        self._kernels[load.number] = kernel.load(messages.facts_of(load, REGISTRY.operation(load.operation)))
        return messages.Done((), several=False)

    def _run(self, text: bytes, run: messages.Run, call: _Call | None) -> messages.Answer:
        if self._state != (run.threads, run.deterministic):
            torch.set_num_threads(run.threads)
            if torch.are_deterministic_algorithms_enabled() != run.deterministic:  # this imports Inductor: 1 s
                torch.use_deterministic_algorithms(run.deterministic)
            self._state = run.threads, run.deterministic
        if call is None:
            call = self._call_of(run)
            if run.new is None:
                if len(self._calls) >= MAX_KEPT:
                    self._calls.clear()
                self._calls[text] = call
        return self._put(call.given, call.kernel(*call.arguments, **call.named), run.room)

    def _call_of(self, run: messages.Run) -> _Call:
        if run.new is not None:
            self._calls.clear()  # the number may have been another form's
            self._forms[run.form] = run.new
        form, tensor = self._forms[run.form], self.memory.tensor
        given = list(zip(run.at, form.tensors, strict=True))
        tensors = iter([tensor(at, dtype_named(dtype), shape, strides) for at, (dtype, shape, strides) in given])
        others = iter(run.values)
        arguments = [next(tensors) if each else messages.unpacked(next(others)) for each in form.is_tensor]
        positional = len(arguments) - len(form.keywords)
        named = dict(zip(form.keywords, arguments[positional:], strict=True))
        return _Call(run, self._kernels[run.kernel], arguments[:positional], named, given)

    def _put(self, given: _Given, result: Any, room: tuple[int, int]) -> messages.Answer:
        several = isinstance(result, tuple)
        told: list[int | tuple[int, messages.Dtyped] | None] = []
        copies: list[tuple[int, messages.Dtyped, torch.Tensor]] = []
        size = 0
        for each in result if several else (result,):
            if each is None:
                told.append(None)
                continue
            place = each.data_ptr() - self.memory.base
            if 0 <= place < self.memory.size and (place, messages.dtyped(each)) in given:
                told.append(given.index((place, messages.dtyped(each))))
                continue
            laid = _dense(each)
            told.append((size, laid))
            copies.append((size, laid, each))
            size += -(-each.numel() * each.itemsize // _LINE) * _LINE
        if size > room[1]:
            self._waiting = given, result
            return messages.Wanted(size)
        self._waiting = [], None
        for offset, (dtype, shape, strides), each in copies:
            if each.stride() == strides and not (each.is_neg() or each.is_conj()):  # as it lies
                self._copied(self.memory.base + room[0] + offset, each.data_ptr(), each.numel() * each.itemsize)
            else:
                self.memory.tensor(room[0] + offset, dtype_named(dtype), shape, strides).copy_(each)
        return messages.Done(tuple(told), several)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    """Give a vector back in another shape: a result of its own, for which nothing is computed."""
    return tensor.view(1, -1)


def _dense(result: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The dtype, shape and strides that a result is told by: its own strides where they leave no gaps."""
    if result.is_contiguous():
        return messages.dtyped(result)
    return messages.dtyped(torch.empty_like(result, device="meta"))
