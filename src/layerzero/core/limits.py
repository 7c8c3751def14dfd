"""The spelling of limits that declarations use: ``limit.dtype("float16")``, ``limit.dim("head_dim", max=256)``.

The same data feeds filtering, explain, the support table and boundary tests. The limits that one family alone has stand
in its folder (``layerzero.ops.attention.limits``); their names are found here, too.

A limit is plain data and back: ``{"kind": "dim", "name": "head_dim", "max": 256}``. A new kind of limit of any
operation is one line in ``KINDS``; those of one family stand in its folder. What is not in the table is code: data can
name it, not make it.

The grid of a launch is declared as data: each axis is a product of factors, each factor a size of the call or a number
of tiles of one. ``grid(x=(("seq_q", 64),), y=("batch",), z=("heads",))`` is ``(ceil(seq_q / 64), batch, heads)``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from layerzero.core.device import generations
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import (
    NOTHING,
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
    rule,
    violated,
)
from layerzero.core.reasons import Reason, ReasonCode

Factor = str | tuple[str, int]
"""A size by name, or (name, tile) for the number of tiles that cover it."""

LAUNCH_CODES = frozenset({ReasonCode.CUDA_GRID_DIM_EXCEEDED, ReasonCode.CUDA_BLOCK_LIMIT_EXCEEDED})
"""What a smaller batch may cure."""

SPLIT = Repair("split", "")

_UNBOUNDED = 2**63


@dataclass(frozen=True, slots=True)
class Grid(Limit):
    """The launch grid that the kernel makes of a call fits the device.

    A grid that does not fit is CUDA's "invalid configuration argument" at the launch, or, where a library does not
    check, no launch and a result that was never written.

    Attributes:
        x, y, z: factors of each axis; an axis without factors is 1.
        max_blocks: largest number of blocks in all, where the kernel numbers them itself; holds on every device.
    """

    x: tuple[Factor, ...] = ()
    y: tuple[Factor, ...] = ()
    z: tuple[Factor, ...] = ()
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        for axis in (self.x, self.y, self.z):
            for factor in axis:
                sized = isinstance(factor, tuple) and len(factor) == 2 and isinstance(factor[0], str) and factor[1] > 0
                if not (sized or isinstance(factor, str)):
                    raise ValueError(f"grid: wanted a size's name or (name, tile), got {factor!r}")

    def blocks(self, facts: Facts) -> tuple[int, int, int]:
        """The grid of a call, ``(x, y, z)`` in blocks."""
        x, y, z = (math.prod(_count(factor, facts) for factor in axis) for axis in (self.x, self.y, self.z))
        return x, y, z

    def check(self, facts: Facts) -> Findings:
        blocks = self.blocks(facts)
        findings = []
        for axis, size, most in zip("xyz", blocks, facts.device.max_grid or (), strict=False):
            if size > most:
                code, name = ReasonCode.CUDA_GRID_DIM_EXCEEDED, f"grid.{axis}"
                findings.append(Finding(Reason(code, name, f"at most {most}", f"{size} ({self._axis(axis)})"), SPLIT))
        total = math.prod(blocks)
        if self.max_blocks is not None and total > self.max_blocks:
            code, wanted = ReasonCode.CUDA_BLOCK_LIMIT_EXCEEDED, f"at most {self.max_blocks}"
            findings.append(Finding(Reason(code, "blocks", wanted, f"{total} ({self._formula()})"), SPLIT))
        return tuple(findings)

    def safe_size(self, cut: str, facts: Facts) -> int:
        """Largest size of an axis whose grid fits: the limit divided by the blocks of one entry; 0 if not one does."""
        axes = (self.x, self.y, self.z)
        one = [math.prod(_count(factor, facts) for factor in axis if factor != cut) for axis in axes]
        found = facts.size(cut)
        for axis, size, most in zip(axes, one, facts.device.max_grid or (), strict=False):
            found = min(found, _room(most, size, axis.count(cut)))
        if self.max_blocks is not None:
            times = sum(axis.count(cut) for axis in axes)
            found = min(found, _room(self.max_blocks, math.prod(one), times))
        return found

    def facts_named(self) -> tuple[str, ...]:
        factors = (*self.x, *self.y, *self.z)
        return tuple(dict.fromkeys(factor if isinstance(factor, str) else factor[0] for factor in factors))

    def describe(self) -> str:
        most = f", at most {self.max_blocks} blocks" if self.max_blocks is not None else ""
        return f"launches {self._formula()}{most}"

    def _formula(self) -> str:
        return f"({', '.join(self._axis(axis) for axis in 'xyz')})"

    def _axis(self, name: str) -> str:
        factors: tuple[Factor, ...] = getattr(self, name)
        return " * ".join(each if isinstance(each, str) else f"ceil({each[0]} / {each[1]})" for each in factors) or "1"


def _count(factor: Factor, facts: Facts) -> int:
    return facts.size(factor) if isinstance(factor, str) else -(-facts.size(factor[0]) // factor[1])


def _room(most: int, one: int, times: int) -> int:
    """Largest size that keeps ``one`` blocks an entry below a bound; ``times`` says how often it is a factor."""
    if times == 0:
        return _UNBOUNDED if one <= most else 0
    return most // max(one, 1) if times == 1 else 0  # a size that counts twice: no kernel launches that


@dataclass(frozen=True, slots=True)
class Generation(Limit):
    """The device is of one of these NVIDIA generations (``turing`` to ``blackwell``)."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in (known := [each.name for each in generations()]):
                raise ValueError(f"generation: wanted {' or '.join(known)}, got {name!r}")

    def check(self, facts: Facts) -> Findings:
        got = facts.device.generation
        if got in self.names:
            return NOTHING
        return violated(
            ReasonCode.GPU_GENERATION_UNSUPPORTED, "generation", " or ".join(self.names), got or "none of NVIDIA's"
        )

    def describe(self) -> str:
        return f"generation: {' or '.join(self.names)}"


@dataclass(frozen=True, slots=True)
class TensorCore(Limit):
    """Tensor cores of this generation or a newer one, numbered as docs/decisions/0011 says."""

    min: int

    def check(self, facts: Facts) -> Findings:
        got = facts.device.tensor_core_generation
        if got is not None and got >= self.min:
            return NOTHING
        return violated(
            ReasonCode.TENSOR_CORE_GEN_UNSUPPORTED, "tensor_core_generation", f">= {self.min}", got or "none"
        )

    def describe(self) -> str:
        return f"tensor cores of generation >= {self.min}"


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
    "rule",
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
