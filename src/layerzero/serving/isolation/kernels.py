"""Kernels of processes of their own, as the engine calls them: tensors in, results out, and what a call costs."""

from __future__ import annotations

import atexit
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from layerzero.serving.isolation import messages
from layerzero.serving.isolation.arena import Arena, Copier, tensor_in
from layerzero.serving.isolation.messages import Done, Failed, Fetch, Form, Load, Run, Wanted, dtyped, load_of, packed
from layerzero.serving.isolation.worker import START_S, Worker
from layerzero.tuning.verification.child import homes

BUILD_S = 600.0
"""How long a kernel may take to load, and the first call of one that compiles."""

MAX_LOADED = 1024
"""Plans that a process keeps loaded, and forms of calls that it knows; beyond that their numbers begin anew."""

SAMPLES = 31
"""Calls of each size by which the cost of a call is measured: 60 ms together."""

_FEW, _MANY = 1 << 12, 1 << 20  # bytes of those calls
_LINE = 64  # of an address: tensors keep it, so that a vector load finds them as aligned as they were


class _Form(NamedTuple):
    """A form of calls that the process knows, by its number: the places of tensors and of others, and their bytes."""

    number: int
    tensors: tuple[int, ...]
    others: tuple[int, ...]
    sizes: tuple[int, ...]


class _Known(NamedTuple):
    """What a call of a form was answered last: the bytes that results take, and what they are."""

    size: int = 0
    done: Done | None = None
    kinds: Sequence[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]] = ()


_UNKNOWN = _Known()


