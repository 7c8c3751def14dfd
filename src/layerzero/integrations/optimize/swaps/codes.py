"""A product whose weight is codes and scales: what its new forward keeps, and how it follows the module."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize.swaps.swap import ABSENT, MARK, State, as_forward, by_name, serves, size_of
from layerzero.integrations.optimize.swaps.weights import Packs, wants_packed
from layerzero.ops.linear.packed import PACKED, PackedWeight
from layerzero.ops.quantize.conversion import usual
from layerzero.ops.quantize.weight_format import ARGUMENTS

Weight = tuple[Tensor, Tensor] | lz.QuantizedWeight
"""Codes of int8 and their scales, one number or one for each output; or a weight as a file has it."""

_BESIDE = ("weight_format", *tuple(ARGUMENTS.values())[2:])

Place = tuple[str, str, str]
"""Where a module keeps a tensor: the dict of its own, the name there, and the attribute within a tensor subclass."""


class CodedProduct(Packs):
    """A quantised weight, and how rows are quantised before the product.

    Attributes:
        weight: int8 codes (N, K), or a weight as a file has it; exchanged together with the rest.
        pair: the first two arguments of a call behind the rows; of int8 the codes and float32 scales, of GGUF none.
        named: what a call brings by name.
        most: calls with more rows run the module's own code, which is faster there; None for any number.
        activations: None for rows as they are, ``"int8"`` for a scale of its own for each row.
    """

    dense = True
    most: int | None = None

    def __init__(self, of: Weight, activations: str | None = None) -> None:
        self.activations = activations
        self._set(of)
        super().__init__((self.weight,), pack=isinstance(self.weight, lz.QuantizedWeight) or wants_packed(self.pair[0]))

    def _set(self, of: Weight) -> None:
        self.weight: Tensor | lz.QuantizedWeight
        self.pair: tuple[Tensor, Tensor | None]
        if isinstance(of, lz.QuantizedWeight):
            data, scale, *others = of.fields
            self.weight, self.pair = of, (data, scale)
            texts: tuple[Any, ...] = () if of.is_by_row else (str(of.format), *others)
            self.named: dict[str, Any] = dict(zip(_BESIDE, texts, strict=False))
        else:
            codes, scale = of
            self.weight, self.pair = codes, (codes, scale.detach().to(torch.float32))
            self.named = {}
        self.named["activations"] = self.activations

    def exchange(self, of: Weight) -> None:
        """Compute with another weight from now on."""
        self._set(of)
        self.renew(self.weight)

    def leaves(self, input: Tensor) -> bool:
        """Whether the module's own code is faster for so many rows."""
        if self.own_at and self.own_at[size_of(input, self.many)]:
            return True
        return self.most is not None and input.numel() > self.most * input.shape[-1]

    @property
    def kind(self) -> str:
        """What the weight is made of, for people."""
        if isinstance(self.weight, Tensor):
            return "int8"
        of = self.weight.format
        return f"int{of.bits}" if of.bits else of.scheme

    @property
    def code_bytes(self) -> int:
        """What the codes, scales and zero points take."""
        held = (*self.pair, *self.named.values())
        return sum(each.nbytes for each in held if isinstance(each, Tensor))

    def read(self, module: Module) -> tuple[Tensor, ...] | None:
        """The tensors that a call is computed from; None where they are gone."""
        raise NotImplementedError

    def follow(self, read: tuple[Tensor, ...]) -> bool:
        """Take what was read where it is no longer what it was; whether it still is codes and scales."""
        raise NotImplementedError


class Held(CodedProduct):
    """Those that a module of another library has: read where they lie.

    Attributes:
        columns: of the weight.
    """

    def __init__(
        self,
        module: Module,
        tensors: Callable[[Module], tuple[Tensor | None, ...]],
        make: Callable[..., Weight],
        activations: str | None = None,
    ) -> None:
        self._tensors, self._make = tensors, functools.partial(make, module)
        self._read: tuple[Tensor | None, ...] = tensors(module)
        self._versions = _versions(self._read)
        made = make(module, *self._read)
        self.columns = (made if isinstance(made, lz.QuantizedWeight) else made[0]).shape[1]
        super().__init__(made, activations)

    def read(self, module: Module) -> tuple[Tensor, ...] | None:
        read = self._tensors(module)
        return None if read[0] is None else read  # type: ignore[return-value]  # what it has not is None

    def follow(self, read: tuple[Tensor, ...]) -> bool:
        versions = _versions(read)  # before the numbers are read: what is written meanwhile counts at the next call
        if versions == self._versions and all(map(_lies_as, read, self._read)):
            return True
        try:
            self.exchange(self._make(*read))
        except InvalidCallError:  # no such weight any more: the module's own code says what is wrong
            return False
        self._read, self._versions = read, versions
        return True


