"""A few checks of one class of calls, in seconds where conformance takes minutes: what vetting asks of a kernel.

The call itself, the same values in memory that kernels misread, the smallest and largest sizes of the class, values
that change in place, some random calls, and, where the kernel declares it, gradients and the same bits again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation
from layerzero.engine.config import SCOPES
from layerzero.engine.failures import out_of_memory
from layerzero.ops.calls import case_of_sizes
from layerzero.testing import execution, gradients, randomness
from layerzero.testing.compare import call_dtype, check, draws
from layerzero.testing.generate import RandomCall, drawn_numbers, function_of, random_call
from layerzero.testing.memory import FORMS, reshaped
from layerzero.testing.single_run import Finding, Trial, attempt, build, duplicate, raised
from layerzero.testing.sizes import CheckSetting, cuts, fits, with_axis, within

__all__ = ["PASSED", "RAISED", "REFUSED", "WRONG", "Found", "case_of", "fits", "look"]

DRAWS, CALLS = 100, 16
"""Random calls that are drawn, and how many of those that the kernel takes are made."""

_BELOW = (1, 2, 8, 16, 32, 64, 128, 256)
"""How far below the end of its class a size may lie that stands for the end."""

PASSED, WRONG, RAISED, REFUSED = "passed", "wrong", "raised", "refused"

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """What the checks of a class found: one of the states above, and a line about it."""

    state: str
    detail: str = ""


def look(
    kernel: Kernel,
    operation: Operation,
    call: RandomCall | None,
    setting: CheckSetting,
    case: Case | None,
    note: Note = lambda _: None,
) -> Found:
    """Check a kernel for the class of a call; the first wrong result ends it.

    Args:
        call: the call itself; None where it is too large, and the case is cut and stands for it.
        setting, case: dtype, device, layout and sizes of the class; no case where its facts do not name every axis.
        note: called with what is about to run.
    """
    try:
        base, cut = _base(kernel, operation, call, setting, case, note)
    except (ImportError, OSError) as error:  # its library does not load: no word about its results
        return Found(REFUSED, raised(error))
    except Exception as error:  # noqa: BLE001  # whatever building raises is a finding
        return Found(REFUSED, "too little memory") if out_of_memory(error) else Found(RAISED, raised(error))
    if base is None or base.reasons:
        return Found(REFUSED, "; ".join(str(each) for each in base.reasons) if base else "no call of this operation")
    tally = _Tally(base, note)
    ends = _ends(kernel, setting, case) if case is not None else ()
    if found := tally.run(itertools.chain([("", base)], _forms(kernel, operation, base), ends)):
        return found
    for text, checked in _ways(kernel, base):
        note(f"{text}: {base.call.text}")
        outcome = checked(base)
        if outcome.status == "wrong":
            return Found(WRONG, f"{text}: {outcome.message}")
    if found := tally.run(_drawn(kernel, setting)):
        return found
    return Found(RAISED, tally.raised) if tally.raised else Found(PASSED, f"{tally.right} calls right{cut}")


def _base(
    kernel: Kernel,
    operation: Operation,
    call: RandomCall | None,
    setting: CheckSetting,
    case: Case | None,
    note: Note,
) -> tuple[Trial | None, str]:
    """The call that stands for the class, built where the kernel compiles, and what was cut of it."""
    base, cut = None, ""
    with SCOPES.scope({"allow_jit_compile": True}):
        if call is not None:
            base = attempt(kernel, operation, call)
        smaller_cases = cuts(operation, case, setting.device) if call is None and case is not None else ()
        for text, smaller in smaller_cases:
            base, cut = setting.attempt(kernel, smaller), text
            if base is not None and not base.reasons:
                break
        if base is None or base.reasons or not kernel.jit:
            return base, cut
        note(f"building for {base.call.text}")
        build(kernel, operation, base.call)
    return attempt(kernel, operation, base.call), cut  # what else compiles is not tried: it would take minutes


@dataclass(slots=True)
class _Tally:
    """What came of calls so far: how many were right, and what the first one raised that did not end the search."""

    base: Trial
    note: Note
    right: int = 0
    raised: str = ""

    def run(self, trials: Iterable[tuple[str, Trial]]) -> Found | None:
        """Run calls until one is wrong, or the very first is anything but right."""
        for text, trial in trials:
            self.note(f"{text}: {trial.call.text}" if text else trial.call.text)
            state, detail = _run(trial)
            told = f"{text}: {detail}" if text else detail
            if state == WRONG or (state != PASSED and trial is self.base):
                return Found(state, told)
            self.right += state == PASSED
            if state == RAISED:  # a wrong result would say more: go on
                self.raised = self.raised or told
        return None


def _ways(kernel: Kernel, base: Trial) -> Iterator[tuple[str, Callable[[Trial], Finding]]]:
    operation, dtype = base.facts.operation, call_dtype(base.routed)
    yield "results of their own", execution.results_of_their_own
    if draws(operation):
        yield "distribution", randomness.drawn_fairly
    for claim in operation.properties:
        if randomness.accepted(claim, kernel) and randomness.of_a_class(claim, operation, base.facts):
            yield f"property {claim.name}", functools.partial(randomness.holds, claim=claim)
    if kernel.deterministic:
        yield "same bits", execution.repeats
    if kernel.grad and gradients.has_gradients(operation, dtype):
        yield "gradients", gradients.gradients


def _run(trial: Trial) -> tuple[str, str]:
    try:
        truth = trial.truth()
    except Exception as error:
        if not out_of_memory(error):
            raise
        return REFUSED, "too large to compare with the reference"
    try:
        problems = check(duplicate(trial.call), trial.run, truth)
    except (ImportError, OSError) as error:  # its library does not load: no word about its results
        return REFUSED, raised(error)
    except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
        return (REFUSED, "too little memory") if out_of_memory(error) else (RAISED, raised(error))
    return (WRONG, "; ".join(problems)) if problems else (PASSED, "")


def _forms(kernel: Kernel, operation: Operation, base: Trial) -> Iterator[tuple[str, Trial]]:
    """The call in each form of memory that the kernel takes."""
    for form in FORMS:
        for text, call in reshaped(base.call, form):
            trial = attempt(kernel, operation, call)
            if trial is not None and not trial.reasons:
                yield text, trial


def _drawn(kernel: Kernel, setting: CheckSetting) -> Iterator[tuple[str, Trial]]:
    """The first random calls of conformance that the kernel takes, of any size: large values, masks, odd strides."""
    taken = 0
    for number in drawn_numbers(setting.operation, setting.dtype, 0, DRAWS):
        call = random_call(
            0, number, function=function_of(setting.operation), dtype=setting.dtype, device=setting.device
        )
        trial = attempt(kernel, setting.operation, call)
        if trial is not None and not trial.reasons:
            taken += 1
            yield call.name, trial
        if taken == CALLS:
            return


def _ends(kernel: Kernel, setting: CheckSetting, case: Case) -> Iterator[tuple[str, Trial]]:
    """Calls with one axis at either end of its power of two."""
    for axis, size in case.sizes.items():
        if size < 1:
            continue
        low, high = 2 ** (size.bit_length() - 1), 2 ** size.bit_length()
        for sizes in ([low], [high - below for below in _BELOW if high - below > low]):
            trial = _first(kernel, setting, case, axis, [each for each in sizes if each != size])
            if trial is not None:
                yield trial


def _first(kernel: Kernel, setting: CheckSetting, case: Case, axis: str, sizes: list[int]) -> tuple[str, Trial] | None:
    for size in sizes:
        for changed in with_axis(setting.operation, case, axis, size):
            trial = _trial(kernel, setting, within(setting.operation, changed, setting.device, keep=axis))
            if trial is not None and not trial.reasons:
                return f"{axis} = {size}", trial
    return None


def _trial(kernel: Kernel, setting: CheckSetting, case: Case | None) -> Trial | None:
    return None if case is None else setting.attempt(kernel, case)


def case_of(
    operation: Operation, sizes: Mapping[str, int], params: Mapping[str, Any], accepted: set[str]
) -> Case | None:
    """The case that a call's facts describe; None if they do not name every axis."""
    return case_of_sizes(operation, "class", sizes, {name: each for name, each in params.items() if name in accepted})
