"""Which way a product's weight lies: (N, K) as torch's Linear keeps it, or (K, N) as GPT-2's modules do.

A class says it of torch's own alone. Of another module with a weight, and perhaps a bias, a copy in float32 is compared
with both products on small and large rows: whatever else it computes, such as another activation, a clamp or quantised
rows, is off there by far more than the order of a sum.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.nn import Linear, Module, functional

from layerzero.integrations.optimize.swaps.candidate import STRUCTURE, distance, quiet, random_rows
from layerzero.integrations.optimize.swaps.swap import is_dense, weight_of

_SIZES = (1.0, 1e-3, 1e3)
"""Of the rows that a module is tried on."""

_FOUND: weakref.WeakKeyDictionary[Module, tuple[Hashable, bool | None]] = weakref.WeakKeyDictionary()
"""What was found of a module, while its code and its weight are those."""


class View:
    """A weight (K, N) as the (N, K) that products take: the same memory, and one object while it lies there.

    Packed forms belong to a tensor, so each call has to give the same one.
    """

    __slots__ = ("_of", "_seen")

    def __init__(self, weight: Tensor) -> None:
        self._of, self._seen = weight, weight.detach().t()

    def of(self, weight: Tensor) -> Tensor:
        """The weight as it lies now."""
        seen = self._seen
        if self._of is not weight or seen.data_ptr() != weight.data_ptr() or seen.dtype is not weight.dtype:
            self._of, self._seen = weight, weight.detach().t()
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
        and 0 not in module.weight.shape
    )


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
            with quiet(module):
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
