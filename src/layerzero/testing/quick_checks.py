"""A few checks of one class of calls, in seconds where conformance takes minutes: what vetting asks of a kernel.

The call itself, the same values in memory that kernels misread, the smallest and largest sizes of the class, values
that change in place, some random calls, and, where the kernel declares it, gradients against the reference's in
float64, and the same bits again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.judge import Elementwise, Exact
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation, Tolerance
from layerzero.engine.config import SCOPES
from layerzero.engine.failures import out_of_memory
from layerzero.engine.proofs import declared
from layerzero.engine.reference import as_tuple, reference_call
from layerzero.testing import compare, execution, randomness
from layerzero.testing.compare import call_dtype, check, draws
from layerzero.testing.generate import RandomCall, draw, drawn_numbers
from layerzero.testing.single_run import (
    FORMS,
    Finding,
    Trial,
    attempt,
    build,
    duplicate,
    raised,
    reshaped,
    taken,
    tensors,
)
from layerzero.testing.sizes import CheckSetting, cuts, with_axis, within

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
REASON = (
    "relative to the gradient itself and to the largest one of its tensor: a gradient is a sum over rows, and where "
    "its terms cancel, their rounding stays; below 2^-23 of the results' gradients, which are of order 1, anything is "
    "rounding (1 + erf(-8) is 0 in float32)"
)
_LEAST = 2.0**-23


def has_gradients(operation: Operation, dtype: torch.dtype) -> bool:
    """Whether results are numbers that change smoothly with those that a call of this dtype brings, or are these."""
    schema, judges = operation.schema, operation.judges
    numbers = [each.name for each in schema.outputs if dtype in (each.dtype_constraint or (dtype,))]
    results = [judge for name, judge in judges.items() if name not in schema.mutated]
    moved = any(isinstance(judges[name], Exact) for name in numbers)
    return dtype in TOLERANCE and (moved or any(isinstance(judge, Elementwise) for judge in results))


def gradients_of(kernel: Kernel, operation: Operation, calls: Iterable[RandomCall], most: int) -> Finding:
    """Gradients of the first of these calls that the kernel takes, and whose numbers are finite."""
    taken, refused = 0, ""
    for call in calls:
        trial = attempt(kernel, operation, call)
        if trial is None or trial.reasons or not all(each.double().isfinite().all() for each in tensors(call).values()):
            refused = refused or (trial.codes if trial else "")
            continue
        outcome = gradients(trial)
        if outcome.status == "wrong":
            return Finding("wrong", f"{call.name}: {call.text}: {outcome.message}")
        taken += outcome.status == "passed"
        if taken == most:
            break
    return Finding("passed", f"{taken} calls") if taken else Finding("refused", refused or "no call")


def gradients(trial: Trial, form: str = "") -> Finding:
    """Gradients of a weighted sum of the results are those of the reference in float64.

    With a form of :data:`layerzero.testing.single_run.FORMS` the tensors lie in memory like that.
    """
    if not trial.facts.operation.schema.outputs:
        return Finding("not tried", "it returns nothing that has a gradient")
    tolerance = TOLERANCE[compare.call_dtype(trial.routed)]
    call = duplicate(trial.call)
    leaves, given = _leaves(call.arguments)
    if form:
        able = [name for name in leaves if given[name].numel() > 1 and (given[name].ndim > 1 or form != "transposed")]
        given |= {name: FORMS[form](given[name]) for name in able}
    watched = attempt(trial.kernel, trial.facts.operation, replace(call, arguments=given))
    if watched is None or watched.reasons:
        return Finding("refused", watched.codes if watched else "no call once gradients are recorded")
    routed = compare.route(call)  # in its own dtype: an argument may name a dtype that fits no other
    exact, exact_given = _leaves({name: compare.widened(value) for name, value in routed.arguments.items()})
    _backward(reference_call(replace(routed, arguments=exact_given)))
    try:
        _backward(watched.run(**given))
    except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
        return Finding("wrong", f"the backward pass {raised(error)}")
    wanted = [leaf.grad for leaf in exact.values() if leaf.grad is not None and leaf.grad.numel()]
    largest = max((each.abs().max().item() for each in wanted), default=0.0)
    for name, leaf in leaves.items():
        want = exact[name].grad
        if want is None or not want.numel():
            continue
        if leaf.grad is None:
            return Finding("wrong", f"the gradient of {name}: wanted one, got None")
        scale = max(want.abs().max().item(), largest / 8)  # a gradient of exactly 0, as of a softmax over one key
        least = 0.0 if leaf.dtype is torch.float64 else _LEAST
        own = max(tolerance, TOLERANCE.get(leaf.dtype, 0.0))  # it is rounded to its tensor's dtype
        allowed = Tolerance(own, max(own * scale, least))
        problem = compare.difference(leaf.grad, want, leaf.dtype, allowed)
        if problem:
            return Finding("wrong", f"the gradient of {name}: {problem}; {REASON}")
    return Finding("passed", f"within {tolerance} of the largest gradient")


def _leaves(arguments: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Leaves that ask for gradients, and the arguments made of them; tensors that are written into are no leaves."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize > 1  # no float8
    }
    return leaves, {name: leaves[name] * 1.0 if name in leaves else value for name, value in arguments.items()}


def _backward(result: Any) -> None:
    """Weights of 1 and -1 at random: exact in every dtype, and no sum of them runs away and comes back."""
    floating = [each for each in as_tuple(result) if each.is_floating_point()]
    flat = torch.cat([each.double().flatten() for each in floating])
    signs = torch.randint(0, 2, (flat.numel(),), generator=torch.Generator().manual_seed(0))
    (flat * (2.0 * signs - 1.0).to(flat)).sum().backward()  # type: ignore[no-untyped-call]


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
    kernel: Kernel, operation: Operation, call: RandomCall | None, setting: CheckSetting, case: Case | None, note: Note
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
    if declared(kernel.deterministic, base.facts):
        yield "same bits", execution.repeats
    if kernel.grad and has_gradients(operation, dtype):
        yield "gradients", gradients


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
            if trial := taken(kernel, operation, call):
                yield text, trial


def _drawn(kernel: Kernel, setting: CheckSetting) -> Iterator[tuple[str, Trial]]:
    """The first random calls of conformance that the kernel takes, of any size: large values, masks, odd strides."""
    numbers = drawn_numbers(setting.operation, setting.dtype, 0, DRAWS)
    calls = (draw(setting.operation, setting.dtype, 0, number, setting.device) for number in numbers)
    trials = ((call.name, trial) for call in calls if (trial := taken(kernel, setting.operation, call)))
    yield from itertools.islice(trials, CALLS)


def _ends(kernel: Kernel, setting: CheckSetting, case: Case) -> Iterator[tuple[str, Trial]]:
    """Calls with one axis at either end of its power of two."""
    for axis, size in case.sizes.items():
        if size < 1:
            continue
        low, high = 2 ** (size.bit_length() - 1), 2 ** size.bit_length()
        for sizes in ([low], [high - below for below in _BELOW if high - below > low]):
            if trial := _first(kernel, setting, case, axis, [each for each in sizes if each != size]):
                yield trial


def _first(kernel: Kernel, setting: CheckSetting, case: Case, axis: str, sizes: list[int]) -> tuple[str, Trial] | None:
    for size in sizes:
        for changed in with_axis(setting.operation, case, axis, size):
            fitting = within(setting.operation, changed, setting.device, keep=axis)
            if fitting is not None and (trial := setting.taken(kernel, fitting)):
                return f"{axis} = {size}", trial
    return None
