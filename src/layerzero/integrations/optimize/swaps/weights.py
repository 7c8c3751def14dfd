"""Weights as kernels want them: packed, within a bound on memory, or several that lie in one tensor.

A weight is (N, K) as torch's Linear keeps it, or (K, N) as GPT-2's modules do. A class says it of torch's own alone. Of
another module with a weight, and perhaps a bias, a copy in float32 is compared with both products on small and large
rows: whatever else it computes, such as another activation, a clamp or quantised rows, is off there by far more than
the order of a sum.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, functional

from layerzero.core.errors import LayerZeroWarning
from layerzero.core.handle import FOREIGN, STALE
from layerzero.core.system import forking, warn
from layerzero.integrations.optimize.swaps.candidate import STRUCTURE, distance, quiet, random_rows
from layerzero.integrations.optimize.swaps.swap import FROM_MANY, State, Way, is_dense, size_of, weight_of
from layerzero.integrations.optimize.swaps.trial import told_apart
from layerzero.ops.linear.glance import LOOKS
from layerzero.ops.linear.packed import DENSE, Pack, PackedWeight, Packing
from layerzero.ops.quantize.weight import QuantizedWeight

Weight = Tensor | QuantizedWeight


class Packs(State):
    """A state with weights in the order in which kernels read them.

    Attributes:
        packed: of each weight, in the order in which the forward asks for them; all None where no kernel wants them.
        budget: what their forms may take together with those of others; None without a bound.
        late: how often a write was seen that calls before may have missed.
        dense: whether forms may be as large as a floating weight, where there is room.
        plain: of each size of :data:`~layerzero.integrations.optimize.swaps.swap.SIZES`, whether weights are read as
            they lie; empty where they nowhere are.
        by_module: whether a layer has the products called as modules, whose weights may be codes.
    """

    dense = by_module = False

    def __init__(self, weights: Iterable[Weight], covers: Iterable[tuple[str, Module]] = (), *, pack: bool) -> None:
        super().__init__(covers)
        self.packed: list[PackedWeight | None] = [
            PackedWeight(each, dense=self.dense) if pack else None for each in weights
        ]
        self.budget: Budget | None = None
        self.late = 0
        self._small, self._barred = frozenset[int](), frozenset[tuple[int, bool]]()
        self._for_one = False
        self.plain: tuple[bool, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        alive = [None if each is None else each._weight() for each in self.packed]  # which none collects meanwhile
        for each, weight in zip(self.packed, alive, strict=True):
            if each is not None and weight is None:  # exchanged since: the copy's first call makes its own, as here
                memo[id(each)] = PackedWeight(torch.empty(1, 1, device="cpu"))
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, Packs)
        if twin.budget is not None:
            twin.bound(twin.budget)
        return twin

    @property
    def bytes(self) -> int:
        return sum(0 if each is None else each.bytes for each in self.packed)

    @property
    def forms(self) -> list[int]:
        """How many forms each weight has now that may have some."""
        return [each.forms for each in self.packed if each is not None]

    @property
    def barred(self) -> int:
        """How many forms there was no room for."""
        return len(self._barred)

    def call_modules(self) -> None:
        """Have the products called as modules; nothing is packed here."""
        self.by_module, self.packed = True, [None] * len(self.packed)

    def bound(self, budget: Budget) -> None:
        """Keep no more forms than there is room for."""
        self.budget = budget
        for number, each in enumerate(self.packed):
            if each is not None and not each.is_gone:
                self.packed[number] = self._made(number, each.quantized or each.weight)

    def _made(self, number: int, weight: Weight) -> PackedWeight:
        dense = self.dense and number not in self._small
        if self.budget is None:
            return PackedWeight(weight, dense=dense)
        bar = weakref.WeakMethod(self._bar)  # a cycle would keep the forms after undo()

        def full() -> None:
            if (living := bar()) is not None:
                living(number)

        return self.budget.packed(weight, full, dense=dense)

    def _bar(self, number: int) -> None:
        """Keep no form as large as a floating weight; else read this as it lies in calls with one row, or with many."""
        packed = self.packed[number]
        if packed is not None and packed.kind == DENSE:
            self._small |= {number}
            self.packed[number] = self._made(number, packed.quantized or packed.weight)
            return
        self._barred |= {(number, self._for_one)}

    @property
    def may_pack(self) -> bool:
        """Whether kernels may want another form of a weight."""
        return any(each is not None for each in self.packed)

    def take(self, ways: Sequence[Way], many: int = FROM_MANY) -> None:
        super().take(ways, many)
        self.plain = tuple(way is Way.PLAIN for way in ways) if Way.PLAIN in ways else ()

    def forms_for(self, rows: Tensor) -> list[PackedWeight | None]:
        """Packed weights for a call with such rows: kernels for one row and for many have forms of their own."""
        if self.plain and self.plain[size_of(rows, self.many)]:
            return [None] * len(self.packed)
        if self.budget is None:
            return self.packed
        self._for_one = one = rows.numel() == rows.shape[-1]
        if not self._barred:
            return self.packed
        return [None if (number, one) in self._barred else each for number, each in enumerate(self.packed)]

    def join(self, holders: Mapping[int, int], joined: list[Joined]) -> str:  # noqa: ARG002
        """Lay weights that one product computes with one after the other; say why not, empty where nothing is to do.

        ``holders`` has how many parameters each memory holds; ``joined`` gets what was joined.
        """
        return ""

    def forget(self) -> None:
        """Let go of packed forms: each kernel that runs makes its own again, and those that were only tried do not."""
        for each in self.packed:
            if each is not None:
                each.refresh()
        self._barred = frozenset()

    def renew(self, *weights: Weight) -> bool:
        """Follow the weights after they were written into, moved or exchanged; whether there was anything to follow."""
        found = False
        for number, (packed, weight) in enumerate(zip(self.packed, weights, strict=True)):
            tensors = (weight,) if isinstance(weight, Tensor) else weight.fields
            kind = "" if packed is None else packed.kind_for(*tensors)
            if kind == FOREIGN:
                self.packed[number], found = self._made(number, weight), True
            elif kind == STALE and packed is not None:
                if packed.is_late:
                    self._tell(tensors[0])
                packed.refresh()
                found = True
        return found

    def _tell(self, weight: Tensor) -> None:
        self.late += 1
        warn(
            f"lz.optimize: a weight ({' x '.join(map(str, weight.shape))}) was written into past torch's count of "
            f"writes (by .data, NumPy or another library); up to {LOOKS} calls computed with what was packed before. "
            "It is packed anew; write within torch.no_grad() instead, or undo() the report before",
            LayerZeroWarning,
            stacklevel=2,
        )


class Budget:
    """Bytes that the packed forms of one model may take together.

    Attributes:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lock = forking.rlock()
        self._weights: weakref.WeakSet[Bounded] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> Budget:
        """The same bound for a copy's own forms."""
        return Budget(self.limit)

    @property
    def used(self) -> int:
        """Bytes of the forms that are kept now."""
        return sum(each.bytes for each in self._weights)

    def packed(self, weight: Weight, full: Callable[[], None], *, dense: bool = False) -> PackedWeight:
        """A packed weight within the bound; ``full`` is called where a form had no room."""
        made = Bounded(weight, dense=dense)
        made.budget, made.full = self, full
        with self.lock:  # another thread may sum up
            self._weights.add(made)
        return made


