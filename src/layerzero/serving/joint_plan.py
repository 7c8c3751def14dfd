"""``plan_mode`` in ``lz.solve``: the kernels of a point of the grid chosen together, and what that says in the plan."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from layerzero.core.evidence import Provenance
from layerzero.core.facts import Facts
from layerzero.core.plan import Report
from layerzero.engine.bucket_table import BucketTable
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import Frozen, FrozenChoice, choice_of
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.plan_document import Joint
from layerzero.serving.joint_times import Kernels, together

NEAR, MOST_KERNELS = 2.0, 3
"""Kernels that take up to so many times the first choice's time alone are run with their neighbours, and how many."""

MOST_STEPS = 12
"""Classes of calls whose kernels are varied at a point: those that take most of its time."""


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
    found = together(candidates, followed, _Runs(run, reports, choices).seconds, passed)
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


class _Runs:
    """Runs a model with the kernels of its plan, and others in some places."""

    def __init__(
        self, run: Callable[[], object], reports: Mapping[str, Report], choices: Mapping[str, FrozenChoice]
    ) -> None:
        self._run, self._choices = run, dict(choices)
        self._facts: dict[str, Facts] = {name: reports[name].facts for name in choices}

    def seconds(self, kernels: Kernels) -> float:
        """What a run takes, after one in which these kernels were chosen and packed their weights."""
        policy = CONFIGURATION.policy
        others = {name: choice_of(REGISTRY.kernel(each), self._facts[name], policy) for name, each in kernels.items()}
        held = self._choices | others
        ENGINE.frozen = Frozen(
            held, BucketTable((self._facts[name], policy, name, each) for name, each in held.items())
        )
        ENGINE.bump()
        try:
            self._run()
            began = _now_s()
            self._run()
            return _now_s() - began
        finally:
            ENGINE.frozen = None
            ENGINE.bump()


def _now_s() -> float:
    """The time; of one thread on a CPU what the process computed, which other processes disturb least."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()
