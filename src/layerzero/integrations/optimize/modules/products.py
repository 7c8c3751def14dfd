"""Products with weights, by what they compute: linear layers, alone or with an activation, and feed-forward blocks."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, Identity, Linear, Module, Sequential

import layerzero as lz
from layerzero.core.errors import InvalidCallError, in_short
from layerzero.integrations.optimize.swaps.candidate import Candidate, agrees, candidate, distance, quiet, random_rows
from layerzero.integrations.optimize.swaps.joined_codes import CodedParts, following_weights
from layerzero.integrations.optimize.swaps.swap import ABSENT, MARK, as_forward, by_name, serves, weight_of
from layerzero.integrations.optimize.swaps.weights import Joined, Packs, View, is_plain, turns, wants_packed, why_apart
from layerzero.ops.activation.formulas import FORMULAS, FUNCTIONS, GATED

_GRID = torch.tensor([*(each / 8 for each in range(-96, 97)), -0.3, 1e-3, -1e-3], dtype=torch.float32, device="cpu")

_SAME = 2e-6
"""The two forms of gelu are 5e-4 apart at most, so this tells them apart."""


def activations_of(module: Module) -> Iterator[tuple[str, str, Module | None]]:
    """Attributes that are an activation: its name here, the attribute's name, and the submodule where it is one."""
    children: list[tuple[str, Any]] = list(module._modules.items())
    for name, value in (*children, *vars(module).items()):
        if name.startswith("_") or not callable(value) or isinstance(value, (type, Dropout)):
            continue
        if isinstance(value, Module) and any(True for _ in (*value.parameters(), *value.buffers())):
            continue
        found = activation_named(value)
        if found:
            yield found, name, value if isinstance(value, Module) else None


def activation_named(function: Any) -> str:
    """The name of an activation by its values on a grid; empty for what is none that LayerZero knows."""
    try:
        asked = copy.deepcopy(function) if isinstance(function, Module) else function
        if isinstance(asked, Module):
            asked.eval()
        with torch.no_grad():
            values = asked(_GRID.clone())
    except Exception:  # noqa: BLE001  # no function of one tensor: it says so in any way it likes
        return ""
    if not isinstance(values, Tensor) or values.shape != _GRID.shape or values.dtype != _GRID.dtype:
        return ""
    for name, known in FUNCTIONS.items():
        if torch.allclose(values, known(_GRID), rtol=_SAME, atol=_SAME):
            return name
    return ""


class Product(Packs):
    """One packed weight, and what follows the product.

    Attributes:
        view: of a weight that lies (K, N).
    """

    def __init__(self, linear: Module, *, pack: bool, activation: str | None = None, child: str = "") -> None:
        weight = weight_of(linear)
        self.view = View(weight) if turns(linear) else None  # first, as copies need it: packed forms belong to it
        weights = (weight if self.view is None else self.view.of(weight),)
        super().__init__(weights, ((child, linear),) if child else (), pack=pack)
        self.activation = activation


@as_forward
def _linear(self: Module, input: Tensor) -> Any:
    parameters = self._parameters
    try:
        weight, bias = parameters["weight"], parameters["bias"]
    except KeyError:  # pruned or parametrised since: the module computes them
        return type(self).forward(self, input)
    state: Any = self.__dict__.get(MARK)
    if weight is not None and serves(state, input, weight, bias):
        try:
            return lz.linear(input, weight, bias, packed=state.forms_for(input)[0])
        except InvalidCallError:
            if state.renew(weight):
                return _linear(self, input)
    return type(self).forward(self, input)


@as_forward
def _product(self: Module, input: Tensor = ABSENT, /, *others: Any, **named: Any) -> Any:
    """The forward of a module that computes what Linear does, in code or with a weight of its own order."""
    if input is ABSENT:
        return by_name(_product, self, named)
    state: Any = self.__dict__.get(MARK)
    weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
    if not others and not named and weight is not None and serves(state, input, weight, bias):
        weight = weight if state.view is None else state.view.of(weight)
        try:
            return lz.linear(input, weight, bias, packed=state.forms_for(input)[0])
        except InvalidCallError:
            if state.renew(weight):
                return _product(self, input)
    return type(self).forward(self, input, *others, **named)


@as_forward
def _linear_then(self: Module, input: Tensor = ABSENT, /, *others: Any, **named: Any) -> Any:
    if input is ABSENT:
        return by_name(_linear_then, self, named)
    mine = not torch.compiler.is_compiling() and not others and not named
    if mine and (state := self.__dict__.get(MARK)) is not None:
        parameters = state.covers[0][1]._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias", self)
        if weight is not None and bias is not self and serves(state, input, weight, bias):
            try:
                return lz.linear(input, weight, bias, activation=state.activation, packed=state.forms_for(input)[0])
            except InvalidCallError:
                if state.renew(weight):
                    return _linear_then(self, input)
    return type(self).forward(self, input, *others, **named)