class Bounded(PackedWeight):
    """A packed weight that keeps a form only where there is room for it.

    The call that wanted it gets a form all the same, which is gone afterwards: it was chosen for it.
    """

    budget: Budget
    full: Callable[[], None]

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def form(self, owner: Hashable, pack: Pack) -> Any:
        """The weight as a kernel wants it, kept where there is room."""
        if owner in self._slots:
            return super().form(owner, pack)
        with self.budget.lock:
            if self.budget.used + self.weight.nbytes <= self.budget.limit:
                found = super().form(owner, pack)
                if self.budget.used <= self.budget.limit:
                    return found
                self._slots.pop(owner, None)  # the form takes more than the weight
                self.full()
                return found
            self.full()
        return Packing(self, pack).form


PACKING = frozenset({"cpu"})
"""Devices whose kernels want a weight in an order of their own; those of others read it as it lies."""


def wants_packed(weight: Tensor) -> bool:
    """Whether kernels want another form of this weight."""
    return weight.device.type in PACKING


class Joined:
    """The rows of the first, then those of the second, and so on.

    Attributes:
        weight: all in one tensor, (N_1 + N_2 + ..., K); of biases (N_1 + N_2 + ...,).
    """

    def __init__(self, *parts: Parameter) -> None:
        self.parts = parts
        with torch.no_grad():
            self.weight = torch.cat([each.detach() for each in parts])
        self._lay(torch.split(self.weight, [each.shape[0] for each in parts]))
        self._lie = tuple(map(_lies, parts))

    def _lay(self, tensors: Sequence[Tensor]) -> None:
        for each, tensor in zip(self.parts, tensors, strict=True):
            each.data = tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy's weights lie by themselves: torch copies each parameter alone."""

    def holds(self, *parts: Tensor | None) -> bool:
        """Whether these are its weights and still lie in it as they did: ``.to()`` and ``.data =`` take them apart."""
        for each, part, lies in zip(self.parts, parts, self._lie, strict=True):
            if part is not each or _lies(part) != lies:
                return False
        return True

    def part(self) -> None:
        """Give each weight memory of its own again, with the values that it has now."""
        if self.holds(*self.parts):
            self._lay([each.detach().clone() for each in self.parts])


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg()


