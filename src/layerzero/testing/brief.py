"""A few checks of one class of calls, in seconds where conformance takes minutes: what vetting asks of a kernel.

The call itself, the same values in memory that kernels misread, the smallest and largest sizes of the class, values
that change in place, some random calls, and, where the kernel declares it, gradients and the same bits again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation
from layerzero.engine.config import SCOPES
from layerzero.engine.failing import out_of_memory
from layerzero.ops.calls import case_of_sizes
from layerzero.testing import execution, gradients
from layerzero.testing.battery import drawn_numbers, function_of
from layerzero.testing.compare import check
from layerzero.testing.generate import RandomCall, random_call
from layerzero.testing.memory import FORMS, reshaped
from layerzero.testing.sizes import Setting, elements, with_axis
from layerzero.testing.trial import Outcome, Trial, attempt, build, duplicate, raised

WORK = {"cpu": 2**23, "cuda": 2**27}
"""Elements of all tensors and scores of a call, at most: float64 then takes a tenth of a second on two CPU cores."""

DRAWS, CALLS = 100, 16
"""Random calls that are drawn, and how many of those that the kernel takes are made."""

_LEADING = ("batch", "rows", "tokens", "heads", "kv_heads")
"""Axes whose entries are worked on apart from each other; a call that is too large is cut along them, in this order."""

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
    setting: Setting,
    case: Case | None,
    note: Note = lambda _: None,
) -> Found:
    """Check a kernel for the class of a call; the first wrong result ends it.

    Args:
        call: the call itself; None where it is too large, and the case is cut and stands for it.
        setting, case: dtype, device, layout and sizes of the class; no case where its facts do not name every axis.
        note: told what is about to run.
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
    for text, checked in _ways(kernel):
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
    setting: Setting,
    case: Case | None,
    note: Note,
) -> tuple[Trial | None, str]:
    """The call that stands for the class, built where the kernel compiles, and what was cut of it."""
    base, cut = None, ""
    with SCOPES.scope({"allow_jit_compile": True}):
        if call is not None:
            base = attempt(kernel, operation, call)
        cuts = _cuts(operation, case, setting.device) if call is None and case is not None else ()
        for text, smaller in cuts:
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


def _ways(kernel: Kernel) -> Iterator[tuple[str, Callable[[Trial], Outcome]]]:
    yield "results of their own", execution.results_of_their_own
    if kernel.deterministic:
        yield "same bits", execution.repeats
    if kernel.grad:
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


def _drawn(kernel: Kernel, setting: Setting) -> Iterator[tuple[str, Trial]]:
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


def _ends(kernel: Kernel, setting: Setting, case: Case) -> Iterator[tuple[str, Trial]]:
    """Calls with one axis at either end of its power of two."""
    for axis, size in case.sizes.items():
        if size < 1:
            continue
        low, high = 2 ** (size.bit_length() - 1), 2 ** size.bit_length()
        for sizes in ([low], [high - below for below in _BELOW if high - below > low]):
            trial = _first(kernel, setting, case, axis, [each for each in sizes if each != size])
            if trial is not None:
                yield trial


def _first(kernel: Kernel, setting: Setting, case: Case, axis: str, sizes: list[int]) -> tuple[str, Trial] | None:
    for size in sizes:
        for changed in with_axis(setting.operation, case, axis, size):
            trial = _trial(kernel, setting, _within(setting.operation, changed, setting.device, keep=axis))
            if trial is not None and not trial.reasons:
                return f"{axis} = {size}", trial
    return None


def _trial(kernel: Kernel, setting: Setting, case: Case | None) -> Trial | None:
    return None if case is None else setting.attempt(kernel, case)


def _weight(operation: Operation, case: Case) -> int:
    sizes = case.sizes
    scores = [sizes.get(name, 1) for name in ("batch", "heads", "seq_q", "seq_k")] if "seq_k" in sizes else [0]
    return elements(operation, case) + math.prod(scores)


def fits(operation: Operation, case: Case, device: str) -> bool:
    """Whether a call is small enough to be made again and compared as it is."""
    return _weight(operation, case) <= WORK["cpu" if device.startswith("cpu") else "cuda"]


def _within(operation: Operation, case: Case, device: str, keep: str = "") -> Case | None:
    """The case, cut along its leading axes until it fits; None if it does not."""
    sizes = dict(case.sizes)
    while not fits(operation, Case(case.name, sizes, case.params), device):
        axis = next((name for name in _LEADING if sizes.get(name, 1) > 1 and name != keep), None)
        if axis is None:
            return None
        if axis in ("heads", "kv_heads") and "kv_heads" in sizes:
            group = sizes["heads"] // max(sizes["kv_heads"], 1)
            kv_heads = max(sizes["kv_heads"] // 2, 1)
            if kv_heads == sizes["kv_heads"]:
                return None
            sizes |= {"kv_heads": kv_heads, "heads": kv_heads * group}
        else:
            sizes[axis] //= 2
    return Case(case.name, sizes, case.params)


def _cuts(operation: Operation, case: Case, device: str) -> Iterator[tuple[str, Case]]:
    """The case cut until it fits: along axes whose entries are apart, then to fewer queries, then to less of both."""
    within = _within(operation, case, device)
    if within is not None:
        yield ", with fewer rows, batches or heads than the call has", within
    for axes, text in (
        (("seq_q",), ", with fewer queries and heads"),
        (("seq_q", "seq_k"), ", with shorter sequences"),
    ):
        sizes = dict(case.sizes)
        while within is None and all(sizes.get(axis, 1) > 1 for axis in axes):
            sizes |= {axis: sizes[axis] // 2 for axis in axes}
            smaller = _within(operation, Case(case.name, sizes, case.params), device)
            if smaller is not None:
                yield text, smaller
                break


def case_of(
    operation: Operation, sizes: Mapping[str, int], params: Mapping[str, Any], accepted: set[str]
) -> Case | None:
    """The case that a call's facts describe; None if they do not name every axis."""
    return case_of_sizes(operation, "class", sizes, {name: each for name, each in params.items() if name in accepted})
