"""Limits on how a kernel is launched: the grid it asks for, and the generation of the device it was written for.

A grid is declared as data: each axis is a product of factors, each factor a size of the call or a number of tiles of
one. ``grid(x=(("seq_q", 64),), y=("batch",), z=("heads",))`` is ``(ceil(seq_q / 64), batch, heads)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerzero.core.device import generations
from layerzero.core.facts import Facts
from layerzero.core.limit_kinds import NOTHING, Finding, Findings, Limit, Repair, violated
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
