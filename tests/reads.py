"""What comes to the host of values that lie on a device, counted where the device is the CPU as well."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

BRINGING = frozenset({
    *("tolist", "item", "numpy", "cpu", "equal", "allclose", "nonzero", "argwhere", "unique", "unique_consecutive"),
    *("masked_select", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__"),
})  # fmt: skip
"""Functions of torch whose result, or its size, the host must know."""


class Reads(TorchFunctionMode):
    """The functions that bring values to the host while it is entered, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        by_mask = name in ("__getitem__", "__setitem__") and _has_mask(args[1])
        if name in BRINGING or by_mask or (name == "to" and "cpu" in map(str, args[1:])):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def _has_mask(index):
    given = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, torch.Tensor) and each.dtype is torch.bool for each in given)
