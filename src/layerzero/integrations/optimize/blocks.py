"""Feed-forward blocks by what they compute: two products with an activation between them, gated or plain."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, Identity, Linear, Module

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize.activations import activations_of
from layerzero.integrations.optimize.candidate import TOLERANCE, Candidate, candidate, distance, quiet, random_rows
from layerzero.integrations.optimize.joining import Joined, wants_packed
from layerzero.integrations.optimize.products import is_plain
from layerzero.integrations.optimize.swapping import MARK, Packs, as_forward, serves, weight_of
from layerzero.ops.activation.formulas import FORMULAS, GATED


class Block(Packs):
    """The submodules that are a block's up, down and, where it is gated, gate; and its activation.

    Attributes:
        joined: gate's and up's weights as one tensor, of which theirs are parts; None where each lies by itself.
    """

    def __init__(self, names: tuple[str, ...], children: dict[str, Module], activation: str, *, pack: bool) -> None:
        self.products = tuple(children[name] for name in names)
        self.activation = activation
        self.joined: Joined | None = None
        weights = [weight_of(each) for each in self.products]
        super().__init__(weights, [(name, children[name]) for name in names], pack=pack)


@as_forward
def _block(self: Module, input: Tensor, *others: Any, **named: Any) -> Any:
    mine = not torch.compiler.is_compiling() and not others and not named
    if mine and (state := self.__dict__.get(MARK)) is not None:
        parameters = [each._parameters for each in state.products]
        try:
            weights, biases = [each["weight"] for each in parameters], [each["bias"] for each in parameters]
        except KeyError:  # pruned or parametrised since: the module computes them
            return type(self).forward(self, input)
        if serves(state, input, *weights, *biases):
            try:
                return _call(state, input, weights, biases)
            except InvalidCallError:
                if state.renew(*weights):
                    return _block(self, input)
    return type(self).forward(self, input, *others, **named)


def compute(state: Block, input: Tensor) -> Any:
    """What a block gives, with its weights as they are now."""
    parameters = [each._parameters for each in state.products]
    return _call(state, input, [each["weight"] for each in parameters], [each["bias"] for each in parameters])  # type: ignore[misc]


def _call(state: Block, input: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Any:
    packed, activation = state.forms_for(input), state.activation
    if len(weights) == 2 and packed[0] is None and biases[0] is None and weights[0].shape[0] == 2 * weights[1].shape[1]:
        return _in_one(input, weights[0], weights[1], biases[1], activation)
    if len(weights) == 2:
        return lz.mlp(
            input,
            *weights,
            up_bias=biases[0],
            down_bias=biases[1],
            activation=activation,
            packed_up=packed[0],
            packed_down=packed[1],
        )
    if state.joined is not None:
        if state.joined.holds(weights[2], weights[0]):
            return _in_one(input, state.joined.weight, weights[1], biases[1], activation)
        state.joined = None  # moved or cast since; what is left of it is nobody's
    return lz.mlp(
        input,
        *weights,
        up_bias=biases[0],
        down_bias=biases[1],
        gate_bias=biases[2],
        activation=activation,
        packed_up=packed[0],
        packed_down=packed[1],
        packed_gate=packed[2],
    )


_TIMES: Mapping[str, Callable[[Tensor], Tensor]] = {
    name: functools.partial(getattr(lz, function), **told) for name, (function, told) in GATED.items()
}
"""Activations that libraries for GPUs have in one kernel with the multiplication, where gate and up lie in one row."""


def _in_one(input: Tensor, joined: Tensor, down: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """A gated block with gate's rows before up's in one weight: three launches, four where none has the activation."""
    times = _TIMES.get(activation)
    if times is None:
        return lz.mlp(input, joined, down, down_bias=bias, activation=activation)
    return lz.linear(times(lz.linear(input, joined)), down, bias)


def block(module: Module) -> Candidate | str | None:
    """A candidate for a feed-forward block, None for what is none, or why it cannot be told."""
    children = {name: each for name, each in module._modules.items() if each is not None}
    products = {name: each for name, each in children.items() if isinstance(each, Linear)}
    if not 2 <= len(products) <= 3 or any(True for _ in module.parameters(recurse=False)):
        return None
    orders = list(_orders(products))
    if not orders:
        return None
    if not all(is_plain(each) for each in products.values()):
        return "one of its products has a forward of its own, or a weight of its own, which may compute anything"
    found = list(activations_of(module))
    known = {attribute for _, attribute, _ in found}
    rest = {name: each for name, each in children.items() if name not in products and name not in known}
    if any(not isinstance(each, (Dropout, Identity)) for each in rest.values()):
        return None
    up = weight_of(children[orders[0][0]])
    activations = dict.fromkeys([name for name, _, _ in found] or FORMULAS)
    tried: list[tuple[float, tuple[str, ...], str, Tensor]] = []
    why = ""
    for size in dict.fromkeys(weight_of(children[names[0]]).shape[1] for names in orders):
        example = random_rows(module, size, dtype=up.dtype, device=up.device)
        try:
            with quiet(module):
                expected = module(example.clone())
        except Exception as error:  # noqa: BLE001  # it takes something else than such rows: whatever it raises
            if found:  # without an activation it is something else
                why = why or f"it does not compute on one tensor of rows: {type(error).__name__}: {str(error)[:80]}"
            continue
        if not isinstance(expected, Tensor):
            continue
        if not found and up.dtype not in {torch.float32, torch.float64}:
            return "its activation is no attribute, and in half precision values do not tell which one it is"
        for names, activation in itertools.product(orders, activations):
            if weight_of(children[names[0]]).shape[1] == size:
                tried.append((_error(children, names, activation, example, expected), names, activation, example))
    if not tried:
        return why or None
    off, names, activation, example = min(tried, key=lambda each: each[0])
    if off > TOLERANCE.get(up.dtype, 0.0):
        return f"its output is none of the blocks' formulas: the nearest is off by {off:.2g} of the largest value"
    state = Block(names, children, activation, pack=wants_packed(up))
    state.covers += tuple((name, each) for _, name, each in found if each is not None)
    asked = _asked(state, example)
    calls = f"lz.mlp{', gated' if len(names) == 3 else ''}, {activation}"
    return candidate(module, _block, state, kind="block", calls=calls, example=example, asked=asked)


def _orders(products: dict[str, Linear]) -> Iterator[tuple[str, ...]]:
    """Which product may be up, down and gate by their shapes."""
    for names in itertools.permutations(products):
        shapes = [products[name].weight.shape for name in names]  # which may be no parameter
        up, down = shapes[:2]
        if down[0] != up[1]:
            continue
        if len(names) == 2 and up[0] in {down[1], 2 * down[1]}:
            yield names
        if len(names) == 3 and up == shapes[2] and down[1] == up[0]:
            yield names


def _error(
    children: dict[str, Module], names: tuple[str, ...], activation: str, example: Tensor, expected: Any
) -> float:
    """How far a formula is from what the block computes, with torch's own functions."""
    from layerzero.ops.linear import stock

    weights: list[Any] = [children[name]._parameters["weight"] for name in names]
    biases = [children[name]._parameters["bias"] for name in names]
    with torch.no_grad():
        run = stock.mlp(
            example,
            *weights,
            up_bias=biases[0],
            down_bias=biases[1],
            gate_bias=biases[2] if len(names) == 3 else None,
            activation=activation,
        )
        return distance(run(), expected)


def _asked(state: Block, example: Tensor) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    weights = [weight_of(each) for each in state.products]
    biases = [each._parameters["bias"] for each in state.products]
    named: dict[str, Any] = {"up_bias": biases[0], "down_bias": biases[1], "activation": state.activation}
    named |= {"packed_up": state.packed[0], "packed_down": state.packed[1]}
    if len(weights) == 3:
        named |= {"gate_bias": biases[2], "packed_gate": state.packed[2]}
    return "mlp", (example, *weights), named
