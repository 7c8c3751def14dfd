"""Kernels chosen together: what candidates take next to each other, measured in whole runs of the model's own code.

A time of one call says nothing of its neighbours: of what its result has to be converted into, and of what the caches
hold when the next one begins. So the model itself runs: with the kernels that are chosen each for itself, with another
one in one place, and with others in two places that follow each other. What the second place adds beyond both is the
conversion between them. The shortest path over that runs in turn with the first choice, and is taken if it gains
:data:`LEAST`: no plan is slower by what was only added up.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from layerzero.serving.shortest_path import Path, Step, shortest, spared

LEAST = 0.01
"""A path must gain so much over the kernels that are chosen each for itself: less is within what runs differ by."""

ROUNDS, LAST_ROUNDS = 5, 9
"""Runs of each variant, and of the path and the first choice at the end; an odd number, so that one is the median."""

MOST_PAIRS = 16
"""Pairs of candidates that are run at most, those first that take least alone."""

Kernels = Mapping[str, str]
"""The kernel of each class of calls, by its name."""


class Found(NamedTuple):
    """What choosing together found.

    Attributes:
        kernels: the kernel of each step, by its name.
        reasons: why those that are others than before, by the name of the step.
        alone_us, together_us: a run with the kernels chosen each for itself, and with these; equal where they are.
        second: the second path, and what it would take; None where nothing else was run.
        note: what was tried, and what came of it.
    """

    kernels: dict[str, str]
    reasons: dict[str, str]
    alone_us: float
    together_us: float
    second: Path | None
    note: str


def together(
    candidates: Mapping[str, Mapping[str, float]],
    neighbours: Iterable[tuple[str, str]],
    run_s: Callable[[Kernels], float],
    passed: Callable[[], bool],
) -> Found:
    """Choose a kernel for each step by whole runs.

    Args:
        candidates: what each kernel of a step takes in all calls of a run, microseconds, as measured alone; that chosen
            for itself first. A step with one has no choice.
        neighbours: steps that follow each other, those before first.
        run_s: runs the model with these kernels for the steps that it names, and the first of all others; seconds.
        passed: whether time is over: then the first choice stays.
    """
    alone = {name: next(iter(kernels)) for name, kernels in candidates.items()}
    singles = [{name: each} for name, kernels in candidates.items() for each in [*kernels][1:]]
    places = {name: number for number, name in enumerate(candidates)}
    beside = dict.fromkeys((a, b) if places[a] < places[b] else (b, a) for a, b in neighbours if a != b)
    pairs = [
        {first: one, second: other}
        for first, second in beside
        for one, other in itertools.product([*candidates[first]][1:], [*candidates[second]][1:])
    ]
    pairs.sort(
        key=lambda pair: sum(candidates[name][each] - candidates[name][alone[name]] for name, each in pair.items())
    )
    if not singles:
        return Found(alone, {}, 0.0, 0.0, None, "no call has two kernels that take about as long")
    ratios, alone_us = _raced(singles, run_s, ROUNDS, passed)
    if len(ratios[0]) < ROUNDS:
        return Found(alone, {}, alone_us, alone_us, None, "there was no time to run the others")
    variants = [*singles, *pairs[:MOST_PAIRS]]
    if pairs:
        ratios += _raced(variants[len(singles) :], run_s, ROUNDS, passed)[0]
    if len(ratios[-1]) < ROUNDS:  # no time for pairs: kernels in one place alone are known
        variants, ratios = singles, ratios[: len(singles)]
    steps = _steps(candidates, variants, ratios, alone_us)
    best, second = shortest(steps)
    kernels = dict(zip(candidates, best.candidates, strict=True))
    tried = f"{len(singles)} kernels in place of another, {len(variants) - len(singles)} pairs"
    if kernels == alone:
        return Found(
            alone, {}, alone_us, alone_us, second, f"{tried}: each kernel is the best among its neighbours, too"
        )
    changed = {name: each for name, each in kernels.items() if each != alone[name]}
    (last,), last_us = _raced([changed], run_s, LAST_ROUNDS, passed)
    gain = 1 / statistics.median(last) - 1 if len(last) == LAST_ROUNDS else -math.inf
    if gain < LEAST or sum(each < 1 for each in last) < LAST_ROUNDS - 1:
        said = "there was no time to run it again" if gain == -math.inf else f"runs again gained {gain:+.1%}"
        note = f"{tried}: another path was shorter, and is left: {said}"
        return Found(alone, {}, alone_us, alone_us, best, note)
    lost = Path(tuple(alone.values()), last_us)
    why = {
        name: f"{alone[name]} lost: alone its calls take {candidates[name][alone[name]]:.0f} us for "
        f"{candidates[name][kernels[name]]:.0f}, with their neighbours {us:.0f} more"
        for name, us in spared(steps, best).items()
    }
    return Found(kernels, why, last_us, last_us / (1 + gain), lost, f"{tried}: they gain {gain:+.1%} together")


def _raced(
    variants: Sequence[Kernels], run_s: Callable[[Kernels], float], rounds: int, passed: Callable[[], bool]
) -> tuple[list[list[float]], float]:
    """What each variant takes in units of the first choice, by rounds; and that, microseconds.

    All take turns in a round, every other one backwards: what a round's runs have in common their ratio does not have.
    """
    ratios: list[list[float]] = [[] for _ in variants]
    alone: list[float] = []
    for turn in range(rounds):
        if passed():
            break
        order = [*range(-1, len(variants))]
        taken = {place: run_s(variants[place] if place >= 0 else {}) for place in (order if turn % 2 else order[::-1])}
        alone.append(taken[-1])
        for place, each in enumerate(ratios):
            each.append(taken[place] / taken[-1])
    return ratios, statistics.median(alone) * 1e6 if alone else 0.0


def _steps(
    candidates: Mapping[str, Mapping[str, float]],
    variants: Sequence[Kernels],
    ratios: Sequence[Sequence[float]],
    alone_us: float,
) -> list[Step]:
    """Steps whose times say how much longer runs took; a difference that rounds do not agree on is none."""
    found = {tuple(each.items()): of for each, of in zip(variants, ratios, strict=True)}
    more: dict[tuple[str, str], float] = {
        places[0]: _agreed([each - 1 for each in of]) for places, of in found.items() if len(places) == 1
    }
    conversions: dict[str, dict[str, dict[tuple[str, str], float]]] = {}
    for places, of in found.items():
        if len(places) == 2:
            (first, one), (second, other) = places
            beyond = _agreed([each - 1 - more[places[0]] - more[places[1]] for each in of])
            conversions.setdefault(second, {}).setdefault(first, {})[one, other] = beyond * alone_us
    steps = []
    for name, kernels in candidates.items():
        own, *others = kernels
        times = {own: kernels[own]} | {each: kernels[own] + more[name, each] * alone_us for each in others}
        steps.append(Step(name, times, conversions.get(name, {})))
    return steps


def _agreed(differences: Sequence[float]) -> float:
    """The median of differences; 0 where not all have its sign."""
    middle = statistics.median(differences)
    return middle if all(each * middle > 0 for each in differences) else 0.0
