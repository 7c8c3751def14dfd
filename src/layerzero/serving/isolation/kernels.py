"""Kernels of processes of their own, as the engine calls them: tensors in, results out, and what a call costs."""

from __future__ import annotations

import atexit
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from layerzero.core.dtypes import dtype_named
from layerzero.core.errors import IsolatedKernelError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.system import forking, log, resources
from layerzero.engine import isolation, probe
from layerzero.engine.config import CONFIGURATION, SCOPES, current_policy
from layerzero.engine.failures import out_of_memory
from layerzero.engine.isolation import COSTS, CallCost
from layerzero.engine.policy import Policy
from layerzero.serving.isolation import messages
from layerzero.serving.isolation.arena import GIVEN, RESULTS, Arena, Buffer, Copier, Gpu, bytes_at, placed, tensor_in
from layerzero.serving.isolation.messages import Done, Failed, Fetch, Known, Load, Open, Run, Wanted, load_of, packed
from layerzero.serving.isolation.worker import START_S, Worker
from layerzero.tuning.verification.child import homes

BUILD_S = 600.0
"""How long a kernel may take to load, and the first call of one that compiles."""

MAX_LOADED = 1024
"""Plans that a process keeps loaded, and forms of calls that it knows; beyond that their numbers begin anew."""

SAMPLES = 31
"""Calls of each size by which the cost of a call is measured: 60 ms together."""

_FEW, _MANY = 1 << 12, 1 << 20  # bytes of those calls


_UNKNOWN = Known()


