"""A plan serves calls of other sizes that agree in what its kernel read: run on some of them, it must be right there.

What a callable depends on without having read it where it loads (the sizes of its first call, which it keeps) shows
nowhere else: every other check gives each call a plan of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case
from layerzero.core.reuse_conditions import Conditions, holds
from layerzero.engine.call_source import coarse_key
from layerzero.engine.config import current_policy
from layerzero.engine.functions import CALLS
from layerzero.engine.reuse import conditions_of
from layerzero.testing.single_run import Finding, Trial, duplicate
from layerzero.testing.sizes import CheckSetting, resized, tied

CALLS_OF_A_CLASS = 6
"""Calls of other sizes that one plan is tried on."""


def serves_its_class(kernel: Kernel, setting: CheckSetting, base: Case) -> Finding:
    """The plan of one call, run on others that would find it."""
    start = next(_taken(kernel, setting, [_above(setting, base), base]), None)
    if start is None:
        return Finding("not tried", "no case leaves room in the class of its sizes")
    first, case = start
    dispatcher = CALLS[first.call.function].dispatcher
    plan = first.plan()
    plan.run(**first.function.bind((), duplicate(first.call).arguments))  # what it remembers is remembered now
    conditions = conditions_of(plan, current_policy(), dispatcher.order)
    if conditions is None:
        return Finding("not tried", "a plan serves its very call only")
    tried = 0
    for other, _ in _taken(kernel, setting, _of_the_class(setting, case)):
        if not _found(first, other, conditions):
            continue
        problems = other.problems(duplicate(other.call), other.truth(), first.run)
        if problems:
            text = f"the plan of {first.call.text} serves {other.call.text}, too, and there: {'; '.join(problems)}"
            return Finding("wrong", f"{text}. Read in load what the callable depends on, or facts.only_this_call()")
        tried += 1
        if tried == CALLS_OF_A_CLASS:
            break
    return Finding("passed", f"{tried} other sizes") if tried else Finding("not tried", "no other case finds its plan")


def _above(setting: CheckSetting, base: Case) -> Case:
    """The case with sizes that have neighbours in their class: 2 is the smallest."""
    return resized(setting.operation, base, {axis: max(size, 2) for axis, size in base.sizes.items()})


def _taken(kernel: Kernel, setting: CheckSetting, cases: Iterator[Case] | list[Case]) -> Iterator[tuple[Trial, Case]]:
    for case in cases:
        trial = setting.attempt(kernel, case)
        if trial is not None and not trial.reasons and 0 not in case.sizes.values():
            yield trial, case


def _of_the_class(setting: CheckSetting, base: Case) -> Iterator[Case]:
    """The case with one size changed within its class, alone and with those that go with it: a little, and far."""
    for axis, size in base.sizes.items():
        together = tied(setting.operation, axis)
        for other in _neighbours(size):
            yield resized(setting.operation, base, {axis: other})
            if len(together) > 1:
                yield resized(setting.operation, base, dict.fromkeys(together, other))


def _neighbours(size: int) -> list[int]:
    """Other sizes of the same bit length: the next one, and the end of the class that is farther away."""
    lowest = 1 << size.bit_length() - 1
    ends = sorted((lowest, 2 * lowest - 1), key=lambda end: -abs(end - size))
    near = [each for each in (size + 1, size - 1) if lowest <= each < 2 * lowest]
    return [each for each in dict.fromkeys((*near[:1], ends[0])) if each != size]


def _found(first: Trial, other: Trial, conditions: Conditions) -> bool:
    """Whether a call would find the plan that was kept for another."""
    call = CALLS[first.call.function]
    if other.call.function != first.call.function or other.routed.operation is not first.routed.operation:
        return False
    keys = [call.key_of(**call.function.bind((), each.call.arguments)) for each in (first, other)]
    if keys[0] is None or keys[1] is None:
        return False
    kept, _, _ = coarse_key(keys[0], call.dispatcher.order)
    asked, shapes, strides = coarse_key(keys[1], call.dispatcher.order)
    return kept == asked and holds(conditions, shapes, strides)
