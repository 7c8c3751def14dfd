"""What the two processes say to each other, as msgpack: facts of a plan, calls of it, results and errors. No pickle."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.facts import Facts, TensorFacts
from layerzero.core.operation import Operation
from layerzero.engine.isolation import device_name, span

Dtyped = tuple[str, tuple[int, ...], tuple[int, ...]]
"""The dtype, shape and strides of a tensor."""


AWAKE_NS = 500_000
"""How long a process stays awake for a message before it sleeps: a call of 1 MiB takes half as long."""

MOST_ASLEEP = 1023
"""Messages in a row that are waited for asleep, before the next try."""


MOST_S = 2e6
"""Of a wait that ends: 23 days, and the system counts to 24."""


class Awake:
    """Waits for messages awake, for a moment, where that paid before.

    A process that sleeps is often woken on the CPU of the one that asks, and finds its caches cold: on two CPUs, calls
    of 4 KiB take 58 us with this and 150 without (EPYC Zen 4, 2026-11-27). On one CPU the moment is lost; each loss
    doubles how many messages are waited for asleep, each gain halves it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._poll, self._asleep, self._left = select.poll(), 0, 0
        self._poll.register(end, select.POLLIN)

    def came(self) -> bool:
        """Whether a message is there; if not, wait for it asleep."""
        if self._left:
            self._left -= 1
            return False
        until = time.perf_counter_ns() + AWAKE_NS
        while not self._poll.poll(0):
            if time.perf_counter_ns() > until:
                self._left = self._asleep = min(2 * self._asleep + 1, MOST_ASLEEP)
                return False
        self._asleep //= 2
        return True

    def comes(self, seconds: float) -> bool:
        """Wait at most so long for a message, whatever signals come meanwhile; whether it came."""
        return self.came() or bool(self._poll.poll(1e3 * seconds if seconds < MOST_S else None))


class Serve(msgspec.Struct, frozen=True):
    """The one job of such a child: serve calls until the other end is closed.

    Attributes:
        memory, calls: the shared memory and its end of the socket, as files that it was handed.
    """

    memory: int
    calls: int


class Hello(msgspec.Struct, frozen=True):
    """The version of the child's LayerZero, once it serves; it must be this process's."""

    layerzero: str


