"""What declarations say of results under one name: ``judge=lz.judges.Exact("it only moves numbers")``.

Here, too, the judge of random places: right if each may come, and if they come as often as they should.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.core.judge import Elementwise, Exact, Given, Indices, Judge, Property, first_of, place_of, reproducible

__all__ = ["Distribution", "Elementwise", "Exact", "Given", "Indices", "Judge", "Property", "reproducible"]


LEAST_EXPECTED = 5.0
"""Places of which fewer draws are expected are counted together: a chi-square test is not one for less."""


@dataclass(frozen=True, slots=True)
class Distribution(Judge):
    """Draws of places along the last axis of probabilities.

    A single result is right if each draw is one that may come. Whether they come as often as they should is tested on
    many draws of the same rows, by chi-square.

    Attributes:
        probabilities: from the call's canonical arguments, floating ones in float64, those of each row; they need not
            add up to 1. Of a row of zeros, or with NaN in it, nothing is said.
        reason: why they are these.
        alpha: how improbable the counts of a right kernel may be before they count as wrong.
        support: which places may come at all, where that is more than those with a probability: where a tie decides
            which place is kept, any of them may. No counts are taken of such rows.
        nothing: whether a draw may be -1, which is none; its probability is then the first of each row, and the others
            follow.

    Shapes: probabilities and support (*, N), result (*) or (*, draws)
    """

    probabilities: Callable[[Mapping[str, Any]], Tensor]
    reason: str
    alpha: float = 1e-6
    support: Callable[[Mapping[str, Any]], Tensor] | None = None
    nothing: bool = False

    def __str__(self) -> str:
        return f"draws of the reference's probabilities: those that may come, by a chi-square test at {self.alpha:g}"

    def basis(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The probabilities of each row, which add up to 1, and what may come."""
        found = self.probabilities(arguments).to(torch.float64)
        support = found > 0 if self.support is None else self.support(arguments)
        return found / found.sum(-1, keepdim=True), support

    def places(self, got: Tensor) -> Tensor:
        """Where the probabilities of draws stand."""
        return got.long() + self.nothing

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:  # noqa: ARG002  # the reference's is one draw
        probabilities, support = given.basis
        got = self.places(given.canonical(got.detach()))
        several = got.ndim == support.ndim
        got = got if several else got.unsqueeze(-1)
        count = support.shape[-1]
        said = ~probabilities.isnan().any(-1, keepdim=True)  # a row of zeros has none either, once it is divided by 0
        outside = said & ((got < 0) | (got >= count))
        if outside.any():
            where = first_of(outside)
            wanted = f"{-self.nothing} to {count - 1 - self.nothing}"
            return f"{place_of(where, several)}: wanted a place from {wanted}, got {int(got[where]) - self.nothing}"
        never = said & ~support.gather(-1, got.clamp(0, max(count - 1, 0)))
        if not never.any():
            return ""
        where = first_of(never)
        row = f"row {where[:-1]} has {int(support[where[:-1]].sum())} that can"
        wrong = f"{int(never.sum())} of {got.numel()} draws cannot come"
        found = f"got {int(got[where]) - self.nothing}, of probability 0"
        return f"{wrong}; first at {place_of(where, several)}: {found}; {row}"

    def unlikely(self, counts: Tensor, probabilities: Tensor) -> str:
        """Say how counts of draws are too improbable, all rows together; empty if they are not.

        Shapes: counts (rows, N), probabilities (rows, N), which add up to 1
        """
        statistic, freedom, worst, told = 0.0, 0, 0.0, ""
        wanted_counts = probabilities.double() * counts.double().sum(-1, keepdim=True)
        for row, (got, expected) in enumerate(zip(counts.double(), wanted_counts, strict=True)):
            far = (got - expected) / expected.clamp(min=LEAST_EXPECTED).sqrt()
            place = int(far.abs().argmax())
            if abs(float(far[place])) >= worst:
                worst = abs(float(far[place]))
                wanted = f"wanted about {float(expected[place]):.0f}, got {int(got[place])}"
                told = f"place {place} of row {row}: {wanted} of {int(got.sum())}"
            often = expected >= LEAST_EXPECTED
            rare, few = float(got[~often].sum()), float(expected[~often].sum())
            chance = _so_many(rare, few) * len(counts)
            if chance < self.alpha:
                return (
                    f"drawn with other probabilities: row {row} has {rare:.0f} draws of places that should come "
                    f"{few:.2g} times together, which a right kernel reaches with probability {chance:.2g}; {told}"
                )
            pairs = _counted(got[often].tolist(), expected[often].tolist(), rare, few)
            statistic += sum((mine - theirs) ** 2 / theirs for mine, theirs in pairs)
            freedom += max(len(pairs) - 1, 0)
        if freedom < 1:
            return ""
        halves = [torch.tensor(each / 2, dtype=torch.float64) for each in (freedom, statistic)]
        chance = float(torch.special.gammaincc(*halves))
        if chance >= self.alpha:
            return ""
        return (
            f"drawn with other probabilities: chi-square {statistic:.0f} with {freedom} degrees of freedom, which a "
            f"right kernel reaches with probability {chance:.2g}, below {self.alpha:g}; farthest off {told}"
        )


def _so_many(found: float, expected: float) -> float:
    """A bound of the probability that so many or more come where fewer are expected (Chernoff's)."""
    if found <= expected:
        return 1.0
    return math.exp(found - expected - found * math.log(found / expected)) if expected else 0.0


def _counted(got: list[float], expected: list[float], rare: float, few: float) -> list[tuple[float, float]]:
    """Draws found and expected of each place; of the rare ones together, or with the least likely other."""
    pairs = sorted(zip(got, expected, strict=True), key=lambda pair: -pair[1])
    if few >= LEAST_EXPECTED:
        return [*pairs, (rare, few)]
    if pairs:
        pairs[-1] = pairs[-1][0] + rare, pairs[-1][1] + few
    return pairs
