"""Products with a weight: linear layers, and those that an activation follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, Linear, Module

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize.activations import activations_of
from layerzero.integrations.optimize.candidate import Candidate, candidate, random_rows
from layerzero.integrations.optimize.joining import wants_packed
from layerzero.integrations.optimize.swapping import MARK, Packs, as_forward, is_dense, serves, weight_of


class Product(Packs):
    """One packed weight, and what follows the product."""

    def __init__(self, linear: Module, *, pack: bool, activation: str | None = None, child: str = "") -> None:
        super().__init__((weight_of(linear),), ((child, linear),) if child else (), pack=pack)
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
def _linear_then(self: Module, input: Tensor, *others: Any, **named: Any) -> Any:
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


def is_plain(module: Module | None) -> bool:
    """Whether a module computes what ``torch.nn.Linear`` does, and nothing else."""
    return (
        isinstance(module, Linear)
        and type(module).forward is Linear.forward
        and is_dense(module._parameters.get("weight"))  # it has none where it was pruned or parametrised
        and "bias" in module._parameters
        and 0 not in module.weight.shape
    )


def linear(module: Module) -> Candidate | str | None:
    """A candidate for a linear layer, None for what is none, or why it is left."""
    if not isinstance(module, Linear):
        return None
    if not is_plain(module):
        return "it is a Linear with a forward of its own, or a weight of its own, which may compute anything"
    weight, bias = module.weight, module.bias
    example = random_rows(module, weight.shape[1], dtype=weight.dtype, device=weight.device)
    state = Product(module, pack=wants_packed(weight))
    asked = "linear", (example, weight, bias), {"packed": state.packed[0]}
    return candidate(module, _linear, state, kind="linear", calls="lz.linear", example=example, asked=asked, stock=True)


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
