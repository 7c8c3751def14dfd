"""Calls of an operation at given sizes: its smaller cases, one axis changed, cheap shapes for large axes.

Which axes an operation has, and which go together, follows from its schema and cases; no operation is named here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from layerzero.core.arguments import Axis
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Dim
from layerzero.core.operation import Case, Operation
from layerzero.ops.calls import with_demanded
from layerzero.testing.generate import RandomCall, case_call
from layerzero.testing.single_run import Trial, attempt, taken

ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
"""How many elements the tensors of a case may have together to be run in full; a small machine takes a second then."""

BOUNDARY_ELEMENTS = 2**24
"""The same for the calls at a limit, which are few."""

LARGE = (2304, 2051)
"""Beyond 2048, where kernels were seen to go wrong in silence: a multiple of 256, and a prime's neighbour of none."""

_SMALL = (1, 2, 4, 8, 16, 32, 64)
_SMALL_LAST = (16, 32, 64)
"""Sizes to which other axes are cut down; rows keep 16 elements, so that a result still depends on several."""


@dataclass(frozen=True, slots=True)
class CheckSetting:
    """What every call of a check has in common."""

    operation: Operation
    dtype: torch.dtype
    device: str
    layout: str

    def call(self, case: Case, *, promised: bool = False) -> RandomCall:
        """The call that a case describes; with handles if ``promised``."""
        return case_call(self.operation, case, self.dtype, layout=self.layout, device=self.device, promised=promised)

    def attempt(self, kernel: Kernel, case: Case) -> Trial | None:
        """A kernel judged for a case, with what it takes no call without; None if it is no call of this operation.

        That is a handle, or an optional tensor.
        """
        trial = attempt(kernel, self.operation, self.call(case))
        fuller = None if trial is None else with_demanded(self.operation, case, kernel, trial.reasons)
        if fuller is not None:
            return self.attempt(kernel, fuller)
        if trial is None or not trial.reasons or set(self.operation.schema.handles).isdisjoint(kernel.accepts):
            return trial
        return taken(kernel, self.operation, self.call(case, promised=True)) or trial

    def taken(self, kernel: Kernel, case: Case) -> Trial | None:
        """The same where the kernel may run the case; None otherwise."""
        trial = self.attempt(kernel, case)
        return None if trial is None or trial.reasons else trial


def elements(operation: Operation, case: Case) -> int:
    """How many elements the required tensors of a case have together."""
    named = {axis for tensor in operation.schema.inputs for axis in tensor.shape_vars}
    leading = math.prod(size for axis, size in case.sizes.items() if axis not in named)
    total = 0
    for tensor in operation.schema.required:
        own = math.prod(case.sizes[axis] for axis in tensor.shape_vars if axis in case.sizes)
        total += own * (leading if tensor.shape_vars[:1] == ("...",) else 1)
    return total


def by_size(operation: Operation) -> list[Case]:
    """The operation's cases, the smallest first; those of a single row last, since no stride shows in one."""

    def weight(case: Case) -> tuple[int, int]:
        return sum(size == 1 for size in case.sizes.values()), elements(operation, case)

    return sorted(operation.cases, key=weight)


def small_cases(operation: Operation, device: str) -> list[Case]:
    """The cases that are small enough to be run in full; at least one."""
    budget = ELEMENTS["cpu" if device.startswith("cpu") else "cuda"]
    return [case for case in by_size(operation) if elements(operation, case) <= budget] or by_size(operation)[:1]


def tied(operation: Operation, axis: str) -> tuple[str, ...]:
    """The axes that have this one's size in every case, itself included: keys and values, queries and keys."""
    axes = operation.cases[0].sizes
    return tuple(each for each in axes if all(case.sizes[each] == case.sizes[axis] for case in operation.cases))


def resized(operation: Operation, case: Case, sizes: dict[str, int]) -> Case:
    """The same case with other sizes; its name says which.

    A size that is the product of two others in every case of the operation (pages: batch times blocks) grows with them.
    """
    text = " ".join(f"{axis}={size}" for axis, size in sizes.items())
    merged = {**case.sizes, **sizes}
    for axis, (left, right) in _products(operation).items():
        if axis not in sizes and (left in sizes or right in sizes):
            merged[axis] = max(merged[left] * merged[right], 1)
    return Case(f"{case.name} {text}", merged, case.params)


def _products(operation: Operation) -> dict[str, tuple[str, str]]:
    """Axes that are the product of two others in every case, neither of which is always 1."""
    every = [case.sizes for case in operation.cases]
    axes = [axis for axis in every[0] if any(sizes[axis] != 1 for sizes in every)]
    return {
        axis: (left, right)
        for axis in axes
        for left, right in itertools.combinations([each for each in axes if each != axis], 2)
        if len(every) > 1 and all(sizes[axis] == sizes[left] * sizes[right] for sizes in every)
    }


def with_axis(operation: Operation, case: Case, axis: str, size: int) -> Iterator[Case]:
    """The case with one axis changed: alone, then together with the axes that go with it."""
    group = tied(operation, axis)
    yield resized(operation, case, {axis: size})
    if len(group) > 1:
        yield resized(operation, case, dict.fromkeys(group, size))


