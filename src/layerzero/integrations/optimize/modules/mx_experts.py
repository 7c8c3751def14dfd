"""Experts of gpt-oss in mxfp4 as Transformers keeps them, on a CPU.

Their own code calls a Triton kernel of the hub, which no CPU runs: nothing can be compared with it or timed against it.
So the tensors that a module keeps tell its format. Results are compared with the class's formula, in float32, on the
dequantised numbers of two experts. Transformers 5.24, ``integrations/mxfp4.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.core.errors import InvalidCallError, in_short
from layerzero.integrations.optimize.attention.transformers import Search
from layerzero.integrations.optimize.modules.experts import call_of, example_of
from layerzero.integrations.optimize.modules.int8 import why_not
from layerzero.integrations.optimize.swaps.candidate import agrees, distance
from layerzero.integrations.optimize.swaps.codes import version
from layerzero.integrations.optimize.swaps.swap import MARK, Swap, as_forward, has_own_forward, serves
from layerzero.integrations.optimize.swaps.weights import Packs
from layerzero.integrations.optimize.times.report import Left, Replaced
from layerzero.integrations.transformers_experts import numbers_of
from layerzero.ops.moe.experts import moe_experts
from layerzero.ops.quantize.weight import QuantizedWeight

_CALLS = "lz.moe_experts in mxfp4, swiglu_oai"
_BIASES = "gate_up_proj_bias", "down_proj_bias"
_ROUTES = "_is_hooked"
"""With it the block around the experts asks its router, and calls their forward with ids and shares."""


class MxExperts(Packs):
    """Both stacks, read where the module keeps them.

    Attributes:
        weights: gate and up, and down.
    """

    sets = MappingProxyType({_ROUTES: True})

    def __init__(self, module: Module) -> None:
        self._note(_kept(module))
        super().__init__(self.weights, pack=True)

    def _note(self, kept: list[Tensor]) -> None:
        gate_up, gate_up_scale, down, down_scale = (each.mT.contiguous() for each in kept)
        self.weights = QuantizedWeight.from_mx(gate_up, gate_up_scale), QuantizedWeight.from_mx(down, down_scale)
        self._kept, self._versions = kept, list(map(version, kept))

    def follow(self, module: Module) -> bool:
        """Take what the module keeps now; whether that still is mxfp4."""
        now = _kept(module)
        if list(map(id, now)) == list(map(id, self._kept)) and list(map(version, now)) == self._versions:
            return True
        try:
            self._note(now)
        except (InvalidCallError, ValueError):  # another layout: its own code knows
            return False
        self.renew(*self.weights)
        return True

    def arguments(self, module: Module, rows: Tensor, ids: Tensor, shares: Tensor) -> tuple[tuple[Any, ...], Any]:
        """Of a call, by place and by name."""
        given, named = call_of(rows, self.weights, ids, shares, self.forms_for(rows))
        alpha, limit = numbers_of(module)
        first, second = (module._parameters[each].to(rows.dtype) for each in _BIASES)  # type: ignore[union-attr]
        named |= {"gate_up_bias": first, "down_bias": second, "activation": "swiglu_oai"}
        return given, named | {"alpha": alpha, "limit": limit}


@as_forward
def _mx_experts(self: Module, hidden_states: Tensor, *others: Any, **named: Any) -> Any:
    state: Any = self.__dict__.get(MARK)
    mine = not torch.compiler.is_compiling() and not named and [type(each) for each in others] == [Tensor, Tensor]
    if mine and serves(state, hidden_states, *map(self._parameters.get, _BIASES), others[1]) and state.follow(self):
        given, told = state.arguments(self, hidden_states, *others)
        return lz.moe_experts(*given, **told)
    return type(self).forward(self, hidden_states, *others, **named)


def _kept(module: Module) -> list[Tensor]:
    """Numbers and scales of both stacks, (E, K / 2, N) and (E, K / 32, N); none where it keeps none of mxfp4."""
    found = []
    for name in ("gate_up_proj", "down_proj"):
        config = getattr(module, f"{name}_precision_config", None)
        for each in (getattr(module, name, None), getattr(config, "weight_scale", None)):
            storage = getattr(each, "storage", None)
            data = getattr(storage, "data", None)
            if not isinstance(data, Tensor) or data.ndim != 3 or data.dtype is not torch.uint8:
                return []
            found.append(data)
    return found if set(_BIASES) <= module._parameters.keys() else []


def find(search: Search) -> Iterator[Replaced | Left]:
    """Stacks of mxfp4 on a CPU, as modules of Transformers keep them."""
    parents = {id(child): parent for parent in search.root.modules() for child in parent.children()}
    for path, module in search.root.named_modules():
        if not (kept := _kept(module)) or kept[0].device.type != "cpu":
            continue
        search.taken.add(id(module))
        found = _checked(module, parents.get(id(module)))
        name = type(module).__name__
        yield Left(path, name, found) if isinstance(found, str) else Replaced(path, name, "experts", *found, None)


def _checked(module: Module, parent: Module | None) -> tuple[str, str | None, float, Swap] | str:
    """What it calls, the kernel, how far it is from the formula and its swap; or why it is left."""
    if why := why_not(module):
        return why
    if _ROUTES in module.__dict__:
        return f"its {_ROUTES} is set: another hook has the block call it"
    if parent is not None and has_own_forward(parent):
        return "the forward of the block around it was exchanged on the instance, and reads the weights by itself"
    try:
        state = MxExperts(module)
    except (InvalidCallError, ValueError) as wrong:
        return in_short(wrong)
    near = (parent or module).parameters()
    dtype = next((each.dtype for each in near if each.is_floating_point()), torch.float32)
    shape = state.weights[0].shape
    example = example_of(shape, min(shape[0], 2), dtype, torch.device("cpu"))
    with torch.no_grad():
        given, named = state.arguments(module, *example)
        few: Any = {name: each[:2] if isinstance(each, Tensor) else each for name, each in named.items()}
        rows, gate_up, down, *others = given
        error = distance(
            lz.moe_experts(*given, **named), moe_experts(rows.float(), gate_up[:2], down[:2], *others, **few)
        )
        kernel = str(lz.which("moe_experts", *given, **named)["kernel_id"])
    if not agrees(error, dtype):
        return f"{_CALLS} by {kernel} was off by {error:.2g} of the largest value"
    return _CALLS, kernel, error, Swap(module, _mx_experts, state)
