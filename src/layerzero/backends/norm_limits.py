"""What kernels over rows share, norms first: vector loads at a row's start, offsets in 32 bits, a sum before a norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import MAX_ALIGNMENT_BYTES, Facts, TensorFacts
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.reuse_conditions import Condition, SizedCall, conditions


@dataclass(frozen=True, slots=True)
class RowsAligned(limit.OfTensors):
    """Rows start where the kernel's vector load may: it moves as many of 16 bytes as divide a row. A copy repairs it.

    A row of 100 float16 values is read 8 bytes at a time, so its rows need 8 bytes of alignment and not 16. ``size`` is
    what a row has of elements.
    """

    size: str = "hidden"

    def problem(self, name: str, tensor: TensorFacts, facts: Facts, /) -> Reason | None:
        size, got = facts.size(self.size), tensor.row_alignment_bytes
        wanted = math.gcd(MAX_ALIGNMENT_BYTES, size * tensor.dtype.itemsize)
        if got < wanted and tensor.contiguous:  # norms take rows over several axes, whose strides start no row
            row, axis = 1, len(tensor.shape)
            while axis and row < size:
                axis -= 1
                row *= tensor.shape[axis]
            rows = TensorFacts(tensor.shape, (*tensor.strides[:axis], 1), tensor.dtype, tensor.alignment_bytes)
            got = rows.row_alignment_bytes
        return Reason(ReasonCode.MISALIGNED, name, f"{wanted} bytes", f"{got} bytes") if got < wanted else None

    def facts_named(self) -> tuple[str, ...]:
        return (self.size, *self.tensors)

    def describe(self) -> str:
        return f"rows aligned to gcd(16, their bytes): {', '.join(self.tensors)}"


class BoundsSizes(limit.Limit):
    """A limit that holds for smaller sizes wherever it holds."""


@conditions.register
def _bounds_sizes(limit: BoundsSizes, call: SizedCall) -> Iterable[Condition] | None:
    return () if not limit.check(call.largest()) else None


@dataclass(frozen=True, slots=True)
class ElementsBelow(BoundsSizes):
    """Fewer elements than this: beyond, a library's offsets leave 32 bits, or what it writes has no room.

    ``hint`` says what a library does beyond, and in which version; ``platforms`` where, if not everywhere;
    ``gradients`` that it is so in a backward pass alone; ``steps`` what it fills each size up to a multiple of.
    """

    bound: int
    sizes: tuple[str, ...] = ("rows", "hidden")
    hint: str = ""
    platforms: tuple[str, ...] = ()
    gradients: bool = False
    steps: tuple[int, ...] = ()

    def asks(self, facts: Facts) -> bool:
        """Whether it looks at sizes; calls that are alike in all else have one answer."""
        here = not self.platforms or facts.device.platform in self.platforms
        return here and (not self.gradients or bool(facts["requires_grad"]))

    def check(self, facts: Facts) -> limit.Findings:
        if not self.asks(facts):
            return ()
        filled = zip(self.sizes, self.steps or (1,) * len(self.sizes), strict=True)
        got = math.prod([-(-facts.size(name) // step) * step for name, step in filled])
        if got < self.bound:
            return ()
        names, wanted = " * ".join(self.sizes), f"below {self.bound}"
        return (limit.Finding(Reason(ReasonCode.CONSTRAINT_FAILED, names, wanted, got, self.hint)),)

    def facts_named(self) -> tuple[str, ...]:
        return self.sizes

    def describe(self) -> str:
        where = f" on {', '.join(self.platforms)}" if self.platforms else ""
        where += " with gradients" if self.gradients else ""
        where += f", in multiples of {self.steps}" if self.steps else ""
        return f"{' * '.join(self.sizes)} < {self.bound}{where}"


@conditions.register
def _elements_below(limit: ElementsBelow, call: SizedCall) -> Iterable[Condition] | None:
    return _bounds_sizes(limit, call) if limit.asks(call.facts) else ()


def row_length(facts: Facts) -> Hashable:
    """What a norm compiled for one length of rows is made for."""
    given = tuple(name for name in ("weight", "bias") if name in facts.tensors)
    return facts.device.sm, facts["dtype"], facts.size("hidden"), given


def specialised(facts: Facts) -> Hashable:
    """What Triton makes a variant for besides the length of rows: sizes that are 1 or multiples of 16, aligned data."""
    rows = facts.size("rows")
    aligned = tuple(tensor.alignment_bytes == MAX_ALIGNMENT_BYTES for tensor in facts.tensors.values())
    return row_length(facts), rows == 1, rows % 16 == 0, aligned


def sum_then(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What a kernel of norm.add_rms calls whose library has the norm alone."""

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return norm(residual.add_(input), weight, eps=eps)

    return run