def linear(module: Module) -> Candidate | str | None:
    """A candidate for a linear layer, None for what is none, or why it is left."""
    turned = turns(module)
    if turned is None:
        own = "it is a Linear with a forward of its own, or a weight of its own, which may compute anything"
        return own if isinstance(module, Linear) else None
    state = Product(module, pack=wants_packed(weight_of(module)))
    weight, bias = _weight(module, state.view), module._parameters.get("bias")
    example = random_rows(module, weight.shape[1], dtype=weight.dtype, device=weight.device)
    asked = "linear", (example, weight, bias), {"packed": state.packed[0]}
    forward = _linear if is_plain(module) else _product
    return candidate(module, forward, state, kind="linear", calls="lz.linear", example=example, asked=asked, stock=True)


def _weight(module: Module, view: View | None) -> Tensor:
    """A product's weight (N, K)."""
    weight = weight_of(module)
    return weight if view is None else view.of(weight)


def linear_then(module: Module) -> Candidate | str | None:
    """A candidate for a linear layer that an activation follows, as encoders' blocks begin."""
    children = {name: each for name, each in module._modules.items() if each is not None}
    products = {name: each for name, each in children.items() if is_plain(each)}
    if len(products) != 1 or any(True for _ in module.parameters(recurse=False)):
        return None
    ((name, product),) = products.items()
    found = list(activations_of(module))
    known = {attribute for _, attribute, _ in found}
    others = [each for other, each in children.items() if other != name and other not in known]
    if len(found) != 1 or any(not isinstance(each, Dropout) for each in others):
        return None
    activation, attribute, function = found[0]
    weight, bias = weight_of(product), product._parameters["bias"]
    example = random_rows(module, weight.shape[1], dtype=weight.dtype, device=weight.device)
    state = Product(product, pack=wants_packed(weight), activation=activation, child=name)
    if function is not None:
        state.covers = (*state.covers, (attribute, function))
    asked = "linear", (example, weight, bias), {"activation": activation, "packed": state.packed[0]}
    calls = f"lz.linear with {activation}"
    return candidate(module, _linear_then, state, kind="linear", calls=calls, example=example, asked=asked, stock=True)


class Block(CodedParts):
    """The submodules that are a block's up, down and, where it is gated, gate; and its activation.

    Attributes:
        joined: gate's and up's weights as one tensor, of which theirs are parts; None where each lies by itself.
    """

    def __init__(self, names: tuple[str, ...], children: dict[str, Module], activation: str, *, pack: bool) -> None:
        self.products = tuple(children[name] for name in names)
        views = [View(weight_of(each)) if turns(each) else None for each in self.products]
        self.views = views if any(views) else None  # before what is packed of them, as copies need them
        self.activation = activation
        self.joined: Joined | None = None
        super().__init__(self.weights, [(name, children[name]) for name in names], pack=pack)

    @property
    def weights(self) -> list[Tensor]:
        return list(map(_weight, self.products, self.views or itertools.repeat(None)))

    @property
    def multiplies(self) -> bool:
        """Whether it is gated by an activation that has a kernel of its own with the multiplication."""
        return self.activation in _TIMES

    @following_weights
    def compute(self, rows: Tensor) -> Any:
        """What the block gives, with its weights as they are now."""
        if self.by_module:
            up, down, *gate = self.products
            times, first = _TIMES[self.activation], (*gate, up)
            joined = self.coded.product(first, rows, self.budget) if gate else None
            return down(times(*[each(rows) for each in first]) if joined is None else times(joined))
        return _call(self, rows, self.weights, [each._parameters["bias"] for each in self.products])

    def join(self, holders: Mapping[int, int], joined: list[Joined]) -> str:
        if len(self.products) != 3 or self.by_module:
            return ""
        up, _, gate = self.products
        if self.views is not None:
            return "a weight lies (K, N)"
        if up._parameters["bias"] is not None or gate._parameters["bias"] is not None:
            return "its products have biases"
        weights = weight_of(gate), weight_of(up)
        why = why_apart(weights, holders)
        if not why:
            self.joined = Joined(*weights)
            joined.append(self.joined)
        return why


@as_forward
def _block(self: Module, input: Tensor = ABSENT, /, *others: Any, **named: Any) -> Any:
    if input is ABSENT:
        return by_name(_block, self, named)
    mine = not torch.compiler.is_compiling() and not others and not named
    if mine and (state := self.__dict__.get(MARK)) is not None:
        parameters = [each._parameters for each in state.products]
        try:
            weights, biases = [each["weight"] for each in parameters], [each["bias"] for each in parameters]
        except KeyError:  # pruned or parametrised since: the module computes them
            return type(self).forward(self, input)
        before = state.called
        if serves(state, input, *weights, *biases, *(() if before is None else before._parameters.values())):
            if state.views is not None:
                weights = state.weights
            try:
                return _call(state, input if before is None else before(input), weights, biases)
            except InvalidCallError:
                if state.renew(*weights):
                    return _block(self, input)
    return type(self).forward(self, input, *others, **named)


