"""What ``lz.solve`` builds: the kernels of its buckets, and their variants for smaller calls within a bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.engine.bucket_table import BucketTable
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import FrozenChoice, candidate_of
from layerzero.engine.jit import BUILT, BuildOutcome, build_of
from layerzero.serving.background_builds import BUILDS
from layerzero.serving.own_builds import Chosen, built_here, taken_over, wanted, with_builds
from layerzero.tuning.measurement.timing import Deadline
from layerzero.tuning.verification.build_child import build_apart


def build_chosen(calls: Sequence[Facts], deadline: Deadline) -> list[str]:
    """Build what calls would choose if it were built, and where that fails, what they would choose then.

    Returns: what was left, and why.
    """
    return _build(lambda: [each for facts in calls if (each := wanted(facts, BUILDS.given_up))], deadline)


def build_within(
    calls: Sequence[Facts], choices: Mapping[str, tuple[Facts, FrozenChoice]], deadline: Deadline
) -> list[str]:
    """Build the kernels of the buckets that calls lie in, for these calls.

    A library may compile another variant for a smaller call: Triton has one for sizes that are multiples of 16, and one
    for those that are not.

    Returns: what was left, and why.
    """
    policy = CONFIGURATION.policy
    table = BucketTable((facts, policy, name, choice) for name, (facts, choice) in choices.items())

    def found() -> Iterable[Chosen]:
        for facts in calls:
            rows = table.rows(facts, policy)
            if not rows:
                continue
            report = with_builds(facts)
            candidate = candidate_of(report, rows[0].choice)
            if candidate is None or not candidate.legal or not candidate.kernel.jit:
                continue
            if not BUILT.ready(candidate.kernel, facts) and not BUILDS.given_up(candidate.kernel, facts):
                yield Chosen(candidate, report)

    return _build(found, deadline)


def _build(find: Callable[[], Iterable[Chosen]], deadline: Deadline) -> list[str]:
    """Build what is found to be lacking, until nothing is or the time is over."""

    def noted(kernel: Kernel, facts: Facts, outcome: BuildOutcome) -> None:
        if not outcome.log and kernel.builds_apart:
            outcome = taken_over(chosen[build_of(kernel, facts)])
        BUILDS.note(kernel, facts, outcome)

    while True:
        chosen: dict[Any, Chosen] = {each.identity: each for each in find()}
        endless = deadline.left_s == math.inf
        here = [each for each in chosen.values() if not each.kernel.builds_apart] if endless else []
        apart = [(each.kernel, each.facts) for each in chosen.values() if each.kernel.builds_apart]
        if deadline.passed() or not (apart or here):
            break
        build_apart(apart, noted, deadline.passed)
        for each in here:
            noted(each.kernel, each.facts, built_here(each))
        ENGINE.bump()
    lacking = dict.fromkeys(each.kernel.id for each in chosen.values())
    return [f"not built in time, lz.warmup builds it: {', '.join(lacking)}"] if lacking else []