class Library:
    """A library in a process of its own, and what that process has loaded; an old one ends it as soon as it is idle."""

    old = False

    def __init__(self, name: str, memory_bytes: int, command: tuple[str, ...]) -> None:
        self.worker, self.arena, self._copied = Worker(name, command), Arena(memory_bytes), Copier()
        self._lock = forking.lock()
        self._loaded: dict[bytes, int] = {}
        self._built: set[int] = set()
        self._forms: dict[tuple[Any, ...], messages.KnownForm] = {}
        self._known: dict[tuple[int, int], Known] = {}
        self._gpus: dict[torch.device, Gpu] = {}

    def load(self, load: Load, key: bytes) -> None:
        """Load a kernel, in a process that is started where none runs. Raises: IsolatedKernelError."""
        with self._turn():
            self._number(load, key)

    def call(
        self,
        load: Load,
        key: bytes,
        given: tuple[Any, ...],
        named: dict[str, Any],
        mutated: frozenset[int | str],
        limit_s: float,
        device: torch.device | None,
        *,
        builds: bool,
    ) -> Any:
        """Call a kernel, which is loaded where it is not. Raises: IsolatedKernelError, MemoryError.

        One that ``builds`` gets the time for that until it gave a result in the process that runs now.
        """
        if device is not None and torch.cuda.is_current_stream_capturing():  # before anything that a capture forbids
            raise IsolatedKernelError("wanted no capture of a CUDA graph: another process launches the kernel")
        with self._turn():
            number = (self._loaded.get(key) if self.worker.pid else None) or self._number(load, key)
            if not builds or number in self._built:
                return self._call(number, load.kernel, given, named, mutated, limit_s, device)
            result = self._call(number, load.kernel, given, named, mutated, max(limit_s, BUILD_S), device)
            self._built.add(number)
            return result

    @contextmanager
    def _turn(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            if self.old:
                self.end_idle()

    def end(self) -> None:
        """Kill the process; a call that waits for it raises, and cleans up."""
        self.worker.kill()
        self.end_idle()

    def end_idle(self) -> None:
        """Kill the process, unless it is at a call."""
        if self._lock.acquire(blocking=False):
            try:
                self.worker.end()
                for gpu in self._gpus.values():  # an error that is kept keeps frames, and they keep it
                    gpu.opened.clear()
                    gpu.buffers.clear()
                self._gpus.clear()
            finally:
                self._lock.release()

    def _forget(self) -> None:
        self._built.clear()
        self._loaded.clear()
        self._forms.clear()
        self._known.clear()

    def _gpu(self, device: torch.device) -> Gpu:
        """How tensors of a GPU reach the process that runs now; the first time, that is found by trying."""
        gpu = self._gpus.get(device)
        if gpu is None:
            gpu = self._gpus[device] = Gpu(device)
        if not gpu.reason and len(gpu.opened) < 2:
            try:
                for use in (GIVEN, RESULTS):
                    self._room(gpu, use, 1)
            except IsolatedKernelError:
                if self.worker.pid is None:  # it ended by that; the next one gets copies
                    raise
        return gpu

    def _room(self, gpu: Gpu, use: int, size: int) -> Buffer:
        """A buffer that the process has open. Raises: IsolatedKernelError, after which CUDA IPC is not tried again."""
        try:
            return gpu.room(use, size, self._open)
        except (IsolatedKernelError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            gpu.reason = str(error).partition("\n")[0]
            COSTS.pop(isolation.cost_key(self.worker.key, str(gpu.device)), None)
            log.warning("%s: calls of its process take longer%s", self.worker.name, gpu.way)
            if isinstance(error, IsolatedKernelError):
                raise
            raise IsolatedKernelError(gpu.reason) from error

    def _open(self, request: Open) -> None:
        answer = self.worker.ask(request, START_S, f"opening memory of {request.device}")
        if isinstance(answer, Failed):
            raise self.worker.refused(answer)

    def _hold(self, ipc: Gpu | None, size: int) -> tuple[int, memoryview | Buffer]:
        """A room for results, and its place."""
        return self.arena.hold(size) if ipc is None else (0, self._room(ipc, RESULTS, size))

    def _number(self, load: Load, key: bytes) -> int:
        if self.worker.pid is None:
            self._forget()
            for gpu in self._gpus.values():
                gpu.opened.clear()
            self.worker.start(self.arena.file, load.modules)
        priced = isolation.cost_key(self.worker.key, load.device)
        if priced not in COSTS or COSTS[priced].pid != self.worker.pid:
            COSTS[priced] = self._measured(torch.device(load.device) if load.device else None)
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
        device: torch.device | None,
    ) -> Any:
        gpu = None if device is None else self._gpu(device)
        ipc = None if gpu is None or gpu.reason else gpu
        if max(len(self._forms), len(self._known)) >= MAX_LOADED:
            self._forms.clear()
            self._known.clear()
        arguments = (*given, *named.values())
        key = (
            device,
            *named,
            *[messages.metadata(each) if isinstance(each, torch.Tensor) else None for each in arguments],
        )
        form, new = self._forms.get(key), None
        if form is None:
            form, new = messages.form_of(
                len(self._forms), arguments, tuple(named), "" if device is None else str(device)
            )
        tensors = [arguments[place] for place in form.tensors]
        written: list[int] = []
        if mutated:
            labels = (*range(len(given)), *named)
            written = [index for index, place in enumerate(form.tensors) if labels[place] in mutated]
        if gpu is not None:
            gpu.begin(tensors)
        reach = (0, 0) if written or gpu is not None else self.arena.reach()
        take = self.arena.take if ipc is None else lambda size: self._room(ipc, GIVEN, size).first
        at, own, copies = placed(tensors, form.sizes, reach, take)
        host = None if gpu is None or ipc is not None else (*own, bool(written))
        known = self._known.get((number, form.number), _UNKNOWN)
        room: memoryview | Buffer | None = None
        made: list[torch.Tensor] = []

        def meanwhile() -> None:
            made.extend(_made(room, known.kinds, None))

        try:
            place = 0
            if known.size:
                place, room = self._hold(ipc, known.size)
            for at_room, start, size, index in copies:
                if gpu is None:
                    self._copied(self.arena.base + own[0] + at_room, start, size)
                    continue
                kind = own[0] + at_room, torch.uint8, (size,), (1,)
                to = tensor_in(self.arena.view, *kind) if ipc is None else ipc.opened[GIVEN].tensor(*kind)
                to.copy_(bytes_at(tensors[index], start, size))
                del to  # an error that is kept keeps this frame
            if ipc is not None:
                ipc.wait()
            state = torch.get_num_threads(), torch.get_deterministic_debug_mode()
            values = tuple([packed(arguments[each]) for each in form.others])
            request = Run(number, form.number, at, values, (place, known.size), *state, new, host)
            answer = self.worker.ask(request, limit_s, kernel, meanwhile if gpu is None else None)
            if new is not None:
                self._forms[key] = form
            if isinstance(answer, Wanted):
                made.clear()
                room = None
                known = Known(answer.size)
                place, room = self._hold(ipc, answer.size)
                answer = self.worker.ask(Fetch((place, answer.size)), limit_s, kernel)
            if not isinstance(answer, Done):
                assert isinstance(answer, Failed)
                raise self.worker.refused(answer)
            if number:
                self.worker.worked()
            if answer is not known.done:
                laid = [each for each in answer.results if isinstance(each, tuple)]
                kinds = [(offset, dtype_named(dtype), shape, strides) for offset, (dtype, shape, strides) in laid]
                known = self._known[number, form.number] = Known(known.size, answer, kinds)
                made.clear()
            if len(made) < len(known.kinds):
                made = _made(room, known.kinds, gpu)
            if gpu is None and self.arena.held > self.arena.size // 3:  # half left holes too small, once it is kept
                made = [each.clone() for each in made]
            new_ones = iter(made)
            results = [
                None if each is None else tensors[each] if isinstance(each, int) else next(new_ones)
                for each in answer.results
            ]
            memory = self.arena if ipc is None else ipc.opened[GIVEN]
            for index in written:
                tensor = tensors[index]
                tensor.copy_(memory.tensor(at[index], tensor.dtype, tensor.shape, tensor.stride()))
        finally:
            self.arena.filling = None
            if gpu is not None:
                gpu.end()
            if own[1] and ipc is None:
                self.arena.give(*own)
            room = None  # an error that is kept keeps this frame
            made = []
        return tuple(results) if answer.several else results[0]

    def _measured(self, device: torch.device | None = None) -> CallCost:
        """What calls of two sizes cost, by calls that compute nothing."""
        medians = []
        for size in (_FEW, _MANY):
            given, times = (torch.zeros(size, dtype=torch.uint8, device=device or "cpu"),), []
            for _ in range(SAMPLES):
                began = time.perf_counter()
                self._call(0, "the cost of a call", given, {}, frozenset(), START_S, device)
                times.append((time.perf_counter() - began) * 1e6)
                time.sleep(1.5e-9 * messages.AWAKE_NS)  # most calls find the process asleep
            medians.append(statistics.median(times))
        mib_us = max(medians[1] - medians[0], 0.0) / (2 * (_MANY - _FEW) / 2**20)
        assert self.worker.pid is not None
        way = "" if device is None else self._gpus[device].way
        return CallCost(max(medians[0] - mib_us * 2 * _FEW / 2**20, 0.0), mib_us, self.worker.pid, way)


def _made(room: memoryview | Buffer | None, kinds: Sequence[messages.Kind], gpu: Gpu | None) -> list[torch.Tensor]:
    """The tensors of a result: those of a GPU are memory of this process alone, others lie in the room."""
    if isinstance(room, Buffer):
        return [room.tensor(*kind).clone() for kind in kinds]
    made = [tensor_in(room, *kind) for kind in kinds]
    return made if gpu is None else [each.to(gpu.device) for each in made]


LIBRARIES: dict[tuple[str, ...], Library] = {}
"""By what :func:`layerzero.engine.isolation.key` gives."""

_lock = forking.lock()

_KEPT: list[object] = []
"""In a forked child, memory of the parent's GPUs: freeing it would call CUDA, which does not work there."""


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
        self._device = torch.device(self._load.device) if self._load.device else None
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
        return call(self._load, self._key, given, named, self._mutated, limit_s, self._device, builds=self._builds)


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


ENDING = "layerzero-isolation-ends"
"""The name of threads that end a process: seconds on a GPU. A change of settings waits for it only without threads."""


def _end_old() -> None:
    """End processes of environments that settings name no more; what still calls one starts it anew."""
    named = [isolation.environments(each) for each in (CONFIGURATION.policy, *SCOPES.policies)]
    for key, each in list(LIBRARIES.items()):
        if not any(found.get(key[0], ()) == key[1:] for found in named):
            LIBRARIES.pop(key, each).old = True
            if resources.started(ENDING, each.end_idle) is None:  # the system has no more threads
                each.end_idle()


def end_all() -> None:
    """Kill the processes; the next call starts a new one."""
    for each in list(LIBRARIES.values()):
        each.end()


def _forget() -> None:
    """Begin anew in a forked child: the processes are the parent's."""
    for each in LIBRARIES.values():
        each.worker.abandon()
        _KEPT.append(each._gpus)
    LIBRARIES.clear()
    COSTS.clear()


CONFIGURATION.on_change(_end_old)
atexit.register(end_all)
forking.in_child(_forget)
