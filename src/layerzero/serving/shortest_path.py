"""The kernels of several calls that take least together: a shortest path over the candidates of each.

Kernels that are fastest alone need not be fastest side by side: one leaves its result in a layout or dtype that the
next has to convert, or has what the next reads in the caches. So two costs count: what each candidate takes, and what
two candidates of different steps take beyond that when both run, a *conversion*, which may be below zero.

Conversions may be between any two steps. Steps are taken in turn; what is kept for each choice of the candidates that
later steps have conversions with are the two cheapest paths to it. In a chain these are the last step's candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Pair = tuple[str, str]


@dataclass(frozen=True)
class Step:
    """One call, or all calls of a class.

    Attributes:
        name: of the step.
        times_us: what each candidate takes, by its name, microseconds; the first is the one chosen for itself.
        conversions_us: by the name of an earlier step: what its candidate and one of this step take beyond their own
            times, for each such pair; 0 for pairs that are not named.
    """

    name: str
    times_us: Mapping[str, float]
    conversions_us: Mapping[str, Mapping[Pair, float]] = field(default_factory=dict)


class Path(NamedTuple):
    """A candidate for each step, in the order of the steps, and what all of them take together, microseconds."""

    candidates: tuple[str, ...]
    time_us: float


def shortest(steps: Sequence[Step]) -> tuple[Path, Path | None]:
    """The cheapest path and the second, None where there is one path alone.

    Of equally cheap paths, the one comes first whose candidates come first in their steps.
    Raises: ValueError for a step without candidates, and for conversions with a step that is not before.
    """
    places: dict[str, int] = {}
    last: dict[str, int] = {}  # the last step that asks which candidate a step has
    for number, step in enumerate(steps):
        if not step.times_us:
            raise ValueError(f"step {step.name}: wanted at least one candidate, got none")
        if strange := sorted({*step.conversions_us} - {*places}):
            raise ValueError(f"step {step.name}: wanted conversions with steps before it, got {', '.join(strange)}")
        places[step.name] = number
        last |= dict.fromkeys(step.conversions_us, number)
    found: list[_Taken] = [(0.0, ())]
    for number, step in enumerate(steps):
        longer = [
            (time_us + own_us + _conversions(steps, step, name, taken, places), (*taken, place))
            for time_us, taken in found
            for place, (name, own_us) in enumerate(step.times_us.items())
        ]
        asked = [place for name, place in places.items() if place <= number < last.get(name, -1)]
        kept: dict[tuple[int, ...], list[_Taken]] = {}
        for time_us, taken in sorted(longer):
            alike = kept.setdefault(tuple(taken[place] for place in asked), [])
            if len(alike) < 2:
                alike.append((time_us, taken))
        found = [each for alike in kept.values() for each in alike]
    best, *others = [
        Path(tuple([*step.times_us][place] for step, place in zip(steps, taken, strict=True)), time_us)
        for time_us, taken in sorted(found)[:2]
    ]
    return best, others[0] if others else None


_Taken = tuple[float, tuple[int, ...]]
"""A time, and of each step so far the number of its candidate; of equal times the first candidates are least."""


def _conversions(
    steps: Sequence[Step], step: Step, name: str, taken: tuple[int, ...], places: Mapping[str, int]
) -> float:
    found = []
    for before, pairs in step.conversions_us.items():
        place = places[before]
        found.append(pairs.get(([*steps[place].times_us][taken[place]], name), 0.0))
    return math.fsum(found)


def spared(steps: Sequence[Step], path: Path) -> dict[str, float]:
    """What the candidate chosen for itself would take more in its place, by the names of steps that have another."""
    chosen = {step.name: name for step, name in zip(steps, path.candidates, strict=True)}
    found = {}
    for step in steps:
        name, alone = chosen[step.name], next(iter(step.times_us))
        if name != alone:
            own = step.times_us[alone] - step.times_us[name]
            found[step.name] = own + _beside(steps, step.name, alone, chosen) - _beside(steps, step.name, name, chosen)
    return found


def _beside(steps: Sequence[Step], name: str, candidate: str, chosen: Mapping[str, str]) -> float:
    """The conversions of a step's candidate with those that the others have."""
    picked = {**chosen, name: candidate}
    return math.fsum(
        pairs.get((picked[before], picked[step.name]), 0.0)
        for step in steps
        for before, pairs in step.conversions_us.items()
        if name in (before, step.name)
    )
