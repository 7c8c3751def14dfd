"""Kernels of processes of their own, as the engine calls them: tensors in, results out, and what a call costs."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from layerzero.core.dtypes import dtype_named
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.system import forking
from layerzero.engine import isolation, probe
from layerzero.engine.config import current_policy
from layerzero.engine.isolation import COSTS, CallCost
from layerzero.engine.policy import Policy
from layerzero.serving.isolation.arena import Arena
from layerzero.serving.isolation.messages import Done, Failed, Fetch, Form, Load, Run, Wanted, dtyped, load_of, packed
from layerzero.serving.isolation.worker import START_S, Worker
from layerzero.tuning.verification.child import homes

BUILD_S = 600.0
"""How long a kernel may take to load, and the first call of one that compiles."""

MAX_LOADED = 1024
"""Plans that a process keeps loaded; beyond that it begins anew."""

SAMPLES = 31
"""Calls of each size by which the cost of a call is measured: 40 ms together."""

_FEW, _MANY = 1 << 12, 1 << 20  # bytes of those calls
_LINE = 64  # of an address: tensors keep it, so that a vector load finds them as aligned as they were


class Library:
    """A library in a process of its own, and what that process has loaded."""

    def __init__(self, name: str, memory_bytes: int, command: tuple[str, ...]) -> None:
        self.worker, self.arena = Worker(name, command), Arena(memory_bytes)
        self._lock = forking.lock()
        self._loaded: dict[bytes, int] = {}
        self._built: set[int] = set()
        self._forms: dict[tuple[Any, ...], int] = {}
        self._room: dict[tuple[int, int], int] = {}

    def load(self, load: Load, key: bytes) -> None:
        """Load a kernel, in a process that is started where none runs. Raises: IsolatedKernelError."""
        with self._lock:
            self._number(load, key)

    def call(
        self,
        load: Load,
        key: bytes,
        given: tuple[Any, ...],
        named: dict[str, Any],
        mutated: frozenset[int | str],
        limit_s: float,
        *,
        builds: bool,
    ) -> Any:
        """Call a kernel, which is loaded where it is not. Raises: IsolatedKernelError, MemoryError.

        One that ``builds`` gets the time for that until it gave a result in the process that runs now.
        """
        with self._lock:
            number = (self._loaded.get(key) if self.worker.pid else None) or self._number(load, key)
            if not builds or number in self._built:
                return self._call(number, load.kernel, given, named, mutated, limit_s)
            result = self._call(number, load.kernel, given, named, mutated, max(limit_s, BUILD_S))
            self._built.add(number)
            return result

    def end(self) -> None:
        """Kill the process; a call that waits for it raises, and cleans up."""
        self.worker.kill()
        if self._lock.acquire(blocking=False):
            try:
                self.worker.end()
            finally:
                self._lock.release()

    def _forget(self) -> None:
        self._built.clear()
        self._loaded.clear()
        self._forms.clear()
        self._room.clear()

    def _number(self, load: Load, key: bytes) -> int:
        if self.worker.pid is None:
            self._forget()
            self.worker.start(self.arena.file, load.modules)
            COSTS[self.worker.key] = self._measured()
        if key not in self._loaded:
            if max(len(self._loaded), len(self._forms)) >= MAX_LOADED:  # numbers begin anew
                self._forget()
            number = len(self._loaded) + 1
            what = f"loading {load.kernel}"
            answer = self.worker.ask(msgspec.structs.replace(load, number=number), BUILD_S, what)
            if isinstance(answer, Failed):
                raise self.worker.refused(answer)
            self._loaded[key] = number
        return self._loaded[key]

    def _call(
        self,
        number: int,
        kernel: str,
        given: tuple[Any, ...],
        named: dict[str, Any],
        mutated: frozenset[int | str],
        limit_s: float,
    ) -> Any:
        arguments = (*given, *named.values())
        marks = tuple([isinstance(each, torch.Tensor) for each in arguments])
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        key = tuple([(each.dtype, each.shape, each.stride()) for each in tensors]), marks, tuple(named)
        form = self._forms.get(key, len(self._forms))
        new = None if key in self._forms else Form(tuple(map(dtyped, tensors)), *key[1:])
        labels = [label for label, mark in zip((*range(len(given)), *named), marks, strict=True) if mark]
        written = [index for index, label in enumerate(labels) if label in mutated] if mutated else []
        at, own, copies = self._placed(tensors, written)
        room, wanted = (0, 0), self._room.get((number, form), 0)
        try:
            room = (self.arena.take(wanted), wanted) if wanted else room
            state = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
            values = tuple([packed(each) for each, mark in zip(arguments, marks, strict=True) if not mark])
            request = Run(number, form, at, values, room, *state, new)
            for place, start, size in copies:
                ctypes.memmove(self.arena.base + own[0] + place, start, size)
            answer = self.worker.ask(request, limit_s, kernel)
            if new is not None:
                self._forms[key] = form
            if isinstance(answer, Wanted):
                if room[1]:
                    self.arena.give(*room)
                room = (0, 0)
                room = self.arena.take(answer.size), answer.size
                self._room[number, form] = answer.size
                answer = self.worker.ask(Fetch(room), limit_s, kernel)
            if not isinstance(answer, Done):
                assert isinstance(answer, Failed)
                raise self.worker.refused(answer)
            if number:
                self.worker.worked()
            taken, room = room, (0, 0)
            results = self._results(answer, tensors, taken)
            for index in written:
                tensor = tensors[index]
                tensor.copy_(self.arena.tensor(at[index], tensor.dtype, tensor.shape, tensor.stride()))
        finally:
            for each in (own, room):
                if each[1]:
                    self.arena.give(*each)
        return results

    def _placed(
        self, tensors: Sequence[torch.Tensor], written: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, int], list[tuple[int, int, int]]]:
        """Where each tensor is to lie in the shared memory, the room that was taken, and what is to be copied there.

        That is a place in the room, an address and bytes. What overlaps is copied once, as it lies, so that tensors
        which share memory do so there; what lies there already, as a result, stays, unless the call writes into it.
        """
        spans = []
        for index, each in enumerate(tensors):
            address = each.data_ptr()
            elements = each.numel() if each.is_contiguous() else isolation.span(each.shape, each.stride())
            spans.append((address, address + elements * each.itemsize, index))
        if len(spans) > 1:
            spans.sort()
        at, places, taken = [0] * len(tensors), [0] * len(tensors), 0
        copies: list[tuple[int, int, int]] = []
        first = stop = 0
        for address, end, index in spans:
            shared = self.arena.offset_of(address)
            if shared is not None and not written:
                at[index] = shared
            elif end > address:
                if copies and address < stop:
                    stop = max(stop, end)
                    copies[-1] = (copies[-1][0], first, stop - first)
                else:
                    taken = -(-(taken + (stop - first if copies else 0)) // _LINE) * _LINE + address % _LINE
                    first, stop = address, end
                    copies.append((taken, first, stop - first))
                places[index] = taken + address - first + 1
        if not copies:
            return tuple(at), (0, 0), copies
        size = taken + stop - first
        room = self.arena.take(size)
        return (
            tuple([room + place - 1 if place else there for place, there in zip(places, at, strict=True)]),
            (room, size),
            copies,
        )

    def _results(self, done: Done, tensors: Sequence[torch.Tensor], room: tuple[int, int]) -> Any:
        """The results of a call: arguments that were written into, or tensors in the room that was taken for them."""
        laid = [each for each in done.results if isinstance(each, tuple)]
        if laid:
            kinds = [(offset, dtype_named(dtype), shape, strides) for offset, (dtype, shape, strides) in laid]
            made = iter(self.arena.results(*room, kinds))
        elif room[1]:
            self.arena.give(*room)
        results = [
            None if each is None else tensors[each] if isinstance(each, int) else next(made) for each in done.results
        ]
        return tuple(results) if done.several else results[0]

    def _measured(self) -> CallCost:
        """What calls of two sizes cost, by calls that compute nothing."""
        medians = []
        for size in (_FEW, _MANY):
            given, times = (torch.zeros(size, dtype=torch.uint8),), []
            for _ in range(SAMPLES):
                began = time.perf_counter()
                self._call(0, "the cost of a call", given, {}, frozenset(), START_S)
                times.append((time.perf_counter() - began) * 1e6)
                time.sleep(0.0005)  # longer than the process stays awake: most calls find it asleep
            medians.append(statistics.median(times))
        mib_us = max(medians[1] - medians[0], 0.0) / (2 * (_MANY - _FEW) / 2**20)
        assert self.worker.pid is not None
        return CallCost(max(medians[0] - mib_us * 2 * _FEW / 2**20, 0.0), mib_us, self.worker.pid)


LIBRARIES: dict[tuple[str, ...], Library] = {}
"""By what :func:`layerzero.engine.isolation.key` gives."""

_lock = forking.lock()


def library(key: tuple[str, ...]) -> Library:
    """The process of a library in an environment, made where there is none."""
    found = LIBRARIES.get(key)
    if found is None:
        with _lock:
            found = LIBRARIES.get(key)
            if found is None:
                found = Library(key[0], current_policy()["isolation.memory_mb"] * 2**20, key[1:])
                LIBRARIES[key] = found
    return found


class IsolatedKernel:
    """What a plan calls in place of a kernel that runs in a process of its own."""

    def __init__(self, kernel: Kernel, facts: Facts) -> None:
        """Raises: IsolatedKernelError where the process does not start, or the kernel does not load there."""
        self._load = load_of(kernel.id, facts, homes([kernel]))
        self._key, self._builds = msgspec.msgpack.encode(self._load), kernel.jit
        self._library = isolation.key(kernel, current_policy())
        schema = facts.operation.schema
        self._mutated: frozenset[int | str] = frozenset(
            [
                *(place for place, each in enumerate(schema.required) if each.mutated),
                *(kernel.renames.get(each.name, each.name) for each in schema.optional if each.mutated),
            ]
        )
        library(self._library).load(self._load, self._key)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Run the kernel there. Raises: IsolatedKernelError, with what it raised or how the process ended."""
        limit_s, call = current_policy()["isolation.timeout_s"], library(self._library).call
        return call(self._load, self._key, given, named, self._mutated, limit_s, builds=self._builds)


def unable(kernel: Kernel, policy: Policy) -> tuple[str, object, object, str] | None:
    """What this system lacks for processes of their own: fact, wanted, got and next step; None where it has all."""
    if sys.platform != "linux" or not hasattr(socket, "SOCK_SEQPACKET"):
        return "system", "linux", sys.platform, "Leave it out of isolate and isolation.pythons"
    if policy.backend_isolation == "container":
        command = isolation.command(kernel, policy)
        if not command:
            return f"backend_containers: {kernel.source}", "an image", "none", "Name one there"
        if len(command) > 1 and shutil.which(probe.RUNTIME) is None:
            return "the container runtime", probe.RUNTIME, "none", "Install it, or use isolation.pythons"
    return None


def end_all() -> None:
    """Kill the processes; the next call starts a new one."""
    for each in list(LIBRARIES.values()):
        each.end()


def _forget() -> None:
    """Begin anew in a forked child: the processes are the parent's."""
    for each in LIBRARIES.values():
        each.worker.abandon()
    LIBRARIES.clear()
    COSTS.clear()


atexit.register(end_all)
forking.in_child(_forget)