def why_apart(parts: Sequence[Parameter], others: Mapping[int, int]) -> str:
    """Say why weights cannot lie in one tensor; ``others`` counts the tensors that each memory holds."""
    if len({(each.shape[1:], each.dtype, each.device) for each in parts}) > 1:
        return "shapes, dtypes or devices differ"
    for each in parts:
        if not each.is_contiguous() or each.untyped_storage().nbytes() != each.nbytes:
            return "one lies in a larger memory"
        if others.get(each.untyped_storage().data_ptr(), 1) > 1:
            return "one shares its memory with another parameter"
        if each.is_inference():
            return "one was made in inference mode"
    return ""


_SIZES = (1.0, 1e-3, 1e3)
"""Of the rows that a module is tried on."""

_FOUND: weakref.WeakKeyDictionary[Module, tuple[Hashable, bool | None]] = weakref.WeakKeyDictionary()
"""What was found of a module, while its code and its weight are those."""


class View:
    """A weight (K, N) as the (N, K) that products take: the same memory, and one object while it lies there.

    Packed forms belong to a tensor, so each call has to give the same one.
    """

    __slots__ = ("_lies", "_of", "_seen")

    def __init__(self, weight: Tensor) -> None:
        self._of, self._seen, self._lies = weight, weight.detach().t(), _lies(weight)

    def of(self, weight: Tensor) -> Tensor:
        """The weight as it lies now."""
        if self._of is not weight or _lies(weight) != self._lies:
            self._of, self._seen, self._lies = weight, weight.detach().t(), _lies(weight)
        return self._seen

    def __deepcopy__(self, memo: dict[int, Any]) -> View:
        """That of the copy's weight; what was packed of this view belongs to that one there."""
        twin = View(copy.deepcopy(self._of, memo))
        memo[id(self._seen)] = twin._seen
        memo[id(self)] = twin
        return twin


def is_plain(module: Module | None) -> bool:
    """Whether a module computes what ``torch.nn.Linear`` does, and nothing else."""
    return (
        isinstance(module, Linear)
        and type(module).forward is Linear.forward
        and is_dense(module._parameters.get("weight"))  # it has none where it was pruned or parametrised
        and "bias" in module._parameters
        and module.weight.ndim == 2
        and 0 not in module.weight.shape
        and (module.bias is None or _like_row(module.bias, module.weight))
    )


def _like_row(bias: Tensor, weight: Tensor) -> bool:
    """Whether a bias is one as the operations take it: torch broadcasts others, or refuses them in each call."""
    return bias.shape == weight.shape[:1] and bias.dtype is weight.dtype


def turns(module: Module) -> bool | None:
    """Whether a product's weight lies (K, N); None for what is no product of its rows with one weight."""
    if is_plain(module):
        return False
    weight = module._parameters.get("weight")
    if type(module).__module__.startswith("torch.nn.") or not may_be_product(module):
        return None
    assert weight is not None
    code = type(module).forward, weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version
    known = _FOUND.get(module)
    if known is None or known[0] != code:
        known = _FOUND[module] = code, _compared(module, weight)
    return known[1]


def may_be_product(module: Module) -> bool:
    """Whether a module has what a product with one weight has, and nothing else."""
    weight: Any = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    return (
        set(module._parameters) == {"weight", "bias"}
        and is_dense(weight)
        and weight.ndim == 2
        and weight.is_floating_point()
        and not weight.is_meta
        and 0 not in weight.shape
        and (bias is None or (is_dense(bias) and bias.ndim == 1))
        and not module._modules
        and not module._buffers
    )


def _compared(module: Module, weight: Tensor) -> bool | None:
    for turned in (False, True):
        inputs, outputs = weight.shape[:: -1 if not turned else 1]
        rows = random_rows(module, inputs, dtype=weight.dtype, device=weight.device)
        try:
            with quiet(module), told_apart(module):
                found = module(rows)
                if not isinstance(found, Tensor) or found.shape != (*rows.shape[:-1], outputs):
                    continue
                twin = copy.deepcopy(module).float()
                if all(_agrees(twin, rows.float() * size, turned=turned) for size in _SIZES):
                    return turned
        except Exception:  # noqa: BLE001, S112  # it takes no such rows: it says so in any way it likes
            continue
    return None


def _agrees(module: Module, rows: Tensor, *, turned: bool) -> bool:
    weight = weight_of(module)
    wanted = functional.linear(rows, weight.t() if turned else weight, module._parameters.get("bias"))
    return distance(module(rows), wanted) <= STRUCTURE
