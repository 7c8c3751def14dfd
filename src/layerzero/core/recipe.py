"""What goes to another process or machine: recipes of calls, and builds in files whose names are known.

A recipe holds sizes, strides and arguments of a call, without the data. Builds in such files are what
``Kernel.prebuilt`` may be, so that they can be passed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.handle import CAPTURABLE

Value = None | bool | int | float | str | list[int]


class TensorRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: shape and strides in elements in the caller's layout, dtype by name, alignment of its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment_bytes: int = 16


class CallRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of an operation; ``device`` as torch names it."""

    operation: str
    layout: str | None
    device: str
    tensors: dict[str, TensorRecipe]
    params: dict[str, Value]
    requires_grad: bool = False

    @staticmethod
    def of(facts: Facts) -> CallRecipe:
        tensors = {
            name: TensorRecipe(each.shape, each.strides, dtype_name(each.dtype), each.alignment_bytes)
            for name, each in facts.tensors.items()
        }
        schema = facts.operation.schema
        params = {name: _plain(facts[name]) for name in (*schema.chosen, *schema.passed)}
        if facts.operation.plain is not None:
            params |= facts.operation.plain.recipe(facts)
        grad = bool(facts["requires_grad"])
        return CallRecipe(facts.operation.name, facts.layout, facts.device.torch_type, tensors, params, grad)

    def for_graph(self, handles: Collection[str]) -> CallRecipe:
        """The same call with handles that a captured graph can go on reading."""
        kept = {name: CAPTURABLE for name in handles if self.params.get(name) == "eager"}
        return msgspec.structs.replace(self, params=self.params | kept) if kept else self


def _plain(value: object) -> Value:
    """A value as JSON has it; a number of NumPy's as what it stands for, anything unknown as text."""
    if isinstance(value, (tuple, list)) and all(isinstance(each, int) for each in value):
        return [int(each) for each in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    return str(value)


class Workspace(NamedTuple):
    """Bytes that a kernel took besides its results for a call of a class, and the day when that was measured.

    Of another call of the class, :meth:`of` says what it is likely to take: as much more as it has more elements.
    """

    bytes: int
    elements: int
    date: str

    def of(self, facts: Facts) -> Workspace:
        """What a call of the same class takes."""
        more = elements_of(facts) / max(self.elements, 1)
        return self if more <= 1 else self._replace(bytes=math.ceil(self.bytes * more))


def elements_of(facts: Facts) -> int:
    """Elements of all tensors of a call."""
    return sum(math.prod(each.shape) for each in facts.tensors.values())


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """Whether the build for a call is there, and the files that it consists of.

    Attributes:
        folder: where they lie.
        names: those of a call's build, relative to the folder, what is read first last; empty where one is missing.
    """

    folder: Callable[[], Path]
    names: Callable[[Facts], Sequence[str]]

    def __call__(self, facts: Facts) -> bool:
        return bool(self.names(facts))
