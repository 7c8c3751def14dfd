"""A call that is too large to be compared, cut down: along axes that are worked on apart first, which changes least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from layerzero.core.arguments import Axis
from layerzero.core.operation import Case, Operation
from layerzero.testing.sizes import elements, resized

WORK = {"cpu": 2**23, "cuda": 2**27}
"""Elements of all tensors of a call, and of what its reference needs beside them, at most: float64 then takes a tenth
of a second on two CPU cores."""


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