def _versions(read: tuple[Tensor | None, ...]) -> list[int]:
    return [0 if each is None else version(each) for each in read]


def _lies_as(now: Tensor | None, was: Tensor | None) -> bool:
    """Whether two tensors are one, or of one memory: a parameter of a class of its own is read through new ones."""
    if now is was or now is None or was is None:
        return now is was
    return now.data_ptr() == was.data_ptr() and now.shape == was.shape and now.stride() == was.stride()


def version(tensor: Tensor) -> int:
    """How often torch wrote into it; 0 for tensors of inference mode, which count nothing."""
    return 0 if tensor.is_inference() else tensor._version


def at(module: Module, place: Place) -> Tensor | None:
    """The tensor at a place; None where there is none any more."""
    held, name, inner = place
    found = getattr(module, held).get(name)
    return getattr(found, inner, None) if inner else found


class Requested:
    """A state whose weights were quantised on request.

    Attributes:
        loss: how far a result was from the module's own, relative to its size.
        own_bytes: what the weights take that the codes were made of.
        instead_of: the format that was requested, or that the model holds, where no fast kernel takes that.
        lost: what to say of a pickle, which has none of it.
    """

    loss = 0.0
    own_bytes = 0
    instead_of = ""
    lost = (
        "lz.optimize: a pickle of the model has its own weights and code, not those that were quantised on request; "
        "call lz.optimize where it is loaded"
    )

    @property
    def kind(self) -> str:
        """What to, for people."""
        raise NotImplementedError

    @property
    def code_bytes(self) -> int:
        """What codes, scales and zero points take."""
        raise NotImplementedError


class Made(CodedProduct, Requested):
    """Those that were made of a module's weight on demand, and are made anew after that was written into.

    Attributes:
        turned: whether that is (K, N), as Conv1D of Transformers has it.
        of: what it is quantised to: ``int8`` or ``fp8`` with a scale for each row, ``int4:32`` with one for 32 columns.
    """

    dense = False  # the module's own weight is one

    def __init__(
        self, weight: Tensor, of: str = "int8", activations: str | None = None, *, turned: bool = False
    ) -> None:
        self.turned, self.of = turned, of
        super().__init__(self._quantised(weight), activations)
        self._source: PackedWeight | None = PackedWeight(weight)
        self.own_bytes = weight.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        memo[id(self._source)] = None  # a copy has a weight of its own, which its first call looks at
        return super().__deepcopy__(memo)

    @property
    def bytes(self) -> int:
        return super().bytes + self.code_bytes

    def read(self, module: Module) -> tuple[Tensor, ...] | None:
        weight = module._parameters.get("weight")
        if weight is None or not weight.is_floating_point() or weight.is_meta:
            return None
        return None if weight.is_neg() or weight.dtype.itemsize == 1 else (weight,)

    def follow(self, read: tuple[Tensor, ...]) -> bool:
        (weight,), source = read, self._source
        if source is None or source.kind_for(weight) != PACKED:
            noted = PackedWeight(weight)  # first: what is written while it is quantised counts at the next call
            try:
                made = self._quantised(weight)
            except InvalidCallError:  # it is not finite now
                return False
            if source is not None and source.is_late:
                self._tell(weight)
            self.exchange(made)
            self._source = noted  # last: until then other threads quantise for themselves
        return True

    def _quantised(self, weight: Tensor) -> Weight:
        with torch.no_grad():
            rows = (weight.detach().t() if self.turned else weight.detach()).contiguous()
            if self.of != "int8":
                return narrowed(rows, self.of)
            if not rows.isfinite().all():
                raise InvalidCallError("optimize", ["weight: wanted finite numbers, got one that is not"])
            codes, scale = lz.quantize(rows, "int8", per="row")
        return codes, scale.reshape(-1)


