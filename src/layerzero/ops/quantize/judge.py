"""What a right rounding is: the reference's, or its neighbour where a quotient lies as good as between both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.core.judge import AnyDtype, Given, first_of
from layerzero.ops.quantize.formats import Format, rounded, widened

NEAR = 2e-6
"""How far apart two quotients may be, relative: a division, a product and a scale, each rounded to float32."""


@dataclass(frozen=True, slots=True)
class Rounded(AnyDtype):
    """Numbers of a format that quotients round to.

    Attributes:
        format: theirs.
        quotients: from the call's canonical arguments in float64, what is rounded, and where nothing is said: a mask.
        reason: why a number may be another one.
    """

    format: Format
    quotients: Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]
    reason: str = (
        "a quotient that lies within rounding of the middle between two numbers may become either: libraries multiply "
        "by the reciprocal of a scale, or compute it in another order"
    )

    def __str__(self) -> str:
        return f"the nearest {self.format.name} number, either one within {NEAR:g} of the middle between two"

    def basis(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The quotients, and where nothing is said."""
        return self.quotients(arguments)

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:
        """Say where the first number is another one."""
        quotients, unsaid = given.basis
        wide = torch.float64
        mine, theirs = (self._numbers(each.detach()) for each in (got, want))
        slack = quotients.abs() * NEAR
        low, high = (
            widened(rounded(each, self.format), self.format, wide) for each in (quotients - slack, quotients + slack)
        )
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        either = (low <= mine) & (mine <= high) & (low <= theirs) & (theirs <= high)
        wrong = ~(same | either | unsaid)
        if not wrong.any():
            return ""
        where = first_of(wrong)
        found = f"wanted {theirs[where].item():g} of {quotients[where].item():.9g}, got {mine[where].item():g}"
        return f"{int(wrong.sum())} of {wrong.numel()} numbers are not the nearest ones; first at {where}: {found}"

    def _numbers(self, result: Tensor) -> Tensor:
        """What a result stands for; of float64 it is the numbers already."""
        if result.dtype is torch.float64:
            return result
        return widened(result, self.format, torch.float64)


@dataclass(frozen=True, slots=True)
class Scales(AnyDtype):
    """Scales near the reference's.

    Attributes:
        unsaid: from the call's canonical arguments, where nothing is said: a mask in their shape.
        reason: why that far.
    """

    unsaid: Callable[[Mapping[str, Any]], Tensor]
    reason: str = "one division in float32"

    def __str__(self) -> str:
        return "scales within 1e-6 of the reference's"

    def basis(self, arguments: Mapping[str, Any]) -> Tensor:
        """Where nothing is said."""
        return self.unsaid(arguments)

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:
        """Say where the first scale is too far."""
        mine, theirs = (each.detach().to(torch.float64) for each in (got, want))
        wrong = ~(torch.isclose(mine, theirs, rtol=1e-6, atol=0.0, equal_nan=True) | given.basis)
        if not wrong.any():
            return ""
        where = first_of(wrong)
        found = f"wanted {theirs[where].item():.9g}, got {mine[where].item():.9g}"
        return f"{int(wrong.sum())} of {wrong.numel()} scales are too far; first at {where}: {found}"


@dataclass(frozen=True, slots=True)
class RoundedOnce(AnyDtype):
    """Products that are rounded once, to the dtype of the result, or in float32 and then to that."""

    reason: str = "a product in float32, rounded to the dtype of the result: one step of it, and 2^-22"

    def __str__(self) -> str:
        return "within one step of the result's dtype"

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:  # noqa: ARG002  # the protocol's names
        """Say where the first product is too far."""
        mine, theirs = (each.detach().to(torch.float64) for each in (got, want))
        kind = torch.finfo(got.dtype)
        relative, least = max(kind.eps, 2.0**-22), max(kind.smallest_normal * kind.eps, 2.0**-149)
        wrong = ~torch.isclose(mine, theirs, rtol=relative, atol=least, equal_nan=True)
        if not wrong.any():
            return ""
        where = first_of(wrong)
        found = f"wanted {theirs[where].item():.9g}, got {mine[where].item():.9g}"
        return f"{int(wrong.sum())} of {wrong.numel()} numbers are too far; first at {where}: {found}"
