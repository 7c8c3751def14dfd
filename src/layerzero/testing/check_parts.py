"""What checks play: pieces that the battery puts together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from layerzero.core.operation import Case, Operation
from layerzero.core.reasons import ReasonCode
from layerzero.testing import randomness
from layerzero.testing.generate import RandomCall
from layerzero.testing.memory import poisoned
from layerzero.testing.single_run import Finding, Trial, tensors
from layerzero.testing.sizes import CheckSetting, resized

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
