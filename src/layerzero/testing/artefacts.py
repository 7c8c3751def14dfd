"""What compiles: an artefact is built before a kernel is checked, and its key says what it was compiled for.

Here, too, the pieces that the battery puts together, and a plan run on calls of other sizes that it serves. What a
callable depends on without having read it where it loads (the sizes of its first call, which it keeps) shows nowhere
else: every other check gives each call a plan of its own.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation
from layerzero.core.reasons import ReasonCode
from layerzero.core.reuse_conditions import Conditions, holds
from layerzero.engine.call_source import coarse_key
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.functions import CALLS
from layerzero.engine.reuse import conditions_of
from layerzero.testing import randomness
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import Finding, Trial, attempt, build, duplicate, poisoned, raised, tensors
from layerzero.testing.sizes import CheckSetting, base_case, resized, tied, with_axis

BUILDING_SECONDS = 10.0
"""After so many seconds of compiling for a kernel, no other build is begun; what is not built is not tried."""

STALL_SECONDS = 0.25
"""A first call that takes so much longer than the second, and five times as long, compiled something."""

SIZES = 6
"""Calls of other sizes that an artefact is tried on."""

_building: dict[str, float] = defaultdict(float)


def built(kernel: Kernel, setting: CheckSetting, note: Callable[[str], None]) -> Finding:
    """Build a kernel for its first case. Raises: ImportError or OSError if its library does not load."""
    spent = _building[kernel.id]
    if spent > BUILDING_SECONDS:
        return Finding("not tried", f"not built: building others took {spent:.0f} s already")
    with SCOPES.scope({"allow_jit_compile": True}):
        case, trial = base_case(kernel, setting)
    call = setting.call(case) if trial is None else trial.call  # with handles, where it takes none without
    note(f"building for {call.text}")
    started = time.perf_counter()
    build(kernel, setting.operation, call)
    _building[kernel.id] += time.perf_counter() - started
    trial = attempt(kernel, setting.operation, call)
    if trial is None or trial.reasons:
        return Finding("refused", trial.codes if trial else "no call")
    return Finding("passed", "built")


def build_key(kernel: Kernel, setting: CheckSetting, base: Case) -> Finding:
    """Calls of other sizes whose key says that they are built compile nothing: else a request would wait for it."""
    tried = 0
    for text, trial in _others(kernel, setting, base):
        plan = trial.plan()  # a constant for the shape may be made here; what compiles does so when it runs
        seconds = []
        for _ in range(2):
            call = duplicate(trial.call)
            bound = trial.function.bind((), call.arguments)
            started = time.perf_counter()
            try:
                plan.run(**bound)
            except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
                return Finding("wrong", f"build_key says that {text} is built, but it {raised(error)}")
            seconds.append(time.perf_counter() - started)
        first, second = seconds
        if first - second > STALL_SECONDS and first > 5 * second:
            return Finding(
                "wrong",
                f"build_key says that {text} is built, but its first call took {first:.2f} s and its second "
                f"{second:.4f} s: it compiles for what the key does not hold",
            )
        tried += 1
        if tried == SIZES:
            break
    return Finding("passed", f"{tried} other sizes") if tried else Finding("not tried", "it is built for no other size")


def _others(kernel: Kernel, setting: CheckSetting, base: Case) -> Iterator[tuple[str, Trial]]:
    """Calls that the kernel takes as built, one axis changed each."""
    for axis, size in base.sizes.items():
        for other in (size * 2, size + 1, max(size // 2, 1)):
            for changed in with_axis(setting.operation, base, axis, other):
                if other != size and (trial := setting.taken(kernel, changed)):
                    yield f"{axis} = {other}", trial
                    break


CALLS_OF_A_CLASS = 6
"""Calls of other sizes that one plan is tried on."""


def serves_its_class(kernel: Kernel, setting: CheckSetting, base: Case) -> Finding:
    """The plan of one call, run on others that would find it."""
    larger = resized(setting.operation, base, {axis: max(size, 2) for axis, size in base.sizes.items()})
    start = next(_taken(kernel, setting, [larger, base]), None)  # 2 is the smallest with a neighbour in its class
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


def _taken(kernel: Kernel, setting: CheckSetting, cases: Iterator[Case] | list[Case]) -> Iterator[tuple[Trial, Case]]:
    for case in cases:
        if 0 not in case.sizes.values() and (trial := setting.taken(kernel, case)):
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


Note = Callable[[str], None]
"""Called with what is about to run."""

Play = Callable[[Note], Finding | None]
"""What a check does; None where there is nothing to check."""


def just(function: Callable[..., Finding], *arguments: Any) -> Play:
    """A check of one step, which needs no telling what it is at."""
    return lambda _: function(*arguments)


def fairly(few: Trial | None) -> Finding:
    """Draws of a few rows against their probabilities."""
    if few is None:
        return Finding("not tried", "no axis of the operation is worked on apart, along which rows could be repeated")
    return randomness.drawn_fairly(few)


def one(setting: CheckSetting, case: Case) -> list[tuple[str, RandomCall]]:
    """The call of a case."""
    return [("", setting.call(case))]


def with_sizes(operation: Operation, cheap: Callable[[], Case], sizes: dict[str, int]) -> list[Case]:
    """The cheap case with other sizes."""
    return [resized(operation, cheap(), sizes)]


def with_value(trial: Trial, value: float, place: int) -> list[tuple[str, RandomCall]]:
    """The call with one such element in its first floating tensor, where a reference says what must come of it."""
    inputs = [each.name for each in trial.facts.operation.schema.inputs]
    floating = (name for name, each in tensors(trial.call).items() if name in inputs and each.is_floating_point())
    return [(f"{value} in {name}", poisoned(trial.call, name, place, value)) for name in itertools.islice(floating, 1)]


def refusal(trial: Trial | None) -> Finding:
    """Why a kernel takes none of some calls, given the first that it refused."""
    if trial is None:
        return Finding("not tried", "no case is a call of this operation")
    if {reason.code for reason in trial.reasons} == {ReasonCode.JIT_DISABLED}:
        return Finding("not tried", "not built")
    return Finding("refused", "; ".join(dict.fromkeys(str(reason) for reason in trial.reasons)))
