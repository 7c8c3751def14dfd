"""What chance decides: draws against their probabilities, and what only several runs together show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Role, TensorSchema
from layerzero.core.dtypes import dtype_name
from layerzero.core.judge import Given, Property
from layerzero.core.judges import Distribution
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation
from layerzero.engine.reference import as_tuple, moved
from layerzero.testing import compare
from layerzero.testing.compare import draws, seeded
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import Finding, Trial, attempt, duplicate, raised
from layerzero.testing.sizes import CheckSetting, cheap_case, resized

DRAWS = 100_000
"""Draws of a chi-square test, all rows together: 2 % of a row's draws that go astray then show beyond any doubt."""

ROWS = 4
"""Different rows, of which every one is repeated: a kernel may be right for one and wrong for the next."""

CALLS = 1_000
"""Calls that so many draws may take, where a kernel takes few rows at once."""

ELEMENTS = 2**25
"""Elements of the tensors of one such call."""

SEED = 20_000


def row_axis(operation: Operation) -> str:
    """The axis that rows are repeated along: the first whose entries are worked on apart; empty if there is none."""
    return next((axis.name for axis in operation.schema.axes if axis.apart), "")


def few_rows(kernel: Kernel, setting: CheckSetting, base: Case) -> Trial | None:
    """A call with few rows of few places: every place is drawn often then. None where rows cannot be repeated."""
    operation, axis = setting.operation, row_axis(setting.operation)
    if axis not in base.sizes:
        return None
    for case in (cheap_case(kernel, setting, base), base):
        if trial := setting.taken(kernel, resized(operation, case, {axis: ROWS})):
            return trial
    return setting.attempt(kernel, base)


def drawn_fairly(trial: Trial) -> Finding:
    """Draws of the same rows come as often as their probabilities say, for every result that is drawn."""
    rows = _with_rows(trial)
    if rows is None or rows.reasons:
        return Finding("refused", rows.codes if rows else "no call with an axis of rows")
    for name in draws(rows.facts.operation):
        outcome = _one_result(rows, name)
        if outcome.status != "passed":
            return outcome
    return Finding("passed", f"{DRAWS} draws")


def _with_rows(trial: Trial) -> Trial | None:
    """The call, as one row where it brings a single one without an axis for it: no row could be repeated there."""
    operation, arguments = trial.facts.operation, dict(trial.call.arguments)
    for tensor in operation.schema.inputs:
        value = arguments.get(tensor.name)
        if isinstance(value, Tensor) and tensor.shape_vars[:1] == ("...",) and value.ndim < len(tensor.shape_vars):
            arguments[tensor.name] = value.unsqueeze(0)
    if all(value is trial.call.arguments.get(name) for name, value in arguments.items()):
        return trial
    call = RandomCall(trial.call.function, arguments, f"{trial.call.name}, as one row")
    return attempt(trial.kernel, operation, call)


def _one_result(trial: Trial, name: str) -> Finding:
    operation, axis = trial.facts.operation, row_axis(trial.facts.operation)
    if not axis:
        return Finding("not tried", "no axis of the operation is worked on apart, along which rows could be repeated")
    output = next(each for each in operation.schema.outputs if each.name == name)
    place = output.shape_vars.index(axis) if axis in output.shape_vars else 0
    judge, given = trial.truth().judges[name]
    assert isinstance(judge, Distribution)
    probabilities, support = (each.movedim(place, 0) for each in given.basis)
    said = ((probabilities > 0) == support).all(-1).flatten() & ~probabilities.isnan().any(-1).flatten()
    if not said.any():
        return Finding("not tried", "its probabilities say nothing of any row")
    rows, count = probabilities.shape[0], probabilities.shape[-1]
    flat = probabilities.reshape(-1, count)
    counts = torch.zeros_like(flat, dtype=torch.int64)
    many = _repeated_as_often_as_it_takes(trial, axis, rows, probabilities.numel())
    if isinstance(many, Finding):
        return many
    repeated, copies = many
    calls = math.ceil(DRAWS / (copies * len(flat)))
    if calls > CALLS:
        return Finding("not tried", f"{copies * len(flat)} rows at once: {DRAWS} draws would take {calls} calls")
    at = [each.name for each in operation.schema.results(repeated.routed.arguments)].index(name)
    wanted = compare.fakes(repeated.routed)[at]
    with seeded(SEED, trial.facts.device.torch_type):
        for arguments in _seeded_calls(repeated.call, operation, calls):
            try:
                result = as_tuple(repeated.run(**arguments))
            except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
                return Finding("wrong", raised(error))
            got = result[at] if at < len(result) else None
            problem = compare.kind_problem(got, wanted, wanted.dtype, flat.device)
            if problem or got is None:
                return Finding("wrong", f"{name}: {problem}; {repeated.call.text}")
            ids = judge.places(given.canonical(got)).movedim(place, 0)
            ids = ids.reshape(rows, copies, *ids.shape[1:]).movedim(1, -1).reshape(len(flat), -1)
            if bool(((ids < 0) | (ids >= count)).any()):
                return Finding("wrong", f"{name}: wanted {count} places, got {int(ids.min())} and up")
            offset = torch.arange(len(flat), device=ids.device).unsqueeze(1) * count
            counts += torch.bincount((ids + offset).flatten(), minlength=counts.numel()).view_as(counts)
    never = counts[said] * (flat[said] == 0)
    if never.any():
        return Finding("wrong", f"{name}: {int(never.sum())} of {int(counts[said].sum())} draws cannot come")
    problem = judge.unlikely(counts[said], flat[said])
    return Finding("wrong", f"{name}: {problem}; {repeated.call.text}") if problem else Finding("passed")


