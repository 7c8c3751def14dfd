"""``plan_mode`` in ``lz.solve``: kernels of a point of the grid chosen together, by whole runs of the model's own code.

A time of one call says nothing of its neighbours: of what its result has to be converted into, and of what the caches
hold when the next one begins. So the model itself runs: with the kernels that are chosen each for itself, with another
one in one place, and with others in two places that follow each other. What the second place adds beyond both is the
conversion between them. The shortest path over that runs in turn with the first choice, and is taken if it gains
:data:`LEAST`: no plan is slower by what was only added up.

The kernels of several calls that take least together: a shortest path over the candidates of each.

Kernels that are fastest alone need not be fastest side by side: one leaves its result in a layout or dtype that the
next has to convert, or has what the next reads in the caches. So two costs count: what each candidate takes, and what
two candidates of different steps take beyond that when both run, a *conversion*, which may be below zero.

Conversions may be between any two steps. Steps are taken in turn; what is kept for each choice of the candidates that
later steps have conversions with are the two cheapest paths to it. In a chain these are the last step's candidates.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch

from layerzero.core.evidence import Provenance
from layerzero.core.plan import Report
from layerzero.engine.bucket_table import BucketTable
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import Frozen, FrozenChoice, choice_of
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.plan_document import Joint

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


LEAST = 0.01
"""A path must gain so much over the kernels that are chosen each for itself: less is within what runs differ by."""

ROUNDS, LAST_ROUNDS = 5, 9
"""Runs of each variant, and of the path and the first choice at the end; an odd number, so that one is the median."""

MOST_PAIRS = 16
"""Pairs of candidates that are run at most, those first that take least alone."""

NEAR, MOST_KERNELS = 2.0, 3
"""Kernels that take up to so many times the first choice's time alone are run with their neighbours, and how many."""

MOST_STEPS = 12
"""Classes of calls whose kernels are varied at a point: those that take most of its time."""

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


def chosen_together(
    point: Mapping[str, int],
    run: Callable[[], object],
    sequence: Sequence[str],
    reports: Mapping[str, Report],
    choices: dict[str, FrozenChoice],
    settled: set[str],
    passed: Callable[[], bool],
) -> Joint:
    """Choose the kernels of one point of the grid together, and put those that are others into ``choices``.

    Args:
        run: makes all calls of the point, for real.
        sequence: the names of the calls that it makes, one after the other.
        reports: what is known of the candidates of each call.
        settled: names of calls that points before had; their kernels stay, and those of this point are added.
    """
    counted = Counter(each for each in sequence if each in choices)
    candidates = {name: _times(reports[name], count) for name, count in counted.items()}
    largest = sorted(counted, key=lambda name: -next(iter(candidates[name].values())))
    for name in {*settled, *largest[MOST_STEPS:]} & {*candidates}:
        candidates[name] = dict([next(iter(candidates[name].items()))])
    followed = [pair for pair in itertools.pairwise(sequence) if {*pair} <= {*candidates}]
    before = dict(choices)

    def seconds(kernels: Kernels) -> float:
        """What a run takes, after one in which these kernels were chosen and packed their weights."""
        policy = CONFIGURATION.policy
        named = {name: (REGISTRY.kernel(each), reports[name].facts) for name, each in kernels.items()}
        held = before | {name: choice_of(kernel, facts, policy) for name, (kernel, facts) in named.items()}
        table = BucketTable((reports[name].facts, policy, name, each) for name, each in held.items())
        ENGINE.frozen = Frozen(held, table)
        ENGINE.bump()
        try:
            run()
            began = _now_s()
            run()
            return _now_s() - began
        finally:
            ENGINE.frozen = None
            ENGINE.bump()

    found = together(candidates, followed, seconds, passed)
    for name, why in found.reasons.items():
        kernel = REGISTRY.kernel(found.kernels[name])
        chosen = choice_of(kernel, reports[name].facts, CONFIGURATION.policy)
        choices[name] = msgspec.structs.replace(chosen, why=why)
    settled.update(counted)
    second = None if found.second is None else dict(zip(candidates, found.second.candidates, strict=True))
    beside = {name: each for name, each in (second or {}).items() if each != found.kernels[name]}
    lost_us = found.second.time_us if found.second is not None else 0.0
    return Joint(dict(point), found.alone_us, found.together_us, sorted(found.reasons), beside, lost_us, found.note)


def _times(report: Report, count: int) -> dict[str, float]:
    """The kernels that may be as good as the first choice, by what they take alone in so many calls, microseconds.

    The first choice alone where it was not measured here: nothing says which others are near.
    """
    first = report.chosen
    assert first is not None
    measured = {
        each.kernel.id: each.evidence.time_us * count
        for each in report.candidates
        if each.legal and each.evidence is not None and each.evidence.provenance is Provenance.MEASURED
    }
    own = measured.pop(first.kernel.id, None)
    if own is None or report.locked:
        return {first.kernel.id: 0.0}
    near = sorted((us, name) for name, us in measured.items() if us <= NEAR * own)
    return {first.kernel.id: own} | {name: us for us, name in near[: MOST_KERNELS - 1]}


def _now_s() -> float:
    """The time; of one thread on a CPU what the process computed, which other processes disturb least."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()
