"""Products with the same rows whose weights are codes, by one product of the codes of all."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize.swaps.codes import CodedProduct, Made, bias_of, call, served
from layerzero.integrations.optimize.swaps.weights import Budget, Packs
from layerzero.ops.quantize.schemes import scheme_of


class JoinedCodes:
    """Codes of products with the same rows one after the other: one product takes them, and each has its part of them.

    Codes that were made here are joined. Those of a file lie in their module, and a copy would take as much again.

    Attributes:
        state: of the joined product; None where nothing is joined.
    """

    def __init__(self) -> None:
        self._parts: tuple[object, ...] = ()
        self.state: CodedProduct | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinedCodes:
        """A copy's products have codes of their own."""
        return JoinedCodes()

    @property
    def bytes(self) -> int:
        """What kernels made of the joined codes, which are those of its parts."""
        return 0 if self.state is None else sum(each.bytes for each in self.state.packed if each is not None)

    def product(self, modules: Iterable[Module], rows: Tensor, budget: Budget | None) -> Tensor | None:
        """What the modules give, one after the other in each row; None where one of them is not computed from codes."""
        states, biases = [], []
        for each in modules:
            state, bias = served(each, rows), bias_of(each)
            if not isinstance(state, Made):
                return None
            states.append(state)
            biases += [] if bias is None else [bias]
        if len(biases) not in {0, len(states)}:
            return None
        if len(states) != len(self._parts) or any(
            each.weight is not part for each, part in zip(states, self._parts, strict=True)
        ):
            self.state, joined = None, _joined(states)  # another thread sees a state with its own parts, or none
            self._parts = tuple([each.weight for each in states])
            if joined is not None and budget is not None:
                joined.bound(budget)
            self.state = joined
        if (state := self.state) is None:
            return None
        return call(state, rows, torch.cat(biases) if biases else None)

    def forget(self) -> None:
        if self.state is not None:
            self.state.forget()


class CodedParts(Packs):
    """Weights of several products of one module, which may be codes.

    Attributes:
        coded: the codes of those with the same rows as one weight, where modules are called.
    """

    def __init__(self, weights: Iterable[Tensor], covers: Iterable[tuple[str, Module]] = (), *, pack: bool) -> None:
        super().__init__(weights, covers, pack=pack)
        self.coded = JoinedCodes()

    @property
    def weights(self) -> list[Tensor]:
        """The weights of its products as they are now, (N, K)."""
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        return super().bytes + self.coded.bytes

    def forget(self) -> None:
        super().forget()
        self.coded.forget()


_Parts = TypeVar("_Parts", bound=CodedParts)
_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def following_weights(
    compute: Callable[Concatenate[_Parts, _Given], _Found],
) -> Callable[Concatenate[_Parts, _Given], _Found]:
    """Compute once more where an operation refused a packed weight that was written into, moved or exchanged since.

    Operations look at every packed weight that they get. To look before as well took 3 % of a step with 15 weights
    (hidden 256, AMD EPYC Zen 4, 2026-11-27).
    """

    @functools.wraps(compute)
    def computing(self: _Parts, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        try:
            return compute(self, *args, **kwargs)
        except InvalidCallError:
            if self.by_module:
                raise
            self.renew(*self.weights)  # finds nothing where another thread packed them anew meanwhile
        return compute(self, *args, **kwargs)

    return computing


def _joined(states: list[Made]) -> CodedProduct | None:
    """One product of all, whose codes each now shares; None where formats, sizes or the rows' roundings differ."""
    weights, activations = [each.weight for each in states], states[0].activations
    if any(each.activations != activations for each in states):
        return None
    first, of = weights[0], None
    if isinstance(first, lz.QuantizedWeight):
        of, scheme, columns = first.format, scheme_of(first.format), first.shape[1]
        coded = [each for each in weights if isinstance(each, lz.QuantizedWeight)]
        if len(coded) != len(weights) or any(each.format != of or each.shape[1] != columns for each in coded):
            return None
        fields = scheme.joined(of, [each.fields for each in coded], columns)
        if fields is None:
            return None
        counts = [each.shape[0] for each in coded]
        whole = lz.QuantizedWeight.unchecked(of, (sum(counts), columns), fields)
        starts = itertools.accumulate(counts, initial=0)
        for state, count, start in zip(states, counts, starts, strict=False):
            cut = scheme.cut(of, fields, columns, start, start + count)
            state.exchange(lz.QuantizedWeight.unchecked(of, (count, columns), cut))
        return CodedProduct(whole, activations)
    pairs = [each.pair for each in states]
    codes, scales = [each for each, _ in pairs], [each for _, each in pairs if each is not None]
    if any(isinstance(each, lz.QuantizedWeight) or each.shape[1] != first.shape[1] for each in weights):
        return None
    one, scale = torch.cat(codes), torch.cat(scales)
    rows = [len(each) for each in codes]
    for state, code, own in zip(states, torch.split(one, rows), torch.split(scale, rows), strict=True):
        state.exchange((code, own))
    return CodedProduct((one, scale), activations)
