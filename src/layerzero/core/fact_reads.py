"""Facts that remember what was read of them: what a kernel was made for, without a declaration.

``Kernel.load``, ``build_key``, ``prebuilt``, ``workspace_bytes`` and limits are functions of a call's facts. Two calls
that agree in all that such a function read take the same path through it and get the same answer. So calls that share
a plan agree in what was read, and may differ in the rest. That holds for what is read before these functions return:
facts that are kept and read later are closed, and say so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any, TypeVar, cast

from layerzero.core.device import Device
from layerzero.core.facts import Facts, TensorFacts, fact_name

EVERYTHING = "*"
"""What is recorded where all facts were looked at, and nothing may vary."""

NEGATED = ".negated"
"""What is recorded where the negative bit of a tensor was read, which is in no key."""

CLASS, RANK = ".class", ".ndim"
"""What follows the name of a fact of which only the class was read, and of a tensor whose number of axes was."""

Reads = frozenset[str]
"""Names of facts; ``query.shape``, ``query.strides`` and other parts of tensors; ``rows.class``; and those above."""

Answer = TypeVar("Answer")

_OF_ANY_LAYOUT = frozenset({
    *("shape", "strides", "dtype", "ndim", "alignment_bytes", "row_alignment_bytes", "expanded", "repeated"),
})  # fmt: skip
_OF_ONE_LAYOUT = frozenset({"last_stride", "contiguous"})

_Record = list[Callable[[str], None]]
"""One function, which writes down a read; once the facts are closed, another one, which raises."""


class Watched(Facts):
    """The facts of a call that record what is read of them and of their tensors.

    What :meth:`seen_in`, :meth:`with_tensors`, :meth:`of_sizes` and :meth:`on` make of them records in the same place.
    """

    __slots__ = ("_moved", "_plain", "_record", "reads")

    def __init__(self, facts: Facts, *, moved: bool = False) -> None:
        """Watch facts; ``moved`` if they are not in the kernel's layout, which conditions describe."""
        self.operation, self.device, self.layout = facts.operation, facts.device, facts.layout
        self._values, self._plain, self._moved = facts._values, facts, moved
        self.reads: set[str] = set()
        self._record: _Record = [self.reads.add]
        self.taken()

    @property
    def tensors(self) -> Mapping[str, TensorFacts]:  # type: ignore[override]  # never set
        """The tensors; what is read of them is recorded, too."""
        return _WatchedTensors(self._plain.tensors, self._record, self._moved)  # type: ignore[return-value]

    def taken(self) -> Reads:
        """What was read since the last call of this."""
        reads = frozenset(self.reads)
        self.reads.clear()
        self.class_name, self.result_bytes, self.typed, self.work = "", None, None, ()  # made of facts, which are read
        return reads

    def close(self, owner: str = "") -> Reads:
        """What was read of these facts, by ``owner``; later reads raise RuntimeError."""

        def refuse(read: str) -> None:
            raise RuntimeError(
                f"{owner}: wanted all facts to be read before it returned, got a read of {read!r} after its plan was "
                "made. Read it first and keep the value"
            )

        self._record[0] = refuse
        return frozenset(self.reads)

    def __getitem__(self, name: str) -> object:
        values = self._values
        if name not in values:
            name = fact_name(name, self.operation)
        self._record[0](name)
        return values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return Mapping.get(self, name, default)  # asks for it by name, which is recorded

    def __iter__(self) -> Iterator[str]:
        self._record[0](EVERYTHING)
        return iter(self._values)

    def __len__(self) -> int:
        self._record[0](EVERYTHING)
        return len(self._values)

    def items(self) -> ItemsView[str, object]:
        self._record[0](EVERYTHING)
        return super().items()

    def sizes(self) -> dict[str, int]:
        self._record[0](EVERYTHING)
        return super().sizes()

    def to_dict(self) -> dict[str, object]:
        self._record[0](EVERYTHING)
        return super().to_dict()

    def size(self, name: str) -> int:
        value = self[name]
        if not isinstance(value, int):
            raise KeyError(name)
        return value

    def size_bits(self, name: str) -> int:
        value = self._values.get(name)
        if type(value) is not int:
            return super().size_bits(name)
        self._record[0](name + CLASS)
        return value.bit_length()

    def size_classes(self) -> list[tuple[str, int]]:
        self._record[0](EVERYTHING + CLASS)
        return super().size_classes()

    def only_this_call(self) -> None:
        self._record[0](EVERYTHING)

    def sizeless(self) -> tuple[object, ...]:
        for name in self.operation.schema.sizeless:
            self._record[0](name)
        return super().sizeless()

    def _as(self, other: Facts, *, moved: bool = False) -> Facts:
        watched = Watched(other, moved=moved or self._moved)
        watched.reads, watched._record = self.reads, self._record
        return watched

    def seen_in(self, layout: str | None) -> Facts:
        other = self._plain.seen_in(layout)
        return self if other is self._plain else self._as(other, moved=True)

    def with_tensors(self, tensors: Mapping[str, TensorFacts]) -> Facts:
        return self._as(self._plain.with_tensors(tensors))

    def of_sizes(self, sizes: Mapping[str, int], tensors: Mapping[str, TensorFacts]) -> Facts:
        return self._as(self._plain.of_sizes(sizes, tensors))

    def on(self, device: Device, *, capturing: bool) -> Facts:
        return self._as(self._plain.on(device, capturing=capturing))

    def __reduce__(self) -> tuple[Any, ...]:
        self._record[0](EVERYTHING)  # a copy would record elsewhere
        return copy.copy, (self._plain,)