class Library:
    """A library in a process of its own, and what that process has loaded."""

    def __init__(self, name: str, memory_bytes: int, command: tuple[str, ...]) -> None:
        self.worker, self.arena, self._copied = Worker(name, command), Arena(memory_bytes), Copier()
        self._lock = forking.lock()
        self._loaded: dict[bytes, int] = {}
        self._built: set[int] = set()
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self._known: dict[tuple[int, int], _Known] = {}

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
        self._known.clear()

    def _number(self, load: Load, key: bytes) -> int:
        if self.worker.pid is None:
            self._forget()
            self.worker.start(self.arena.file, load.modules)
            COSTS[self.worker.key] = self._measured()
        if key not in self._loaded:
            if len(self._loaded) >= MAX_LOADED:
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
        if max(len(self._forms), len(self._known)) >= MAX_LOADED:
            self._forms.clear()
            self._known.clear()
        arguments = (*given, *named.values())
        key = *named, *[_metadata(each) if isinstance(each, torch.Tensor) else None for each in arguments]
        form, new = self._forms.get(key), None
        if form is None:
            form, new = _form(len(self._forms), arguments, tuple(named))
        tensors = [arguments[place] for place in form.tensors]
        written: list[int] = []
        if mutated:
            labels = (*range(len(given)), *named)
            written = [index for index, place in enumerate(form.tensors) if labels[place] in mutated]
        at, own, copies = self._placed(tensors, form.sizes, written)
        known = self._known.get((number, form.number), _UNKNOWN)
        room: memoryview | None = None
        made: list[torch.Tensor] = []

        def meanwhile() -> None:
            made.extend([tensor_in(room, *kind) for kind in known.kinds])

        try:
            place = 0
            if known.size:
                place, room = self.arena.hold(known.size)
            for at_room, start, size in copies:
                self._copied(self.arena.base + own[0] + at_room, start, size)
            state = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
            values = tuple([packed(arguments[each]) for each in form.others])
            request = Run(number, form.number, at, values, (place, known.size), *state, new)
            answer = self.worker.ask(request, limit_s, kernel, meanwhile)
            if new is not None:
                self._forms[key] = form
            if isinstance(answer, Wanted):
                made.clear()
                room = None
                known = _Known(answer.size)
                place, room = self.arena.hold(answer.size)
                answer = self.worker.ask(Fetch((place, answer.size)), limit_s, kernel)
            if not isinstance(answer, Done):
                assert isinstance(answer, Failed)
                raise self.worker.refused(answer)
            if number:
                self.worker.worked()
            if answer is not known.done:
                laid = [each for each in answer.results if isinstance(each, tuple)]
                kinds = [(offset, dtype_named(dtype), shape, strides) for offset, (dtype, shape, strides) in laid]
                known = self._known[number, form.number] = _Known(known.size, answer, kinds)
                made[:] = [tensor_in(room, *kind) for kind in kinds]
            if self.arena.held > self.arena.size // 3:  # what is kept for ever leaves room; half left holes too small
                made = [each.clone() for each in made]
            new_ones = iter(made)
            results = [
                None if each is None else tensors[each] if isinstance(each, int) else next(new_ones)
                for each in answer.results
            ]
            for index in written:
                tensor = tensors[index]
                tensor.copy_(self.arena.tensor(at[index], tensor.dtype, tensor.shape, tensor.stride()))
        finally:
            self.arena.filling = None
            if own[1]:
                self.arena.give(*own)
            room = None  # an error that is kept keeps this frame
            made = []
        return tuple(results) if answer.several else results[0]

    def _placed(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int], written: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, int], list[tuple[int, int, int]]]:
        """Where each tensor is to lie in the shared memory, the room that was taken, and what is to be copied there.

        That is a place in the room, an address and bytes. What overlaps is copied once, as it lies, so that tensors
        which share memory do so there; what lies there already, as a result, stays, unless the call writes into it.
        """
        shared, shared_end = (0, 0) if written else self.arena.reach()
        spans = [(each.data_ptr(), index) for index, each in enumerate(tensors)]
        if len(spans) > 1:
            spans.sort()
        at, moved = [0] * len(tensors), []
        copies: list[tuple[int, int, int]] = []
        first = stop = taken = 0
        for address, index in spans:
            end = address + sizes[index]
            if shared <= address < shared_end:
                at[index] = address - shared
            elif end > address:
                if copies and address < stop:
                    stop = max(stop, end)
                    copies[-1] = (copies[-1][0], first, stop - first)
                else:
                    taken = -(-(taken + stop - first) // _LINE) * _LINE + address % _LINE
                    first, stop = address, end
                    copies.append((taken, first, stop - first))
                moved.append((index, taken + address - first))
        if not copies:
            return tuple(at), (0, 0), copies
        size = taken + stop - first
        room = self.arena.take(size)
        for index, place in moved:
            at[index] = room + place
        return tuple(at), (room, size), copies

    def _measured(self) -> CallCost:
        """What calls of two sizes cost, by calls that compute nothing."""
        medians = []
        for size in (_FEW, _MANY):
            given, times = (torch.zeros(size, dtype=torch.uint8),), []
            for _ in range(SAMPLES):
                began = time.perf_counter()
                self._call(0, "the cost of a call", given, {}, frozenset(), START_S)
                times.append((time.perf_counter() - began) * 1e6)
                time.sleep(1.5e-9 * messages.AWAKE_NS)  # most calls find the process asleep
            medians.append(statistics.median(times))
        mib_us = max(medians[1] - medians[0], 0.0) / (2 * (_MANY - _FEW) / 2**20)
        assert self.worker.pid is not None
        return CallCost(max(medians[0] - mib_us * 2 * _FEW / 2**20, 0.0), mib_us, self.worker.pid)


def _metadata(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _form(number: int, arguments: Sequence[object], names: tuple[str, ...]) -> tuple[_Form, Form]:
    """A new form of calls, as this process and as the other one has it."""
    tensors = {place: each for place, each in enumerate(arguments) if isinstance(each, torch.Tensor)}
    others = tuple([place for place in range(len(arguments)) if place not in tensors])
    sizes = tuple([isolation.span(each.shape, each.stride()) * each.itemsize for each in tensors.values()])
    marks = tuple([place in tensors for place in range(len(arguments))])
    told = Form(tuple(map(dtyped, tensors.values())), marks, names)
    return _Form(number, tuple(tensors), others, sizes), told


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