class Load(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load a kernel for the facts of a plan, under a number; ``modules`` register it.

    ``device`` is torch's name of a GPU and ``uuid`` which one that must be; both are empty for the CPU.
    """

    number: int
    modules: list[str]
    kernel: str
    operation: str
    layout: str | None
    tensors: dict[str, tuple[Dtyped, int, bool]]
    values: dict[str, Any]
    device: str = ""
    uuid: str = ""


class Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Open memory of a GPU by what torch's ``_share_cuda_`` gave, in place of what was opened for this use before.

    Attributes:
        device: torch's name of the GPU.
        use: for what a call is given, or for its results.
        handle: of CUDA IPC, with where the memory lies in what it opens.
        mark: the first bytes there: another memory must not be taken for it.
    """

    device: str
    use: int
    handle: tuple[int, bytes, int, int, bytes, int, bytes, bool]
    mark: bytes


class Form(msgspec.Struct, frozen=True, array_like=True):
    """How a kernel is called: its tensors, and which places are tensors; the last ones are keywords with names.

    ``device`` is torch's name of the GPU that all tensors lie on; empty for the CPU.
    """

    tensors: tuple[Dtyped, ...]
    is_tensor: tuple[bool, ...]
    keywords: tuple[str, ...]
    device: str = ""


class Run(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Call a loaded kernel.

    Attributes:
        kernel: the number it was loaded under; 0 gives back its tensors, to measure what a call costs.
        form: the number of the form.
        at: where each tensor lies in the shared memory.
        values: the arguments that are no tensors, in order.
        room: place and bytes for results; too few are answered with how many are wanted.
        threads: of torch.
        deterministic: 2 where torch has deterministic algorithms alone, 1 where it warns of others, else 0.
        new: the form where this call is its first.
        host: where a GPU's tensors crossed through the host's memory: the place, bytes, and whether the kernel writes
            into them.
    """

    kernel: int
    form: int
    at: tuple[int, ...]
    values: tuple[Any, ...]
    room: tuple[int, int]
    threads: int
    deterministic: int
    new: Form | None = None
    host: tuple[int, int, bool] | None = None


class Fetch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Put the results of the last call into this room."""

    room: tuple[int, int]


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Results: each the number of the tensor that it is, or its offset in the room with what it is, or none."""

    results: tuple[int | tuple[int, Dtyped] | None, ...]
    several: bool


class Wanted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The results need so many bytes of room."""

    size: int


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a kernel raised: the error's type and text, and the last lines of where.

    ``lost`` says that the GPU's context went with it: no later call can run in this process.
    """

    kind: str
    text: str
    where: str
    lost: bool = False


Request = Load | Open | Run | Fetch
Answer = Done | Wanted | Failed


def dtyped(tensor: torch.Tensor) -> Dtyped:
    """The dtype, shape and strides of a tensor."""
    return dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride()


class KnownForm(NamedTuple):
    """A form of calls that the process knows, by its number: the places of tensors and of others, and their bytes."""

    number: int
    tensors: tuple[int, ...]
    others: tuple[int, ...]
    sizes: tuple[int, ...]


Kind = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""The offset of a result, its dtype, shape and strides."""


class Known(NamedTuple):
    """What a call of a form was answered last: the bytes that results take, and what they are."""

    size: int = 0
    done: Done | None = None
    kinds: Sequence[Kind] = ()


def metadata(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """What of a tensor makes another form of calls."""
    return tensor.dtype, tensor.shape, tensor.stride()


def form_of(number: int, arguments: Sequence[object], names: tuple[str, ...], device: str) -> tuple[KnownForm, Form]:
    """A new form of calls, as this process and as the other one has it."""
    tensors = {place: each for place, each in enumerate(arguments) if isinstance(each, torch.Tensor)}
    others = tuple([place for place in range(len(arguments)) if place not in tensors])
    sizes = tuple([span(each.shape, each.stride()) * each.itemsize for each in tensors.values()])
    marks = tuple([place in tensors for place in range(len(arguments))])
    told = Form(tuple(map(dtyped, tensors.values())), marks, names, device)
    return KnownForm(number, tuple(tensors), others, sizes), told


def packed(value: object) -> object:
    """A value of facts or arguments as a message has it. Raises: TypeError for what no message has."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, frozenset):
        return {"set": [packed(each) for each in sorted(value)]}
    if isinstance(value, (tuple, list)):
        return [packed(each) for each in value]
    raise TypeError(f"wanted a number, a text, a dtype or a sequence of these, got {type(value).__name__}")


def unpacked(value: Any) -> Any:
    """The value again; sequences are tuples."""
    if isinstance(value, dict):
        return dtype_named(value["dtype"]) if "dtype" in value else frozenset(map(unpacked, value["set"]))
    return tuple(map(unpacked, value)) if isinstance(value, list) else value


def load_of(kernel: str, facts: Facts, modules: list[str]) -> Load:
    """The message that loads a kernel for facts, without a number yet."""
    tensors = {
        name: ((dtype_name(each.dtype), each.shape, each.strides), each.alignment_bytes, each.negated)
        for name, each in facts.tensors.items()
    }
    values = {name: packed(value) for name, value in facts.items()}
    here = facts.device
    return Load(0, modules, kernel, facts.operation.name, facts.layout, tensors, values, device_name(here), here.uuid)


def facts_of(load: Load, operation: Operation) -> Facts:
    """The facts again, on the device of the process that asks. Raises: RuntimeError where that is another one here."""
    tensors = {
        name: TensorFacts(shape, strides, dtype_named(dtype), alignment, negated)
        for name, ((dtype, shape, strides), alignment, negated) in load.tensors.items()
    }
    values = {name: unpacked(value) for name, value in load.values.items()}
    device = Device.detect(load.device or "cpu")
    if device.uuid != load.uuid:
        text = f"wanted {load.device} to be GPU {load.uuid}, got {device.uuid}"
        raise RuntimeError(f"{text}; set CUDA_VISIBLE_DEVICES outside the program, not in it")
    return Facts(operation, device, load.layout, tensors, values)
