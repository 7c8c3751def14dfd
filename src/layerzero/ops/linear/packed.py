"""A weight in the forms that matrix-product kernels want it in, made once and kept as long as the weight."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from layerzero.core import limits as limit
from layerzero.core.arguments import Param, Role
from layerzero.core.errors import InvalidCallError, NotPreparedError
from layerzero.core.facts import Facts
from layerzero.core.handle import FOREIGN, STALE, Handle
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import memory
from layerzero.ops.linear.glance import Glance
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Fields, WeightFormat, arguments_of, fields_of

PACKED, DENSE = "packed", "dense"
"""Kinds of a packed weight that belongs to its call; the second one's forms may be as large as a floating weight."""

ONE: Mapping[str, str] = {"packed": "weight"}
"""The packed weight of a product alone, and what it is made of."""

Pack = Callable[[Any], tuple[Any, int]]
"""Makes of a dense weight, or of a QuantizedWeight, the form that a kernel wants, and tells how many bytes it takes."""


def with_size(make: Callable[[Any], Tensor]) -> Pack:
    """What makes a form that is one tensor, with its size."""

    def pack(weight: Any) -> tuple[Tensor, int]:
        made = make(weight)
        return made, made.nbytes

    return pack


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
        """Pack the weight as it is now, and let the stream end it: another one may read the form next."""
        packed = cast(PackedWeight, handle)
        weight = packed.weight
        with torch.no_grad():
            if packed.quantized is not None:
                self._made(*self._pack(packed.quantized))
            else:
                dense = weight.detach().resolve_neg().contiguous()
                # of an axis with one element any stride counts as contiguous, and zentorch reads it
                strides = [math.prod(dense.shape[axis:]) for axis in range(1, dense.ndim + 1)]
                self._made(*self._pack(dense.as_strided(dense.shape, strides)))
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()

    def _made(self, form: Any, taken: int) -> None:
        self.form, self.bytes = form, taken
        memory.take(pytree.tree_leaves(form))


class _Refused:
    """Stands for the form that a kernel cannot make: to look at every expert again took 6 ms of each call."""

    bytes = 0

    def __init__(self, error: NotPreparedError) -> None:
        self._error = error

    @property
    def form(self) -> Any:
        raise self._error


def _packing(packed: PackedWeight, pack: Pack) -> Packing:
    try:
        return Packing(packed, pack)
    except NotPreparedError as error:
        return cast(Packing, _Refused(error))


class PackedWeight(Handle):
    """The packed forms of one weight, for every call of :func:`layerzero.linear` with that very tensor.

    Libraries compute faster on a weight whose elements lie in the order in which they read them. Making that order
    takes longer than one product, so the caller says that a weight stays, by making this once and passing it along.

        packed = lz.PackedWeight(layer.weight)
        output = lz.linear(x, layer.weight, layer.bias, packed=packed)

    Nothing is packed until a kernel that wants it is chosen, on its first call; a call that another kernel wins packs
    nothing. Each kernel that packs keeps one copy of the weight (:attr:`bytes` says how much all of them take). The
    weight itself is kept weakly: when it is gone, so is what was made of it.

    A packed weight is for the very tensor object that it was made of; a view of it is another. After the weight was
    written into it is stale, and calls with it raise until :meth:`refresh`. torch's count of writes says so, the
    address of the memory, and on a CPU its content. torch does not count writes through ``weight.data`` or a NumPy
    array, those of other libraries, nor any into a tensor of inference mode. One that changes most of the weight is
    seen at once, any other within 1024 calls: every sixteenth compares the checksum of a part. One on another device is
    not seen: call :meth:`refresh` after it. Calls that record gradients of the weight take kernels that do not pack.

    Args:
        weight: (N, K), dense: floating as for :func:`layerzero.linear`, or int8 as for
            :func:`layerzero.quantized_linear`. Or (E, N, K), floating, one for each expert, as for
            :func:`layerzero.moe_experts`. Or a :class:`layerzero.QuantizedWeight`, which has one already.
        dense: whether a form of a quantised weight may be its numbers in the dtype of the rows. A product then takes
            the time and memory of a floating weight. Without it forms take about what the weight does.
    Raises: InvalidCallError for anything else.
    """

    _weight: Callable[[], Tensor | None]

    def __init__(self, weight: Tensor | QuantizedWeight, *, dense: bool = False) -> None:
        self._others: tuple[Callable[[], Tensor | None], ...] = ()
        self._of: tuple[WeightFormat, tuple[int, ...]] | None = None
        if isinstance(weight, QuantizedWeight):
            self._of = weight.format, weight.shape
            self._others = tuple([_nothing if each is None else weakref.ref(each) for each in weight.fields[1:]])
            weight = weight.fields.data
        elif problem := _problem(weight):
            raise InvalidCallError("PackedWeight", [problem])
        super().__init__((weight,), DENSE if dense else PACKED)
        slots, glances = self._slots, list[Glance]()

        def gone(_: object) -> None:
            slots.clear()
            glances.clear()  # which keep the memory that they look into

        self._weight, self._glances = weakref.ref(weight, gone), glances
        glances.extend(self._glances_now())

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

    def __reduce__(self) -> tuple[Callable[..., PackedWeight], tuple[Tensor | QuantizedWeight]]:
        """Pickle and copy the weight; what was packed is made anew, where it is used."""
        return functools.partial(PackedWeight, dense=self.kind == DENSE), (self.quantized or self.weight,)

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
            problem = "weight: wanted the one it was made of, got one that is gone; keep it as long as its packed form"
            raise InvalidCallError("PackedWeight", [problem])
        return weight

    @property
    def is_stale(self) -> bool:
        """Whether the weight was written into or moved since; only where it lies as before is it looked into."""
        return self._versions != self._current_versions() or any(each.differs for each in self._glances)

    @property
    def is_late(self) -> bool:
        """Whether a write was seen that calls before may have missed."""
        return any(each.late for each in self._glances)

    @property
    def is_gone(self) -> bool:
        """Whether the weight that it was made of lives no more: it fits no call, then."""
        return self._weight() is None

    @property
    def bytes(self) -> int:
        """Memory that the packed forms take now, besides the weight itself."""
        return sum(cast(Packing, slot).bytes for slot in list(self._slots.values()))

    @property
    def forms(self) -> int:
        """How many packed forms there are now."""
        return len(self._slots)

    def kind_for(self, *tensors: Tensor | None) -> str:
        """``packed`` or ``dense`` for its weight; ``foreign`` for another, ``stale`` once it was written into."""
        weight = tensors[0]
        if weight is not self._weight():
            return FOREIGN
        for mine, theirs in zip(self._others, tensors[1:], strict=False):
            if mine() is not theirs:
                return FOREIGN
        return STALE if self.is_stale else self.kind

    def form(self, owner: Hashable, pack: Pack) -> Any:
        """The weight as a kernel wants it, packed on its first call.

        Raises: NotPreparedError where the kernel can make no form of it.
        """
        slot = self._slots.get(owner)
        if slot is None:
            for glance in self._glances:
                glance.sum_up()
            slot = self.slot(owner, lambda packed: _packing(packed, pack))
        return cast(Packing, slot).form

    def refresh(self) -> None:
        """Forget what was packed after the weight changed; it is packed again where it is used."""
        with self._lock:
            self._slots.clear()
            self._versions = self._current_versions()
            self._glances[:] = self._glances_now()

    def _glances_now(self) -> list[Glance]:
        """What stands in the memory of the weight and, of a quantised one, of its scales and all else it has."""
        tensors = [each() for each in (self._weight, *self._others)]
        return [] if tensors[0] is None else [Glance(each) for each in tensors if each is not None]


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