def _call(state: Block, input: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Any:
    packed, activation = state.forms_for(input), state.activation
    if len(weights) == 2 and packed[0] is None and biases[0] is None and weights[0].shape[0] == 2 * weights[1].shape[1]:
        return _in_one(input, weights[0], weights[1], biases[1], activation)
    gated = len(weights) == 3
    if gated and state.joined is not None:
        if state.joined.holds(weights[2], weights[0]) and biases[0] is biases[2] is None:
            return _in_one(input, state.joined.weight, weights[1], biases[1], activation)
        state.joined = None  # moved or cast since; what is left of it is not used
    return lz.mlp(
        input,
        *weights,
        up_bias=biases[0],
        down_bias=biases[1],
        gate_bias=biases[2] if gated else None,
        activation=activation,
        packed_up=packed[0],
        packed_down=packed[1],
        packed_gate=packed[2] if gated else None,
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
    """A candidate for a feed-forward block, None for what is none, or why it cannot be known."""
    children = {name: each for name, each in module._modules.items() if each is not None}
    products = {name: each for name, each in children.items() if isinstance(each, Linear) or turns(each) is not None}
    if not 2 <= len(products) <= 3 or any(True for _ in module.parameters(recurse=False)):
        return None
    fitting = list(orders(products))
    if not fitting:
        return None
    if any(turns(each) is None for each in products.values()):
        return "one of its products has a forward of its own, or a weight of its own, which may compute anything"
    found = list(activations_of(module))
    known = {attribute for _, attribute, _ in found}
    rest = {name: each for name, each in children.items() if name not in products and name not in known}
    others = [each for each in rest.values() if not isinstance(each, (Dropout, Identity))]
    first = next(iter(children.values()))
    if others and (others != [first] or type(module) is not Sequential or first._modules):
        return None
    before = first if others else Identity()  # such as a norm, which is called as it is
    up = weight_of(children[fitting[0][0]])
    activations = dict.fromkeys([name for name, _, _ in found] or FORMULAS)
    tried: list[tuple[float, tuple[str, ...], str, Tensor]] = []
    why = ""
    for size in dict.fromkeys(_shape(children[names[0]])[1] for names in fitting):
        example = random_rows(module, size, dtype=up.dtype, device=up.device)
        try:
            with quiet(module):
                expected, rows = module(example.clone()), before(example.clone())
        except Exception as error:  # noqa: BLE001  # it takes something else than such rows: whatever it raises
            if found:  # without an activation it is something else
                why = why or f"it does not compute on one tensor of rows: {in_short(error)}"
            continue
        if not isinstance(expected, Tensor):
            continue
        if not found and up.dtype not in {torch.float32, torch.float64}:
            return "its activation is no attribute, and in half precision values do not tell which one it is"
        for names, activation in itertools.product(fitting, activations):
            if _shape(children[names[0]])[1] == size:
                tried.append((_error(children, names, activation, rows, expected), names, activation, example))
    if not tried:
        return why or None
    off, names, activation, example = min(tried, key=lambda each: each[0])
    if not agrees(off, up.dtype):
        return f"its output is none of the blocks' formulas: the nearest is off by {off:.2g} of the largest value"
    state = Block(names, children, activation, pack=wants_packed(up))
    state.covers += tuple((name, each) for _, name, each in found if each is not None)
    state.called = first if others else None
    asked = _asked(state, example)
    calls = f"lz.mlp{', gated' if len(names) == 3 else ''}, {activation}"
    return candidate(module, _block, state, kind="block", calls=calls, example=example, asked=asked)


def _shape(product: Module) -> tuple[int, ...]:
    """(N, K) of a product."""
    shape: tuple[int, ...] = product.weight.shape  # type: ignore[assignment]  # which may be no parameter
    return shape[::-1] if turns(product) else shape


def orders(products: Mapping[str, Module]) -> Iterator[tuple[str, ...]]:
    """Which product may be up, down and gate by their shapes."""
    if any(len(_shape(each)) != 2 for each in products.values()):
        return
    for names in itertools.permutations(products):
        shapes = [_shape(products[name]) for name in names]
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

    weights = [weight_of(each).t() if turns(each) else weight_of(each) for each in map(children.__getitem__, names)]
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
    weights = state.weights
    biases = [each._parameters["bias"] for each in state.products]
    named: dict[str, Any] = {"up_bias": biases[0], "down_bias": biases[1], "activation": state.activation}
    named |= {"packed_up": state.packed[0], "packed_down": state.packed[1]}
    if len(weights) == 3:
        named |= {"gate_bias": biases[2], "packed_gate": state.packed[2]}
    return "mlp", (example, *weights), named
