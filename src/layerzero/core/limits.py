"""The spelling of limits that declarations use: ``limit.dtype("float16")``, ``limit.dim("head_dim", max=256)``.

The same data feeds filtering, explain, the support table and boundary tests. The limits that one family alone has stand
in its folder (``layerzero.ops.attention.limits``); their names are found here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.limit_data import KINDS
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
from layerzero.core.limit_launch import Factor, Generation, Grid, TensorCore
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


if not TYPE_CHECKING:  # so that a misspelt name stays an error of types

    def __getattr__(name: str) -> type[Limit]:
        """A family's own kind of limit, by its class's name."""
        for kind in KINDS.values():
            if kind.__name__ == name:
                return kind
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def platform(*names: str) -> Limit:
    """Run on these platforms only."""
    return Platform(names)


def arch(min: tuple[int, int] | None = None, max: tuple[int, int] | None = None) -> Limit:  # noqa: A002
    """Bound the NVIDIA compute capability, inclusive."""
    return Arch(min, max)


def instruction(name: str) -> Limit:
    """Need a GPU matrix instruction."""
    return Instruction(name)


def cpu_feature(name: str, dtype: str = "") -> Limit:
    """Need a CPU vector extension, for one dtype or for all."""
    return Instruction(name, ReasonCode.DEVICE_CAPABILITY_UNSUPPORTED, dtype)


def dtype(*names: str) -> Limit:
    """Take these dtypes only."""
    return Dtype(tuple(dtype_name(dtype_named(name)) for name in names))


def dim(
    name: str,
    *,
    min: int | None = None,  # noqa: A002
    max: int | None = None,  # noqa: A002
    multiple: int | None = None,
    one_of: tuple[int, ...] = (),
) -> Limit:
    """Bound a size."""
    return Dim(name, min, max, multiple, one_of)


def absent(fact: str) -> Limit:
    """Refuse a call that brings this optional tensor."""
    return OneOf(fact, ("none",))


def one_of(fact: str, *values: object, foldable: bool = False) -> Limit:
    """Take these values of a fact only; ``foldable`` lets the plan fold others into the mask."""
    return OneOf(fact, values, foldable)


def positive(fact: str) -> Limit:
    """Need a number above 0 where one is given."""
    return Positive(fact)


def equal(left: str, right: str) -> Limit:
    """Need two sizes to be the same."""
    return Equal(left, right)


def last_stride_one(*tensors: str) -> Limit:
    """Need a dense last axis."""
    return LastStrideOne(tensors)


def contiguous(*tensors: str) -> Limit:
    """Need contiguous tensors."""
    return Contiguous(tensors)


def aligned(bytes: int, *tensors: str) -> Limit:  # noqa: A002
    """Need aligned data."""
    return Aligned(tensors, bytes)


def grid(
    x: tuple[Factor, ...] = (),
    y: tuple[Factor, ...] = (),
    z: tuple[Factor, ...] = (),
    *,
    max_blocks: int | None = None,
) -> Limit:
    """Launch this grid: each axis a product of sizes (``"batch"``) and numbers of tiles (``("seq_q", 64)``)."""
    return Grid(x, y, z, max_blocks)


def generation(*names: str) -> Limit:
    """Run on these NVIDIA generations only: ``turing``, ``ampere``, ``ada``, ``hopper``, ``blackwell``."""
    return Generation(names)


def tensor_core(min: int) -> Limit:  # noqa: A002
    """Need tensor cores of this generation or a newer one."""
    return TensorCore(min)
