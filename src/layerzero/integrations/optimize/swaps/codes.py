"""A product whose weight is int8 codes and scales: what its new forward keeps, and how it follows the module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize.swaps.swap import MARK, State, as_forward, serves, size_of
from layerzero.integrations.optimize.swaps.weights import Packs, wants_packed
from layerzero.ops.linear.packed import PACKED, PackedWeight

Place = tuple[str, str, str]
"""Where a module keeps a tensor: the dict of its own, the name there, and the attribute within a tensor subclass."""


class Codes(Packs):
    """Codes and scales, and how rows are quantised before the product.

    Attributes:
        pair: codes, int8 (N, K), and scales, float32, one number or one for each output; exchanged together.
        activations: None for rows as they are, ``"int8"`` for a scale of its own for each row.
    """

    def __init__(self, codes: Tensor, scale: Tensor, activations: str | None) -> None:
        super().__init__((codes,), pack=wants_packed(codes))
        self.pair, self.activations = (codes, scale.detach().to(torch.float32)), activations

    def read(self, module: Module) -> tuple[Tensor, ...] | None:
        """The tensors that a call is computed from; None where they are gone."""
        raise NotImplementedError

    def follow(self, read: tuple[Tensor, ...]) -> bool:
        """Take what was read where it is no longer what it was; whether it still is codes and scales."""
        raise NotImplementedError


class Found(Codes):
    """Those that a module of another library has: read where they lie.

    Attributes:
        places: of the codes and of the scales.
    """

    def __init__(self, module: Module, places: tuple[Place, Place], activations: str | None) -> None:
        self.places = places
        codes, scale = (at(module, place) for place in places)
        assert codes is not None
        assert scale is not None
        super().__init__(codes, scale, activations)
        self._read, self._version = scale, version(scale)

    def read(self, module: Module) -> tuple[Tensor, ...] | None:
        codes, scale = (at(module, place) for place in self.places)
        if codes is None or scale is None:
            return None
        held = [getattr(module, kind)[name] for kind, name, inner in self.places if inner]
        if torch.is_grad_enabled() and any(each.requires_grad for each in held):
            return None
        return codes, scale

    def follow(self, read: tuple[Tensor, ...]) -> bool:
        codes, scale = read
        if codes is self.pair[0] and scale is self._read and version(scale) == self._version:
            return True
        if codes.dtype is not torch.int8 or codes.ndim != 2 or scale.numel() not in {1, codes.shape[0]}:
            return False
        self.pair = codes, scale.detach().to(torch.float32)
        self._version, self._read = version(scale), scale
        self.renew(codes)
        return True


def version(tensor: Tensor) -> int:
    """How often torch wrote into it; 0 for tensors of inference mode, which count nothing."""
    return 0 if tensor.is_inference() else tensor._version


def at(module: Module, place: Place) -> Tensor | None:
    """The tensor at a place; None where there is none any more."""
    held, name, inner = place
    found = getattr(module, held).get(name)
    return getattr(found, inner, None) if inner else found


class Made(Codes):
    """Those that were made of a module's weight when asked for, and are made anew after that was written into.

    Attributes:
        loss: how far the product was from the module's own, relative to its size.
        own_bytes: what the weight takes that they were made of.
        turned: whether that is (K, N), as Conv1D of Transformers has it.
    """

    loss = 0.0

    def __init__(self, weight: Tensor, activations: str | None, *, turned: bool = False) -> None:
        self.turned = turned
        super().__init__(*self._quantised(weight), activations)
        self._source: PackedWeight | None = PackedWeight(weight)
        self.own_bytes = weight.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        memo[id(self._source)] = None  # a copy has a weight of its own, which its first call looks at
        return super().__deepcopy__(memo)

    @property
    def code_bytes(self) -> int:
        """What the codes and scales take."""
        return sum(each.nbytes for each in self.pair)

    @property
    def bytes(self) -> int:
        return super().bytes + self.code_bytes

    def read(self, module: Module) -> tuple[Tensor, ...] | None:
        weight = module._parameters.get("weight")
        return None if weight is None or not weight.is_floating_point() or weight.is_meta else (weight,)

    def follow(self, read: tuple[Tensor, ...]) -> bool:
        (weight,), source = read, self._source
        if source is None or source.kind_for(weight) != PACKED:
            if source is not None and source.is_late:
                self._tell(weight)
            self.pair = self._quantised(weight)
            self._source = PackedWeight(weight)
            self.renew(self.pair[0])
        return True

    def _quantised(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of a weight, and a scale for each output."""
        with torch.no_grad():
            rows = weight.detach().t() if self.turned else weight.detach()
            codes, scale = lz.quantize(rows.contiguous(), "int8", per="row")
        return codes, scale.reshape(-1)


@as_forward
def product(self: Module, input: Tensor, *others: Any, **named: Any) -> Any:
    """The forward of a module whose weight is codes."""
    state: Codes | None = self.__dict__.get(MARK)
    if state is not None and not others and not named and not (state.own_at and state.own_at[size_of(input)]):
        read, bias = state.read(self), bias_of(self)
        if read is not None and serves(state, input, *read, bias) and state.follow(read):
            try:
                return call(state, input, bias)
            except InvalidCallError:
                if state.renew(state.pair[0]):
                    return product(self, input)
    return type(self).forward(self, input, *others, **named)


def call(state: Codes, input: Tensor, bias: Tensor | None) -> Tensor:
    """What a state computes."""
    (codes, scale), packed = state.pair, state.forms_for(input)[0]
    return lz.quantized_linear(input, codes, scale, bias, activations=state.activations, packed=packed)


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
