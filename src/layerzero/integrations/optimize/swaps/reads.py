"""What a module's own code asks of tensors while it runs: numbers, and sizes that it compares.

One run of an ``if`` shows one way of two. Code that asks may take the other one for another input. What torch makes of
sizes by itself is not seen: ``x.shape[:-1].numel()``, and how many rows ``x.unbind()`` gives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = "its code reads numbers of tensors, as an `if` does, so that other input may take another way"

COMPARES = "its code compares how many rows its input has or how they lie, so that other input may take another way"


class _Size(int):
    """A size that notes that it was compared."""

    of: _Python

    @classmethod
    def noted(cls, found: Any, of: _Python) -> Any:
        """A whole number that notes, or sizes of which all but the last do: that one is the module's own."""
        if isinstance(found, torch.Size):
            return torch.Size([*(cls.noted(each, of) for each in found[:-1]), *found[-1:]])
        if type(found) is not int:
            return found
        made = cls(found)
        made.of = of
        return made


def _file_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _noting(name: str, *, compares: bool) -> Callable[..., Any]:
    """A method of whole numbers that notes: what gives no size counts as a comparison, which may follow unseen."""
    compute = getattr(int, name)

    def method(self: _Size, *others: Any) -> Any:
        found = compute(self, *others)
        if not compares:
            return _Size.noted(found, self.of)
        if found is not NotImplemented:  # as for a tensor on the other side
            self.of.compared.add(_file_of(sys._getframe(1)))
        return found

    return method


for _word in ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "truediv", "rtruediv"):
    setattr(_Size, f"__{_word}__", _noting(f"__{_word}__", compares=True))
for _word in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "floordiv",
    "rfloordiv",
    "mod",
    "rmod",
    "pow",
    "rpow",
    "neg",
):
    setattr(_Size, f"__{_word}__", _noting(f"__{_word}__", compares=False))

_NUMBERS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})
_LIES = frozenset({Tensor.__len__, Tensor.is_contiguous, Tensor.stride, Tensor.storage_offset, Tensor.data_ptr})
_HELD: tuple[Any, ...] = Tensor.shape, Tensor.ndim, Tensor.nbytes
_SIZES = frozenset({Tensor.size, Tensor.dim, Tensor.numel, torch.numel, *(each.__get__ for each in _HELD)})


class _Python(TorchFunctionMode):
    """What no operator is needed for."""

    seen = False

    def __init__(self) -> None:
        super().__init__()
        self.compared: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func in _NUMBERS
        if func in _LIES:
            self.compared.add(_file_of(sys._getframe(1)))
        found = func(*args, **(kwargs or {}))
        if func not in _SIZES:
            return found
        given = [*args, *(kwargs or {}).values()]
        own = isinstance(given[0], Parameter) or (len(given) > 1 and given[1] in (-1, given[0].ndim - 1))
        return found if own else _Size.noted(found, self)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what code asks meanwhile.

    Attributes:
        seen: whether it read numbers of tensors.
        compared: files whose code compared sizes other than the last one, or looked at how a tensor lies.
    """

    seen = False
    compared: set[str]

    def __enter__(self) -> Self:
        self._python = _Python().__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._python.__exit__(*raised)
        self.seen |= self._python.seen
        self.compared = self._python.compared

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.data_dependent_output in func.tags
        return func(*args, **(kwargs or {}))
