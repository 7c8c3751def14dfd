"""The named values of one call: axis sizes, dtype, device, layout, strides, alignment, arguments, eager state."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Any

import msgspec
import torch

from layerzero.core.arguments import permutation
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.eager_state import state_values
from layerzero.core.errors import RegistrationError, refuse
from layerzero.core.operation import Operation

FACT_ALIASES = {
    "op": "operation",
    "sm_version": "sm",
    "requires_deterministic": "deterministic",
    "is_cuda_graph_capturing": "capturing",
}
"""The specification's names for facts, accepted wherever a fact is named; families add theirs."""


def fact_name(name: str, operation: Operation) -> str:
    """The name of a fact that may be known under another one."""
    return FACT_ALIASES.get(name) or operation.aliases.get(name, name)


class CallState(msgspec.Struct, frozen=True, gc=False):
    """Eager state outside the arguments that changes what is legal.

    Attributes:
        requires_grad: gradients are recorded and an input asks for them.
        deterministic: only deterministic kernels may run.
        capturing: a CUDA graph is being captured on the current stream.
        autocast: autocast is active (the plan switches it off around the kernel).
        read: by fact, the rest of what the function depends on (:mod:`layerzero.core.eager_state`).
    """

    requires_grad: bool = False
    deterministic: bool = False
    capturing: bool = False
    autocast: bool = False
    read: Mapping[str, object] = msgspec.field(default_factory=dict)


