"""What products may be off by whose rows may be rounded to eight bits, by a scale for each row or part of one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.core.judge import Elementwise, Given, apart

CODES = 127
"""Steps from 0 to a row's largest number; of codes with a zero point 255 from its least to its largest."""

SIGMAS = 8.0
"""Of 2e9 sums of independent errors none is as far from 0, in units of their deviation."""


class OfRows(ABC):
    """Sums of products of rows that may be rounded first; ``sums`` is how exact sums are."""

    __slots__ = ()
    sums: Elementwise

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Those that there is a tolerance for."""
        return self.sums.dtypes

    @abstractmethod
    def basis(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The size of what is added up, what rounding moves, and the rows of which nothing is said."""

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:
        """Say which element is farthest off, where rounded rows moved some and of others nothing is said."""
        terms, moved, unsaid = given.basis
        tolerance = self.sums.allowed(given)
        return apart(torch.where(unsaid, want.to(got.dtype), got), want, tolerance, terms + moved / tolerance.rtol)


@dataclass(frozen=True, slots=True)
class OfNarrowRows(OfRows):
    """Sums of products of rows that a kernel rounds to eight bits in its own way, or does not round.

    Attributes:
        sums: how exact sums are.
        terms: the size of what is added up.
        numbers: the weight (N, K).
        reason: why that far.
    """

    sums: Elementwise
    terms: Callable[[Mapping[str, Any]], Tensor]
    numbers: Callable[[Mapping[str, Any]], Tensor]
    reason: str = "libraries round rows by one scale or by one for each group, with a zero point or without"

    def __str__(self) -> str:
        return f"{self.sums}; and {SIGMAS:g} deviations of what rounding rows to eight bits adds"

    def basis(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        rows = arguments["input"].double()
        strange = (~rows.isfinite()).any(-1, keepdim=True)
        rows = rows.nan_to_num(0.0, 0.0, 0.0)
        step = rows.abs().amax(-1, keepdim=True) / CODES
        moved = SIGMAS / math.sqrt(12.0) * step * self.numbers(arguments).square().sum(-1).sqrt()
        return self.terms({**arguments, "input": rows}), moved, strange