def base_case(kernel: Kernel, setting: CheckSetting) -> tuple[Case, Trial | None]:
    """The smallest case that a kernel may run, cut to the limits of its sizes where none fits as it is.

    The trial has reasons where the kernel takes none of them.
    """
    smallest = small_cases(setting.operation, setting.device)
    for case in [*smallest, _within_limits(kernel, setting.operation, smallest[0])]:
        trial = setting.attempt(kernel, case)
        if trial is not None and not trial.reasons:
            break
    return case, trial


def _within_limits(kernel: Kernel, operation: Operation, case: Case) -> Case:
    """The case with each size that a kernel bounds moved inside its bounds."""
    for limit in kernel.limits:
        if isinstance(limit, Dim) and limit.name in case.sizes:
            fitting = nearest_legal(limit, case.sizes[limit.name])
            if fitting != case.sizes[limit.name]:
                case = resized(operation, case, dict.fromkeys(tied(operation, limit.name), fitting))
    return case


def nearest_legal(limit: Dim, size: int) -> int:
    """The size nearest to a wanted one that a limit allows."""
    if limit.one_of:
        return min(limit.one_of, key=lambda each: abs(each - size))
    step = limit.multiple or 1
    if limit.max is not None:
        size = min(size, limit.max)
    size -= size % step
    least = max(limit.min or 0, step)
    return max(size, least + -least % step)


def cheap_case(kernel: Kernel, setting: CheckSetting, case: Case) -> Case:
    """The case with every axis cut down as far as it stays a call that the kernel takes without more adapting."""
    required = setting.operation.schema.required
    named = {axis for tensor in required for axis in tensor.shape_vars[:-1]}  # all but the axis of a row's elements
    start = setting.attempt(kernel, case)
    assert start is not None
    adaptations = len(start.candidate.adaptations)
    for _ in range(2):  # an axis that another one holds up shrinks the second time
        for axis in case.sizes:
            for size in _SMALL if axis in named else _SMALL_LAST:
                if size >= case.sizes[axis]:
                    break
                smaller = next(
                    (
                        changed
                        for changed in with_axis(setting.operation, case, axis, size)
                        if _taken(kernel, setting, changed, adaptations)
                    ),
                    None,
                )
                if smaller is not None:
                    case = Case("cheap", smaller.sizes, case.params)
                    break
    return case


def _taken(kernel: Kernel, setting: CheckSetting, case: Case, adaptations: int) -> bool:
    trial = setting.taken(kernel, case)
    return trial is not None and len(trial.candidate.adaptations) <= adaptations


WORK = {"cpu": 2**23, "cuda": 2**27}
"""Elements of all tensors of a call, and of what else its reference needs, at most: float64 then takes a tenth of a
second on two CPU cores."""


def fits(operation: Operation, case: Case, device: str) -> bool:
    """Whether a call is small enough to be made again and compared as it is."""
    beside = operation.scratch(case.sizes) if operation.scratch is not None else 0
    return max(elements(operation, case), beside) <= WORK["cpu" if device.startswith("cpu") else "cuda"]


def within(operation: Operation, case: Case, device: str, keep: str = "") -> Case | None:
    """The case, cut along axes whose entries are worked on apart until it fits; None if it does not."""
    axes = [each for each in operation.schema.axes if each.apart and keep not in (each.name, *each.carries)]
    while not fits(operation, case, device):
        axis = next((each for each in axes if case.sizes.get(each.name, 1) > 1), None)
        if axis is None:
            return None
        case = _halved(operation, case, axis)
    return case


def _halved(operation: Operation, case: Case, axis: Axis) -> Case:
    """The case with half as much of an axis, of those that it carries, and of the products that it is part of."""
    size = case.sizes[axis.name]
    sizes = {axis.name: size // 2}
    sizes |= {name: case.sizes[name] // size * (size // 2) for name in axis.carries if name in case.sizes}
    return replace(resized(operation, case, sizes), name=case.name)


def cuts(operation: Operation, case: Case, device: str) -> Iterator[tuple[str, Case]]:
    """The case cut until it fits: along axes whose entries are apart, then along those that select no code.

    Each with what was cut, in words.
    """
    carried = {name for axis in operation.schema.axes for name in axis.carries}
    able = [each for each in operation.schema.axes if (each.scales or each.live) and each.name not in carried]
    scaling = [each for each in able if not each.apart and case.sizes.get(each.name, 1) > 1]
    for count in range(len(scaling) + 1):
        smaller = case
        while (found := within(operation, smaller, device)) is None:
            more = [each for each in scaling[:count] if smaller.sizes[each.name] > 1]
            if not more:
                break
            for axis in more:
                smaller = _halved(operation, smaller, axis)
        if found is not None:
            yield f", cut to {_changed(case, found)}", found
        if found is not None and count == 0:  # nothing that scales has to be cut
            return


def _changed(case: Case, smaller: Case) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in smaller.sizes.items() if size != case.sizes[axis])
