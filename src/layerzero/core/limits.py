"""The spelling of limits that declarations use: ``limit.dtype("float16")``, ``limit.dim("head_dim", max=256)``.

The same data feeds filtering, explain, the support table and boundary tests. The limits that one family alone has stand
in its folder (``layerzero.ops.attention.limits``); their names are found here, too.

A limit is plain data and back: ``{"kind": "dim", "name": "head_dim", "max": 256}``. A new kind of limit of any
operation is one line in ``KINDS``; those of one family stand in its folder. What is not in the table is code: data can
name it, not make it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.limit_kinds import (
    Aligned,
    Arch,
    Contiguous,
    Custom,
    Dim,
    Dtype,
    Equal,
    Finding,
    Findings,
    Instruction,
    LastStrideOne,
    Limit,
    OfTensors,
    OneOf,
    Platform,
    Positive,
    Repair,
)
from layerzero.core.limit_launch import Generation, Grid, TensorCore
from layerzero.core.reasons import ReasonCode

__all__ = [
    "Custom",
    "Finding",
    "Findings",
    "Limit",
    "OfTensors",
    "Repair",
    "absent",
    "aligned",
    "arch",
    "contiguous",
    "cpu_feature",
    "dim",
    "dtype",
    "equal",
    "generation",
    "grid",
    "instruction",
    "last_stride_one",
    "one_of",
    "platform",
    "positive",
    "tensor_core",
]


KINDS: dict[str, type[Limit]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind
    for kind in (
        *(Aligned, Arch, Contiguous, Dim, Dtype, Equal, Generation, Grid, Instruction, LastStrideOne, OneOf),
        *(Platform, Positive, TensorCore),
    )
}
"""Name of a kind in JSON to the dataclass that holds it; its fields are the JSON's fields."""

CODE = "code"
"""The kind of a limit that data cannot make: a function, or a class of a backend's own."""

_NAMES = {kind: name for name, kind in KINDS.items()}
_SCALARS = (bool, int, float, str, type(None))


def register_kinds(kinds: Mapping[str, type[Limit]]) -> None:
    """Add a family's own kinds of limits."""
    KINDS.update(kinds)
    _NAMES.update({kind: name for name, kind in kinds.items()})


def is_data(limit: Limit) -> bool:
    """Whether the limit can be written as data and read back."""
    plain = not isinstance(limit, OneOf) or all(_is_plain(value) for value in limit.values)
    return type(limit) in _NAMES and plain


def _is_plain(value: object) -> bool:
    return type(value) in _SCALARS or (type(value) is tuple and all(map(_is_plain, value)))


def limit_data(limit: Limit) -> dict[str, Any]:
    """Write a limit as plain values; fields at their default are left out."""
    if not is_data(limit):
        return {"kind": CODE, "text": limit.describe()}
    defaults = {each.name: each.default for each in _fields(type(limit))}
    values: dict[str, Any] = msgspec.to_builtins(limit)
    kept = {name: value for name, value in values.items() if value != defaults[name]}
    return {"kind": _NAMES[type(limit)], **kept}


def limit_of(data: Mapping[str, Any]) -> Limit:
    """Make a limit of data; one of kind ``code`` cannot be made. Raises: ValueError with what was wanted and got."""
    kind = data.get("kind")
    if kind not in KINDS:
        raise ValueError(f"wanted a kind of {', '.join(KINDS)}, got {kind!r}")
    known = {each.name: each for each in _fields(KINDS[kind])}
    given = {name: value for name, value in data.items() if name != "kind"}
    wrong = sorted(set(given) - set(known))
    if wrong:
        raise ValueError(f"{kind} has no {', '.join(wrong)}; wanted {', '.join(known) or 'no fields'}")
    missing = [name for name, each in known.items() if name not in given and each.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{kind}: wanted {', '.join(missing)}, got nothing")
    try:
        limit = msgspec.convert(given, KINDS[kind], strict=True)
    except msgspec.ValidationError as error:  # what a limit's own checks raise comes as this, too
        raise ValueError(f"{kind}: {error}, got {given}") from None
    if isinstance(limit, OneOf):  # JSON has no tuples, which is what facts are
        limit = dataclasses.replace(limit, values=tuple(map(_frozen, limit.values)))
    nothing = [name for name, value in given.items() if value in ([], "")]
    if nothing:
        raise ValueError(f"{kind}: {nothing[0]}: wanted something, got {given[nothing[0]]!r}")
    if isinstance(limit, (Dim, Arch)):
        _check_bounds(limit, given)
    return limit


def _check_bounds(limit: Dim | Arch, given: Mapping[str, Any]) -> None:
    low: Any = limit.min
    high: Any = limit.max
    if not set(given) - {"name"}:
        raise ValueError(f"{_NAMES[type(limit)]}: wanted a bound, got none")
    if low is not None and high is not None and low > high:
        raise ValueError(f"{_NAMES[type(limit)]}: wanted a min of at most max, got min {low} and max {high}")
    if isinstance(limit, Dim) and limit.multiple is not None and limit.multiple < 1:
        raise ValueError(f"dim: multiple: wanted at least 1, got {limit.multiple}")


def _fields(kind: type[Limit]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)  # type: ignore[arg-type]  # every kind in the table is a dataclass


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


if not TYPE_CHECKING:  # so that a misspelt name stays an error of types

    def __getattr__(name: str) -> type[Limit]:
        """A family's own kind of limit, by its class's name."""
        for kind in KINDS.values():
            if kind.__name__ == name:
                return kind
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


arch, dim, equal, grid, instruction = Arch, Dim, Equal, Grid, Instruction
positive, tensor_core = Positive, TensorCore


def platform(*names: str) -> Limit:
    """Run on these platforms only."""
    return Platform(names)


def cpu_feature(name: str, dtype: str = "") -> Limit:
    """Need a CPU vector extension, for one dtype or for all."""
    return Instruction(name, ReasonCode.DEVICE_CAPABILITY_UNSUPPORTED, dtype)


def dtype(*names: str) -> Limit:
    """Take these dtypes only."""
    return Dtype(tuple(dtype_name(dtype_named(name)) for name in names))


def dims(*names: str, **bounds: Any) -> tuple[Limit, ...]:
    """Bound several sizes alike."""
    return tuple(dim(name, **bounds) for name in names)


def absent(fact: str) -> Limit:
    """Refuse a call that brings this optional tensor."""
    return OneOf(fact, ("none",))


def one_of(fact: str, *values: object, foldable: bool = False) -> Limit:
    """Take these values of a fact only; ``foldable`` lets the plan fold others into the mask."""
    return OneOf(fact, values, foldable)


def last_stride_one(*tensors: str) -> Limit:
    """Need a dense last axis."""
    return LastStrideOne(tensors)


def contiguous(*tensors: str) -> Limit:
    """Need contiguous tensors."""
    return Contiguous(tensors)


def aligned(bytes: int, *tensors: str) -> Limit:  # noqa: A002
    """Need aligned data."""
    return Aligned(tensors, bytes)


def generation(*names: str) -> Limit:
    """Run on these NVIDIA generations only: ``turing``, ``ampere``, ``ada``, ``hopper``, ``blackwell``."""
    return Generation(names)
