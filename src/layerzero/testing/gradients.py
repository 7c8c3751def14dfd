"""A kernel's backward pass against the reference's in float64: on a call, in odd memory, at drawn shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.judge import Elementwise
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Operation, Tolerance
from layerzero.engine.reference import as_tuple, reference_call
from layerzero.testing import compare
from layerzero.testing.generate import RandomCall
from layerzero.testing.memory import FORMS
from layerzero.testing.single_run import Finding, Trial, attempt, duplicate, raised, tensors

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
REASON = (
    "relative to the gradient itself and to the largest one of its tensor: a gradient is a sum over rows, and where "
    "its terms cancel, their rounding stays; below 2^-23 of the results' gradients, which are of order 1, anything is "
    "rounding (1 + erf(-8) is 0 in float32)"
)
_LEAST = 2.0**-23


def has_gradients(operation: Operation, dtype: torch.dtype) -> bool:
    """Whether results are numbers that change smoothly with those that a call of this dtype brings."""
    results = [judge for name, judge in operation.judges.items() if name not in operation.schema.mutated]
    return dtype in TOLERANCE and any(isinstance(judge, Elementwise) for judge in results)


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

    With a form of :data:`layerzero.testing.memory.FORMS` the tensors lie in memory like that.
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
        allowed = Tolerance(tolerance, max(tolerance * scale, least))
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