def _repeated_as_often_as_it_takes(trial: Trial, axis: str, rows: int, elements: int) -> tuple[Trial, int] | Finding:
    """The call with every row repeated, as often as the kernel takes at once; and how often that is."""
    copies = max(min(math.ceil(DRAWS / rows), ELEMENTS // max(elements, 1)), 1)
    while True:
        call = _repeated(trial.call, trial.facts.operation, axis, trial.facts.layout, copies)
        many = attempt(trial.kernel, trial.facts.operation, call)
        if many is not None and not many.reasons:
            return many, copies
        if copies == 1:
            return Finding("refused", many.codes if many else "no call")
        copies //= 2


def _repeated(call: RandomCall, operation: Operation, axis: str, layout: str | None, copies: int) -> RandomCall:
    """The call with every row so often, side by side."""
    schema = operation.schema
    arguments = dict(call.arguments)
    for tensor in schema.inputs:
        value = arguments.get(tensor.name)
        place = _place(tensor, axis, value.ndim, layout, operation) if isinstance(value, Tensor) else -1
        if place >= 0:
            arguments[tensor.name] = value.repeat_interleave(copies, place)  # type: ignore[union-attr]  # it is one
    for param in schema.params:
        if param.role is Role.HANDLE and param.made_of and arguments.get(param.name) is not None:
            arguments[param.name] = param.make(arguments, False) if param.make else None
    return RandomCall(call.function, arguments, f"{call.name}, each row {copies} times")


def _place(tensor: TensorSchema, axis: str, ndim: int, layout: str | None, operation: Operation) -> int:
    """Which axis of a tensor its rows are; -1 if it has none of them."""
    schema = operation.schema
    names = tensor.axes_in(layout, schema.canonical) or tensor.broadcast
    if axis not in names:
        return 0 if schema.axis(axis).leading and names[:1] == ("...",) else -1
    return max(names.index(axis) - (len(names) - ndim), -1)


def _seeded_calls(call: RandomCall, operation: Operation, calls: int) -> Iterator[dict[str, Any]]:
    """The arguments of each call, with a seed of its own where the call has one; a generator goes on by itself."""
    params = [each for each in operation.schema.params if each.seeds]
    generators = {
        each.name: each.make(call.arguments, False)
        for each in params
        if each.role is Role.HANDLE and each.make is not None and call.arguments.get(each.name) is not None
    }
    numbers = [each.name for each in params if int in each.kinds and call.arguments.get(each.name) is not None]
    rows = {each.name: call.arguments.get(each.name) for each in operation.schema.inputs if each.seeds}
    for number in range(calls):
        own = {  # seeds that follow each other are as good as others
            name: torch.arange(given.numel(), device=given.device).view(given.shape) + number * given.numel()
            for name, given in rows.items()
            if isinstance(given, Tensor)
        }
        yield {**call.arguments, **generators, **dict.fromkeys(numbers, SEED + number), **own}


def holds(trial: Trial, claim: Property) -> Finding:
    """Run a call as often as a property asks, and check what it says of the results."""
    truth = compare.for_kernel(compare.expected(trial.call), trial.kernel)
    routed = trial.routed
    wide = replace(routed, arguments={name: compare.widened(value) for name, value in routed.arguments.items()})
    own = trial.kernel.tolerance.get(dtype_name(truth.computed))
    given = Given(truth.dtype, compare.canonical(wide), own)
    results = []
    running, before = trial, None
    with seeded(SEED, trial.facts.device.torch_type):
        for run in claim.runs:
            added = {name: value(trial.call.arguments) if callable(value) else value for name, value in run.items()}
            call = duplicate(RandomCall(trial.call.function, {**trial.call.arguments, **added}, trial.call.name))
            chosen = {name: value for name, value in added.items() if name in trial.facts.operation.schema.chosen}
            if chosen != before:
                other = attempt(trial.kernel, trial.facts.operation, call)
                if other is None or other.reasons:
                    return Finding("refused", other.codes if other else "no call with what it adds")
                running, before = other, chosen
            try:
                result = as_tuple(running.run(**call.arguments))
            except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
                return Finding("wrong", f"{raised(error)}; {call.text}")
            problem = _unlike(result, truth)
            if problem:
                return Finding("wrong", problem)
            results.append(_canonical(result, trial))
    problem = claim.check(results, _canonical(truth.results, trial), given)
    if problem:
        return Finding("wrong", f"{problem}; {claim.reason}" if claim.reason else problem)
    return Finding("passed", f"{len(claim.runs)} runs")


def _unlike(result: tuple[Any, ...], truth: compare.Expected) -> str:
    if len(result) != len(truth.results):
        return f"wanted {len(truth.results)} results, got {len(result)}"
    kinds = (compare.kind_problem(*each) for each in zip(result, truth.results, truth.dtypes, strict=True))
    return next((problem for problem in kinds if problem), "")


def _canonical(results: tuple[Tensor, ...], trial: Trial) -> tuple[Tensor, ...]:
    schema = trial.facts.operation.schema
    outputs = schema.results(trial.routed.arguments)
    pairs = zip(results, outputs, strict=True)
    return tuple(moved(each.detach(), output, trial.facts.layout, schema.canonical) for each, output in pairs)


def accepted(claim: Property, kernel: Kernel) -> bool:
    """Whether a kernel accepts everything that a property adds."""
    return claim.arguments <= set(kernel.accepts)


def of_a_class(claim: Property, operation: Operation, params: Mapping[str, object]) -> bool:
    """Whether a property speaks of the calls of a class: it adds nothing by which another kernel may be chosen."""
    chosen = {name: run[name] for run in claim.runs for name in run if name in operation.schema.chosen}
    return all(name in params and params[name] == value for name, value in chosen.items())