def packed_problems(arguments: Mapping[str, Any], made_of: Mapping[str, str] = ONE) -> list[str]:
    """List what is wrong with the packed weights of a call; those of a wrong type are the schema's business.

    ``made_of`` says which weight each of them belongs to.
    """
    problems = []
    for name, source in made_of.items():
        packed, weight = arguments.get(name), arguments.get(source)
        if not isinstance(packed, PackedWeight) or not isinstance(weight, Tensor):
            continue
        format_name = arguments_of(source)["format"]
        kind = packed.kind_for(*fields_of(arguments, source))
        if kind == FOREIGN or (packed.quantized is None and arguments.get(format_name) is not None):
            wanted, step = f"the PackedWeight of this very {source} tensor, got that of another", "make one of this"
            problems.append(f"{name}: wanted {wanted}; {step}")
        if kind == STALE:
            wanted, step = f"one of {source} as it is, got one made before it was written into", "call refresh()"
            problems.append(f"{name}: wanted {wanted}; {step}")
    return problems


def belongs(name: str = "packed", source: str = "weight", *, dense: bool = False) -> limit.Limit:
    """Demand the packed form of a weight; ``dense``: one that may be its numbers, as large as a floating weight."""
    made, kinds = (f"{source}, dense=True", (DENSE,)) if dense else (source, (PACKED, DENSE))
    text = f"{name}: the PackedWeight of {made}"

    def check(facts: Facts) -> Reason | None:
        got = facts[name]
        if got in kinds:
            return None
        hint = f"Pass {name}=layerzero.PackedWeight({made}), made once and kept as long as the weight"
        return Reason(ReasonCode.PACKED_WEIGHTS_REQUIRED, name, f"the PackedWeight of {made}", got, hint)

    return limit.Custom(text, check)


BELONGS = belongs()
"""What a kernel of one product demands that computes with the packed form."""

MAY_BE_DENSE = belongs(dense=True)
"""What a kernel demands whose form is the numbers of a quantised weight."""


def packed_param(name: str = "packed", source: str = "weight", *, dense: bool = False) -> Param:
    """The argument that brings the packed form of a weight; a kernel that leaves it be takes as long without."""

    def make(arguments: Mapping[str, Any], capturable: bool) -> PackedWeight | None:
        weight = arguments.get(source)
        return None if weight is None else PackedWeight(weight, dense=dense)

    return Param(name, PackedWeight, None, Role.HANDLE, made_of=(source,), make=make, works=False)
