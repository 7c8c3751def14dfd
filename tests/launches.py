"""What torch runs, call by call."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """The operators that torch runs while it is entered, by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append(str(function))
        return function(*args, **(kwargs or {}))
