"""A weight in the forms that matrix-product kernels want it in, made once and kept as long as the weight.

``weight.data += delta`` writes into a weight and counts for nothing: adapters are merged so (peft), and a form that was
packed before would go on giving what the weight gave then. Each look compares a few words of the memory: a write that
changes most of a weight is seen at once. Of what has a form, every :data:`EVERY`-th look compares the checksum of one
part in turn, too, so that any write is seen within :data:`LOOKS` looks. That reads a 1024th of the weight a look.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import weakref
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from layerzero.core import limits as limit
from layerzero.core.arguments import Param, Role
from layerzero.core.errors import InvalidCallError
from layerzero.core.facts import Facts
from layerzero.core.handle import FOREIGN, STALE, Handle
from layerzero.core.indices import IN_C
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import ARGUMENTS, Fields, WeightFormat

WORDS = 8
"""Of eight bytes each: 32 elements of bfloat16."""

EVERY = 16
"""Looks of which one compares a part."""

PARTS, LEAST_BYTES = 64, 4096
"""Parts of a weight at most, and how large one is at least."""

LOOKS = EVERY * PARTS
"""After so many looks, every write was seen."""

_WORD = 8
_GOLDEN = 0.6180339887498949
"""Multiples of it lie spread between 0 and 1 however many there are, and on no power of 2."""

_PLAIN = frozenset({Tensor, Parameter})


class Glance:
    """What stood in a weight's memory when this was made.

    It keeps that memory: where a weight's was exchanged (``weight.data = other``), the old one is free after the next
    look. Memory that was given back below a weight (``untyped_storage().resize_(0)``) is not looked into.

    Attributes:
        late: whether a part differed, where the words that each look compares did not: calls before may have missed it.
    """

    __slots__ = ("_at", "_bytes", "_left", "_memory", "_part", "_places", "_stands", "_storage", "_sums", "late")

    def __init__(self, weight: Tensor) -> None:
        self.late = False
        self._memory: Any = None
        self._sums: list[int] = []
        words = _words_of(weight)
        if words < WORDS:
            return
        storage = weight.untyped_storage()
        offset = int(weight.storage_offset()) * weight.element_size()
        self._storage, self._at, self._bytes = storage, storage.data_ptr(), storage.nbytes()
        if offset + words * _WORD > self._bytes:  # it was exchanged in between
            return
        self._memory = (ctypes.c_uint64 * words).from_address(self._at + offset)
        self._places = [int(words * (number * _GOLDEN % 1.0)) for number in range(1, WORDS + 1)]
        self._stands = _stands(self._memory, self._places)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy's weight lies elsewhere: its glance is taken anew."""

    @property
    def differs(self) -> bool:
        """Whether something else stands there now; never where memory cannot be looked into."""
        if not self._is_there():
            return False
        return not self._stands() or (bool(self._sums) and self._part_differs())

    def _is_there(self) -> bool:
        if self._memory is None:
            return False
        return bool(self._storage.data_ptr() == self._at and self._storage.nbytes() == self._bytes)

    def sum_up(self) -> None:
        """Note the checksums of all parts, once something was made of the weight."""
        if self._sums or not self._is_there():
            return
        size = ctypes.sizeof(self._memory)
        self._part = max(LEAST_BYTES, -(-size // PARTS))
        self._left = EVERY * -(-size // self._part)
        self._sums = [self._sum(start) for start in range(0, size, self._part)]

    def _sum(self, start: int) -> int:
        size = min(self._part, ctypes.sizeof(self._memory) - start)
        address = ctypes.addressof(self._memory) + start
        in_c = IN_C.get("checksum")
        found: int = in_c(address, size) if in_c else zlib.crc32((ctypes.c_char * size).from_address(address))
        return found

    def _part_differs(self) -> bool:
        self._left = left = (self._left or EVERY * len(self._sums)) - 1
        if not self.late and left % EVERY == 0:
            number = left // EVERY
            self.late = self._sum(number * self._part) != self._sums[number]
        return self.late


class Glances:
    """What stood in the memory of all weights of a model, compared in one go: in C in a quarter of the time.

    The caller sees first that each weight is where it was. So many parts are compared at each look that any write is
    seen within :data:`LOOKS`.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._each = [each for each in map(Glance, weights) if each._is_there()]
        for each in self._each:
            each.sum_up()
        self._parts = [
            (each, start, total)
            for each in self._each
            for start, total in zip(range(0, ctypes.sizeof(each._memory), each._part), each._sums, strict=True)
        ]
        self._some, self._next, self._late = -(-len(self._parts) // LOOKS), 0, False
        words = {
            ctypes.addressof(each._memory) + _WORD * at: each._memory[at] for each in self._each for at in each._places
        }
        in_c, self._stands = IN_C.get("stands"), None
        if in_c is not None and not any(each % _WORD for each in words):
            places = array("q", [each // _WORD for each in words])
            self._stands = functools.partial(in_c, 0, places.tobytes(), array("Q", words.values()).tobytes())

    @property
    def differ(self) -> bool:
        """Whether something else stands anywhere now."""
        if self._late or not (self._stands() if self._stands else all(each._stands() for each in self._each)):
            return True
        first, self._next = self._next, self._next + self._some
        looked_at = self._parts[first : self._next]
        if self._next >= len(self._parts):
            self._next = 0
        self._late = any(each._sum(start) != total for each, start, total in looked_at)
        return self._late


def _stands(memory: Any, places: list[int]) -> Callable[[], bool]:
    """Whether some words of memory are still those of now: in C in a fifth of the time."""
    pick: Callable[[Any], tuple[int, ...]] = itemgetter(*places)
    found, in_c = pick(memory), IN_C.get("stands")
    if in_c is None:
        return lambda: pick(memory) == found
    return functools.partial(in_c, ctypes.addressof(memory), array("q", places).tobytes(), array("Q", found).tobytes())


def _words_of(weight: Tensor) -> int:
    """How many words of memory are the weight's alone and may be read; 0 where a host cannot read them."""
    if type(weight) not in _PLAIN or weight.device.type != "cpu" or weight.layout is not torch.strided:
        return 0
    return weight.nbytes // _WORD if torch.ops.aten.is_non_overlapping_and_dense.default(weight) else 0


PACKED = "packed"
"""The kind of a packed weight that belongs to its call."""

ONE: Mapping[str, str] = {"packed": "weight"}
"""The packed weight of a product alone, and what it is made of."""

Pack = Callable[[Any], tuple[Any, int]]
"""Makes of a dense weight, or of a QuantizedWeight, the form that a kernel wants, and tells how many bytes it takes."""


class Packing:
    """The form of a weight that one kernel keeps.

    Attributes:
        form: what the kernel gets.
        bytes: the memory that it takes.
    """

    __slots__ = ("_pack", "bytes", "form")

    def __init__(self, packed: PackedWeight, pack: Pack) -> None:
        self._pack = pack
        self.form: Any = None
        self.bytes = 0
        self.update(packed)

    def update(self, handle: Handle) -> None:
        """Pack the weight as it is now."""
        packed = cast(PackedWeight, handle)
        weight = packed.weight
        with torch.no_grad():
            if packed.quantized is not None:
                self.form, self.bytes = self._pack(packed.quantized)
                return
            dense = weight.detach().resolve_neg().contiguous()
            # of an axis with one element any stride counts as contiguous, and zentorch reads it
            strides = [math.prod(dense.shape[axis:]) for axis in range(1, dense.ndim + 1)]
            self.form, self.bytes = self._pack(dense.as_strided(dense.shape, strides))


class PackedWeight(Handle):
    """The packed forms of one weight, for every call of :func:`layerzero.linear` with that very tensor.

    Libraries compute faster on a weight whose elements lie in the order in which they read them. Making that order
    takes longer than one product, so the caller says that a weight stays, by making this once and passing it along.

        packed = lz.PackedWeight(layer.weight) output = lz.linear(x, layer.weight, layer.bias, packed=packed)

    Nothing is packed until a kernel that wants it is chosen, on its first call; a call that another kernel wins packs
    nothing. Each kernel that packs keeps one copy of the weight (:attr:`bytes` says how much all of them take). The
    weight itself is kept weakly: when it is gone, so is what was made of it.

    A packed weight is for the very tensor object that it was made of; a view of it is another. After the weight was
    written into it is stale, and calls with it raise until :meth:`refresh`. torch's count of writes tells, the address
    of the memory, and on a CPU what stands there: torch does not count writes through ``weight.data`` or a NumPy array,
    those of other libraries, nor any into a tensor that was made in inference mode. One that changes most of the weight
    is seen at once, any other within 1024 calls: every sixteenth compares the checksum of a part. One on another device
    is not seen: call :meth:`refresh` after it. Calls that record gradients of the weight take kernels that do not pack.

    Args:
        weight: (N, K), dense, floating as for :func:`layerzero.linear`, or int8 as for
            :func:`layerzero.quantized_linear`; or (E, N, K), floating, one for each expert, as for
            :func:`layerzero.moe_experts`; or a :class:`layerzero.QuantizedWeight`, which has one already.
    Raises: InvalidCallError for anything else.
    """

    _weight: Callable[[], Tensor | None]

    def __init__(self, weight: Tensor | QuantizedWeight) -> None:
        self._others: tuple[Callable[[], Tensor | None], ...] = ()
        self._of: tuple[WeightFormat, tuple[int, int]] | None = None
        if isinstance(weight, QuantizedWeight):
            self._of = weight.format, weight.shape
            self._others = tuple([_nothing if each is None else weakref.ref(each) for each in weight.fields[1:]])
            weight = weight.fields.data
        elif problem := _problem(weight):
            raise InvalidCallError("PackedWeight", [problem])
        super().__init__((weight,), PACKED)
        slots = self._slots
        self._weight = weakref.ref(weight, lambda _: slots.clear())
        self._glance: Glance | None = Glance(weight)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        weight = self._weight()
        return () if weight is None else (weight,)

    @_tensors.setter
    def _tensors(self, tensors: tuple[Tensor, ...]) -> None:
        self._weight = weakref.ref(tensors[0])

    def _current_versions(self) -> tuple[int, ...]:
        weight = self._weight()
        if weight is None:
            return ()
        if not self._others:
            return _state_of(weight)
        others = [_state_of(each) for other in self._others if (each := other()) is not None]
        return tuple(itertools.chain(_state_of(weight), *others))

    def __repr__(self) -> str:
        weight = self._weight()
        of = "a weight that is gone" if weight is None else f"{tuple(weight.shape)}"
        return f"PackedWeight({of}, {len(self._slots)} packed, {self.bytes} bytes)"

    def __reduce__(self) -> tuple[type[PackedWeight], tuple[Tensor | QuantizedWeight]]:
        """Pickle and copy the weight; what was packed is made anew, where it is used."""
        return PackedWeight, (self.quantized or self.weight,)

    @property
    def quantized(self) -> QuantizedWeight | None:
        """The quantised weight that it was made of; None of a dense one. Raises: as :attr:`weight`."""
        if self._of is None:
            return None
        return QuantizedWeight.unchecked(*self._of, Fields(self.weight, *[each() for each in self._others]))

    @property
    def weight(self) -> Tensor:
        """The weight that it was made of. Raises: InvalidCallError when that is gone."""
        weight = self._weight()
        if weight is None:
            raise InvalidCallError("PackedWeight", ["weight: wanted the one it was made of, got one that is gone"])
        return weight

    @property
    def is_stale(self) -> bool:
        """Whether the weight was written into or moved since; only where it lies as before is it looked into."""
        glance = self._glance  # once: another thread may make another
        return self._versions != self._current_versions() or (glance is not None and glance.differs)

    @property
    def is_late(self) -> bool:
        """Whether a write was seen that calls before may have missed."""
        glance = self._glance
        return glance is not None and glance.late

    @property
    def is_gone(self) -> bool:
        """Whether the weight that it was made of lives no more: it fits no call, then."""
        return self._weight() is None

    @property
    def bytes(self) -> int:
        """Memory that the packed forms take now, besides the weight itself."""
        return sum(cast(Packing, slot).bytes for slot in tuple(self._slots.values()))

    @property
    def forms(self) -> int:
        """How many packed forms there are now."""
        return len(self._slots)

    def kind_for(self, *tensors: Tensor | None) -> str:
        """``packed`` for its weight; ``foreign`` for another, ``stale`` once it was written into."""
        weight = tensors[0]
        if weight is not self._weight():
            return FOREIGN
        for mine, theirs in zip(self._others, tensors[1:], strict=False):
            if mine() is not theirs:
                return FOREIGN
        return STALE if self.is_stale else PACKED

    def form(self, owner: Hashable, pack: Pack) -> Any:
        """The weight as a kernel wants it, packed on its first call."""
        slot = self._slots.get(owner)
        if slot is None:
            if (glance := self._glance) is not None:
                glance.sum_up()
            slot = self.slot(owner, lambda packed: Packing(packed, pack))
        return cast(Packing, slot).form

    def refresh(self) -> None:
        """Forget what was packed after the weight changed; it is packed again where it is used."""
        with self._lock:
            self._slots.clear()
            self._versions = self._current_versions()
            weight = self._weight()
            self._glance = None if weight is None else Glance(weight)


def _nothing() -> None:
    """Stands for a tensor that a format has not."""


def _state_of(weight: Tensor) -> tuple[int, ...]:
    """How often torch wrote into it, and how it lies where: ``weight.data = other`` counts as no write."""
    version = 0 if weight.is_inference() else weight._version
    return version, weight.data_ptr(), *weight.shape, *weight.stride()


def _problem(weight: object) -> str:
    wanted = (
        "weight: wanted a dense floating or int8 tensor (out_features, in_features), or a floating one of 3 or 4 axes"
    )
    if not isinstance(weight, Tensor):
        return f"{wanted}, got {type(weight).__name__}"
    if weight.is_nested or weight.layout is not torch.strided:
        return f"{wanted}, got a {'nested' if weight.is_nested else str(weight.layout).removeprefix('torch.')} one"
    whole = weight.ndim == 2 and weight.dtype is torch.int8
    if not whole and (weight.ndim not in (2, 3, 4) or not weight.is_floating_point()):
        return f"{wanted}, got {str(weight.dtype).removeprefix('torch.')} {tuple(weight.shape)}"
    return ""


_BESIDE = tuple(ARGUMENTS.values())[1:]
"""The other tensors of a quantised weight, by their names in a call."""


def packed_problems(arguments: Mapping[str, Any], made_of: Mapping[str, str] = ONE) -> list[str]:
    """List what is wrong with the packed weights of a call; those of a wrong type are the schema's business.

    ``made_of`` says which weight each of them belongs to.
    """
    problems = []
    for name, source in made_of.items():
        packed, weight = arguments.get(name), arguments.get(source)
        if not isinstance(packed, PackedWeight) or not isinstance(weight, Tensor):
            continue
        kind = packed.kind_for(weight, *[arguments.get(each) for each in _BESIDE])
        if kind == FOREIGN or (packed.quantized is None and arguments.get("weight_format") is not None):
            wanted, step = f"the PackedWeight of this very {source} tensor, got that of another", "make one of this"
            problems.append(f"{name}: wanted {wanted}; {step}")
        if kind == STALE:
            wanted, step = f"one of {source} as it is, got one made before it was written into", "call refresh()"
            problems.append(f"{name}: wanted {wanted}; {step}")
    return problems


def belongs(name: str = "packed", source: str = "weight") -> limit.Limit:
    """Demand the packed form of a weight; for kernels that compute with it."""
    text = f"{name}: the PackedWeight of {source}"

    def check(facts: Facts) -> Reason | None:
        got = facts[name]
        if got == PACKED:
            return None
        hint = f"Pass {name}=layerzero.PackedWeight({source}), made once and kept as long as the weight"
        return Reason(ReasonCode.CONSTRAINT_FAILED, name, f"the PackedWeight of {source}", got, hint)

    return limit.Custom(text, check)


BELONGS = belongs()
"""What a kernel of one product demands that computes with the packed form."""


def packed_param(name: str = "packed", source: str = "weight") -> Param:
    """The argument that brings the packed form of a weight; a kernel that leaves it be takes as long without."""

    def make(arguments: Mapping[str, Any], capturable: bool) -> PackedWeight | None:
        weight = arguments.get(source)
        return None if weight is None else PackedWeight(weight)

    return Param(name, PackedWeight, None, Role.HANDLE, made_of=(source,), make=make, works=False)