class Converted(Held, Requested):
    """Those of another library's module, quantised anew to another format, and again where they are written into."""

    def __init__(self, module: Module, held: Held, of: str) -> None:
        own = held._make.func

        def make(module: Module, *read: Tensor | None) -> Weight:
            was = own(module, *read)
            assert isinstance(was, lz.QuantizedWeight)
            return narrowed(was.dequantized(), of)

        super().__init__(module, held._tensors, make)
        self.own_bytes, self.instead_of = held.code_bytes, held.kind

    @property
    def bytes(self) -> int:
        return super().bytes + self.code_bytes


LEAST_GROUP = {"int4": 32, "nvfp4": 16, "mxfp4": 32}
"""By format, columns that share a scale, where no more divide a row; of others a row has one."""


def for_columns(of: str, columns: int) -> str | None:
    """A format, of int4 with a group that divides the columns; None where no group or block does."""
    name, _, most = of.partition(":")
    if name != "int4":
        return None if columns % LEAST_GROUP.get(name, 1) else of
    group = math.gcd(columns, int(most or 128))
    return None if group < LEAST_GROUP[name] else f"int4:{group}"


def format_of(of: str) -> lz.WeightFormat:
    """That of ``int8`` by row, of ``int4:32`` by groups of 32 columns, or of a format by its name."""
    bits, _, group = of.partition(":")
    if not of.startswith("int"):
        return usual(of)
    return lz.WeightFormat("compressed-tensors", bits=int(bits[3:]), group=int(group or 0))


def narrowed(rows: Tensor, of: str) -> lz.QuantizedWeight:
    """A weight, or a stack, in a format of :func:`format_of`."""
    return lz.quantize_weight(rows.to(torch.bfloat16) if of.startswith("int") else rows, format_of(of))


def fell_back(made: Iterable[Requested]) -> list[str]:
    """What is in another format than was requested or held, as lines."""
    counts = Counter((each.instead_of, each.kind) for each in made if each.instead_of)
    why = "which no fast kernel takes here; report.undo() takes it back"
    return [f"{count} weights are in {to} in place of {of}, {why}" for (of, to), count in counts.items()]


def served(module: Module, input: Tensor) -> CodedProduct | None:
    """The state whose codes compute a module's product with these rows; None where its own code does."""
    state = module.__dict__.get(MARK)
    if torch.compiler.is_compiling() or not isinstance(state, CodedProduct) or state.leaves(input):
        return None
    read = state.read(module)
    if read is None or not serves(state, input, *read, bias_of(module)) or not state.follow(read):
        return None
    return state


@as_forward
def product(self: Module, input: Tensor = ABSENT, /, *others: Any, **named: Any) -> Any:
    """The forward of a module whose weight is codes."""
    if input is ABSENT:
        return by_name(product, self, named)
    state = None if others or named else served(self, input)
    if state is not None:
        try:
            return call(state, input, bias_of(self))
        except InvalidCallError:
            if state.renew(state.weight):
                return product(self, input)
    return type(self).forward(self, input, *others, **named)


def call(state: CodedProduct, input: Tensor, bias: Tensor | None) -> Tensor:
    """What a state computes."""
    (codes, scale), packed = state.pair, state.forms_for(input)[0]
    return lz.quantized_linear(input, codes, scale, bias, packed=packed, **state.named)


def bias_of(module: Module) -> Tensor | None:
    """A module's bias, wherever it is kept."""
    held: Mapping[str, Tensor | None] = module._parameters if "bias" in module._parameters else module._buffers
    return held.get("bias")


def compared(got: Iterable[Tensor], before: Iterable[Tensor]) -> tuple[float, float] | None:
    """How far the floating tensors of two outputs are apart: relative to the first one's size, and by cosine."""
    off = one = other = both = 0.0
    for now, was in zip(got, before, strict=False):
        if not was.is_floating_point() or now.shape != was.shape:
            continue
        a, b = now.double(), was.double()
        off += (a - b).square().sum().item()
        one, other, both = one + a.square().sum().item(), other + b.square().sum().item(), both + (a * b).sum().item()
    if not other:
        return None
    return math.sqrt(off / other), both / math.sqrt(one * other) if one else 0.0