class TensorFacts(msgspec.Struct, frozen=True, gc=False):
    """What limits may ask about one tensor.

    Attributes:
        shape, strides: in elements, in the layout in which the kernel sees the tensor.
        dtype: element type.
        alignment_bytes: largest power of two up to 16 that divides the data address.
        negated: whether the negative bit is set (the data must be negated when read).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    alignment_bytes: int = 16
    negated: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorFacts:
        """Read a tensor. Tensors without an address (meta, fake) count as aligned."""
        return TensorFacts(tuple(tensor.shape), tensor.stride(), tensor.dtype, alignment_bytes(tensor), tensor.is_neg())

    def permuted(self, axes: tuple[int, ...]) -> TensorFacts:
        """The same memory seen with its axes in another order."""
        shape, strides = tuple(map(self.shape.__getitem__, axes)), tuple(map(self.strides.__getitem__, axes))
        return TensorFacts(shape, strides, self.dtype, self.alignment_bytes, self.negated)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def expanded(self) -> bool:
        """Whether an axis of more than one element has stride 0: all its elements are one."""
        return any(stride == 0 and size > 1 for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def repeated(self) -> tuple[bool, ...]:
        """Of each axis, whether its stride is 0, whatever its size; every key tells it."""
        return tuple([step == 0 for step in self.strides])

    @property
    def row_alignment_bytes(self) -> int:
        """Largest power of two up to 16 that divides the address and every stride but the last; of int64, up to 8.

        Strides of axes with one element count: kernels check them although they never step over them.
        """
        together = 0
        for step in self.strides[:-1]:
            together |= step
        return min(self.alignment_bytes, _lowest_bit(together * self.dtype.itemsize), told_bytes(self.dtype))

    @property
    def last_stride(self) -> int:
        """Stride of the last axis; 1 where it has at most one element, since it is never stepped over."""
        return self.strides[-1] if self.shape and self.shape[-1] > 1 else 1

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps; axes of size 1 do not count."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size == 1:
                continue
            if stride != expected and size != 0:
                return False
            expected *= size
        return True


BYTES = torch.uint8
"""The dtype of a call without tensors: what it reads and writes is text, in bytes."""

MAX_ALIGNMENT_BYTES = 16
"""Alignment beyond a vector load of 16 bytes is not distinguished: it would split the plan cache for no kernel's
good."""


def told_bytes(dtype: torch.dtype) -> int:
    """Up to which alignment rows are distinguished: int64 holds places and counts, which are read one by one.

    A row of positions would be of another class with every second number of tokens.
    """
    return dtype.itemsize if dtype is torch.int64 else MAX_ALIGNMENT_BYTES


def alignment_bytes(tensor: torch.Tensor) -> int:
    """Largest power of two up to 16 that divides the address of the first element."""
    if tensor.is_meta or tensor.numel() == 0:
        return MAX_ALIGNMENT_BYTES
    if type(tensor) is not torch.Tensor and hasattr(tensor, "fake_mode"):  # torch 2.13 warns where its address is read
        return MAX_ALIGNMENT_BYTES
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # other tensors without memory; the call that runs later has its own facts
        return MAX_ALIGNMENT_BYTES
    return min(address & -address or MAX_ALIGNMENT_BYTES, MAX_ALIGNMENT_BYTES)


def _lowest_bit(number: int) -> int:
    """Largest power of two up to 16 that divides a number; 16 for 0."""
    return min(number & -number, MAX_ALIGNMENT_BYTES) if number else MAX_ALIGNMENT_BYTES


class Facts(Mapping[str, object]):
    """The facts of one call as limits and rules see them; ``facts["head_dim"]``, ``facts["sm"]``.

    Attributes:
        operation: the routed operation.
        device: the device it runs on.
        layout: layout of the tensors that have one, as the caller sees it.
        tensors: facts of each tensor that the call brought. The tensors themselves are not kept: plans live long.
        class_name: the name of its class, empty until it is needed.
        result_bytes: how large its results are, None until it is needed.
        typed: its shapes as a command takes them, empty where none would make such a call; None until they are needed.
        work: what changes how long it takes (:func:`layerzero.core.evidence.call_work`), empty until it is needed.
    """

    __slots__ = (
        *("_in_layouts", "_values", "class_name", "device", "layout", "operation", "result_bytes", "tensors", "typed"),
        "work",
    )

    def __init__(
        self,
        operation: Operation,
        device: Device,
        layout: str | None,
        tensors: Mapping[str, TensorFacts],
        values: Mapping[str, object],
    ) -> None:
        self.operation = operation
        self.device = device
        self.layout = layout
        self.tensors = tensors
        self._values = values
        self._in_layouts: dict[str, Facts] = {}
        self.class_name = ""
        self.result_bytes: int | None = None
        self.typed: str | None = None
        self.work: tuple[tuple[str, str], ...] = ()

    def __getitem__(self, name: str) -> object:
        try:
            return self._values[name]
        except KeyError:
            return self._values[fact_name(name, self.operation)]

    def get(self, name: str, default: Any = None) -> Any:
        """A fact, or something else where the call has none of that name."""
        values = self._values
        if name in values:
            return values[name]
        return values.get(fact_name(name, self.operation), default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[str, object]:
        """Names and values, without asking for each by name."""
        return self._values.items()

    def sizeless(self) -> tuple[object, ...]:
        """The values of ``OperationSchema.sizeless``: what calls that differ in sizes only have in common."""
        return tuple(map(self._values.__getitem__, self.operation.schema.sizeless))

    @property
    def empty(self) -> bool:
        """Whether a tensor has no elements: the reference runs where a kernel takes none."""
        return any(0 in tensor.shape for tensor in self.tensors.values())

    def size(self, name: str) -> int:
        """An axis size or derived size; raises KeyError where the operation has no such axis."""
        value = self._values.get(name)
        if type(value) is int:
            return value
        value = self[name]
        if not isinstance(value, int):
            raise KeyError(name)
        return value

    def size_bits(self, name: str) -> int:
        """Bit length of a size: all that calls of one class have in common. Raises: as :meth:`size`."""
        return self.size(name).bit_length()

    def size_classes(self) -> list[tuple[str, int]]:
        """Name and bit length of all sizes, derived ones too: the class of a call."""
        arguments = self.operation.schema.known
        values = self._values.items()
        sizes = {name: value for name, value in values if type(value) is int and name not in arguments}
        return list(zip(sizes, map(int.bit_length, sizes.values()), strict=True))

    def only_this_call(self) -> None:
        """Say that what is made of these facts serves this very call, as where a callable remembers its first one.

        ``Kernel.load`` has to say so of whatever its callable depends on without having read it here.
        """

    def seen_in(self, layout: str | None) -> Facts:
        """The same call as a kernel with another layout sees it, before any data is moved; a miss asks four times."""
        if layout is None or self.layout is None or layout == self.layout:
            return self
        seen = self._in_layouts.get(layout)
        if seen is None:
            tensors = dict(self.tensors)
            for schema in self.operation.schema.inputs:
                fact = tensors.get(schema.name)
                if schema.has_layout and fact is not None:
                    tensors[schema.name] = fact.permuted(permutation(self.layout, layout, len(fact.shape)))
            seen = self._in_layouts[layout] = Facts(self.operation, self.device, layout, tensors, self._values)
        return seen

    def with_tensors(self, tensors: Mapping[str, TensorFacts]) -> Facts:
        """The same call with other memory, as after a copy; its tensors keep their order, which limits may read."""
        tensors = {name: tensors[name] for name in self.tensors if name in tensors}
        return Facts(self.operation, self.device, self.layout, tensors, self._values)

    def of_sizes(self, sizes: Mapping[str, int], tensors: Mapping[str, TensorFacts]) -> Facts:
        """A call of other sizes that is the same in everything else."""
        return Facts(self.operation, self.device, self.layout, dict(tensors), {**self._values, **sizes})

    def on(self, device: Device, *, capturing: bool) -> Facts:
        """The same call on another device, or inside a CUDA graph capture."""
        changed = {"platform": device.platform, "sm": device.sm_number, "capturing": capturing}
        return Facts(self.operation, device, self.layout, self.tensors, {**self._values, **changed})

    def sizes(self) -> dict[str, int]:
        """Axis sizes and derived sizes only: what the amount of work depends on."""
        arguments = self.operation.schema.known
        return {name: value for name, value in self._values.items() if type(value) is int and name not in arguments}

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON and reports."""
        values = {name: plain(value) for name, value in self._values.items()}
        return values | {"layout": self.layout, "device_name": self.device.name}


_PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})
_BARE: Any = ((str, str.__str__), (int, int.__int__), (float, float.__float__))


def plain(value: object) -> object:
    """A fact as JSON has it."""
    if type(value) in _PLAIN_TYPES or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else str(value)


class FactsBuilder:
    """Build the facts of a call to one operation; validate first.

    Facts that only one operation has are declared with ``Operation.derive``.
    """

    def __init__(self, operation: Operation) -> None:
        """Raises: TypeError for anything else, such as a schema, which does not know its facts."""
        if not hasattr(operation, "schema"):
            got = type(operation).__name__
            raise TypeError(f"FactsBuilder: wanted an operation, as lz.list_operations() gives them, got {got}")
        self.operation = operation

    def build(
        self,
        *args: Any,
        device: Device | None = None,
        layout: str | None = None,
        state: CallState | None = None,
        **kwargs: Any,
    ) -> Facts:
        """Validate the arguments against the schema and name everything about them.

        ``device`` replaces the device that the first tensor lies on (to ask about a machine that is not here).
        Raises: InvalidCallError with every problem of the call.
        """
        schema = self.operation.schema
        refuse(schema.operation, schema.validate(*args, layout=layout, **kwargs))
        names = [tensor.name for tensor in schema.inputs]
        arguments = dict(schema.neutral) | dict(zip(names, args, strict=False)) | kwargs
        return self.of_valid(arguments, device=device, layout=layout, state=state)

    def of_valid(
        self,
        arguments: Mapping[str, Any],
        *,
        device: Device | None = None,
        layout: str | None = None,
        state: CallState | None = None,
    ) -> Facts:
        """Name everything about arguments that were validated before."""
        schema = self.operation.schema
        if self.operation.layouts and layout is None:
            layout = self.operation.layouts[0]
        tensors: dict[str, TensorFacts] = {}
        values: dict[str, object] = {"operation": schema.operation}
        first: torch.Tensor | None = None
        for tensor_schema, axes in schema.axes_in(layout):
            name = tensor_schema.name
            value = arguments.get(name)
            if value is None:
                values[name] = "none"
                continue
            first = value if first is None else first
            facts = tensors[name] = TensorFacts.of(value)
            if not tensor_schema.required:
                values[name] = "bool" if facts.dtype is torch.bool else "given"
                if facts.dtype.is_floating_point:
                    values[name] = "float"
            named = axes[1:] if axes and axes[0] == "..." else axes
            values.update(zip(named, facts.shape[len(facts.shape) - len(named) :], strict=True))
        for name in schema.chosen:
            value = arguments[name] if name in arguments else schema.neutral.get(name)
            if type(value) is int and schema.param(name).kinds == (float,):
                value = float(value)  # calls with 7 and 7.0 are equal, and share a plan: it holds one of them
            elif type(value) not in _PLAIN_TYPES:  # an enumeration's words: plans write values as source code
                value = next((bare(value) for kind, bare in _BARE if isinstance(value, kind)), value)
            values[name] = value
        for name in schema.scalars:
            values[name] = "none" if arguments.get(name) is None else "given"
        for name in schema.bounds:
            bound = arguments.get(name)
            values[name] = None if bound is None else 1 << (bound - 1).bit_length()
        for name in schema.handles:
            values[name] = schema.param(name).kind_of(arguments.get(name), arguments)
        device = device or Device.detect("cpu" if first is None else first.device)
        leading = tensors.get(schema.dtype_tensor.name) if schema.inputs else None
        lead = first if leading is None else leading
        values |= {"dtype": BYTES if lead is None else lead.dtype, "platform": device.platform, "sm": device.sm_number}
        state = state or CallState()
        values |= {"requires_grad": state.requires_grad, "deterministic": state.deterministic}
        values |= {"capturing": state.capturing, "autocast": state.autocast}
        values |= state_values(state.read, values["dtype"])
        if self.operation.derive is not None:
            derived = self.operation.derive(arguments, values)  # type: ignore[arg-type]  # it reads sizes of these
            if not derived.keys() <= self.operation.behind.keys():  # it decides which calls share a plan
                raise _undeclared(self.operation, derived)
            values |= derived
        return Facts(self.operation, device, layout, tensors, values)


def _undeclared(operation: Operation, derived: Mapping[str, object]) -> RegistrationError:
    names = sorted(derived.keys() - operation.behind.keys())
    return RegistrationError(
        f"{operation.name}: derive gives {', '.join(names)}; wanted only what `derived` names, got it from none. "
        "Name it there, and in `derived_from` the axes that it follows from"
    )