class _WatchedTensors(Mapping[str, "_WatchedTensor"]):
    """Every key holds which tensors were given; what is read of one is recorded."""

    __slots__ = ("_moved", "_plain", "_record")

    def __init__(self, tensors: Mapping[str, TensorFacts], record: _Record, moved: bool) -> None:
        self._plain, self._record, self._moved = tensors, record, moved

    def __getitem__(self, name: str) -> _WatchedTensor:
        tensor = self._plain[name]
        return tensor if isinstance(tensor, _WatchedTensor) else _WatchedTensor(name, tensor, self._record, self._moved)

    def __contains__(self, name: object) -> bool:
        return name in self._plain

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)


class _WatchedTensor:
    """The facts of one tensor; stands for a :class:`TensorFacts`."""

    __slots__ = ("_moved", "_name", "_record", "_tensor")

    def __init__(self, name: str, tensor: TensorFacts, record: _Record, moved: bool) -> None:
        self._name, self._tensor, self._record, self._moved = name, tensor, record, moved

    def __getattr__(self, part: str) -> Any:
        value = getattr(self._tensor, part)
        if part in _OF_ANY_LAYOUT or (part in _OF_ONE_LAYOUT and not self._moved):
            self._record[0](f"{self._name}.{part}")
        elif part == "negated":
            self._record[0](NEGATED)
        else:
            self._whole()
        return value

    def _whole(self) -> TensorFacts:
        """The facts themselves, all of them read; dtype and alignment are in every key."""
        for read in (f"{self._name}.shape", f"{self._name}.strides", NEGATED):
            self._record[0](read)
        return self._tensor

    def permuted(self, axes: tuple[int, ...]) -> TensorFacts:
        other = _WatchedTensor(self._name, self._tensor.permuted(axes), self._record, moved=True)
        return cast("TensorFacts", other)

    def __eq__(self, other: object) -> bool:
        return self._whole() == (other._whole() if isinstance(other, _WatchedTensor) else other)

    def __hash__(self) -> int:
        return hash(self._whole())

    def __repr__(self) -> str:
        return repr(self._whole())

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._whole(),)


def watch(
    ask: Callable[[Facts], Answer], facts: Facts, owner: str = "", *, moved: bool = False
) -> tuple[Answer, Reads]:
    """Ask ``owner``'s function of facts, and tell what it read of them; ``moved`` as for :class:`Watched`."""
    watched = Watched(facts, moved=moved)
    answer = ask(watched)
    return answer, watched.close(owner)


def reads_of(ask: Callable[[Facts], object], facts: Facts, *, moved: bool = False) -> Reads:
    """What a function of facts reads of these; EVERYTHING where it cannot be watched."""
    try:
        return watch(ask, facts, moved=moved)[1]
    except Exception:  # noqa: BLE001  # third parties write these, too
        return frozenset({EVERYTHING})


def names_no_size(reads: Reads, facts: Facts) -> bool:
    """Whether all that was read is the same in calls of one kind: see ``OperationSchema.sizeless``."""
    behind, fixed = facts.operation.behind, facts.operation.schema.sizeless
    for read in reads:
        if "." in read or read == EVERYTHING or (read in behind and read not in fixed and read != "operation"):
            return False
    return True
