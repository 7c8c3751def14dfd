"""Bits that do not depend on the batch, nor on the number of ranks: what a kernel that declares so is held to.

Rows alone, in batches of a few sizes and at several places of a batch have the bits that they have in the whole; so
have the pieces that an operation names (:attr:`Operation.parts`): a sequence alone, the last queries of a prompt. Parts
that 1, 2 and 4 ranks compute of an axis that ranks share, put together or summed as a tree, have the bits of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, TensorSchema
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation
from layerzero.engine.proofs import in_batches
from layerzero.engine.reference import as_tuple
from layerzero.ops.comm import tree_sum
from layerzero.testing.compare import draws
from layerzero.testing.execution import bits
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import Finding, Trial, all_threads, attempt, duplicate, raised
from layerzero.testing.sizes import CheckSetting, by_size, fits, resized, with_axis

BATCH, SEQUENCES = 256, 24
"""Rows, or sequences, of the whole."""

COUNTS = (1, 2, 3, 7, 64, 256)
"""Of a part."""

RANKS = (1, 2, 4)
LEAST_SHARE = 256
"""What each of four ranks holds of a shared axis at least: kernels sum up leaves of this length."""

CASES = 3
"""The smallest cases of an operation that are tried, and the largest that is small enough."""

UNEVEN = 5
"""What makes a length of a case one that no vector divides."""


class Piece(NamedTuple):
    """A part of a call, with what cuts its results out of the whole's: a function, or its first row or sequence."""

    text: str
    call: RandomCall
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor
    first: int | None = None


def batches(kernel: Kernel, setting: CheckSetting, base: Case) -> Finding:
    """Parts of a batch have the bits of the whole."""
    operation = setting.operation
    if draws(operation):
        return Finding("not tried", "what is drawn follows from the place in the batch")
    axis, tried = batch_axis(operation), 0
    with all_threads():
        for case in _cases(setting, base):
            whole = setting.attempt(
                kernel, case if axis is None else resized(operation, case, {axis.name: _whole(axis)})
            )
            if whole is None or whole.reasons or not in_batches(kernel, whole.facts):
                continue
            try:
                wrong, count = _differing(whole, _pieces(whole, axis))
            except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
                return Finding("wrong", raised(error))
            if wrong:
                return Finding("wrong", f"declared batch_invariant, but {wrong} of {whole.call.text}")
            tried += count
    return Finding("passed", f"{tried} results of parts") if tried else Finding("not tried", "no case that can be cut")


def ranks(kernel: Kernel, setting: CheckSetting, base: Case) -> Finding:
    """What 1, 2 and 4 ranks compute of each axis that they share has the bits of the whole."""
    operation, tried = setting.operation, 0
    shared = [each for each in operation.schema.axes if each.shared]
    if not shared:
        return Finding("passed", "ranks share no axis of it")
    with all_threads():
        for axis in shared:
            case = _shared_case(setting, base, axis)
            whole = setting.attempt(kernel, case)
            if whole is None or whole.reasons:
                return Finding("wrong", f"declared tp_invariant, but it refuses {axis.name} = {case.sizes[axis.name]}")
            for count in RANKS:
                try:
                    wrong = _of_ranks(whole, axis, count)
                except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
                    wrong = raised(error)
                if wrong:
                    text = f"of {count} ranks that share {axis.name}: {wrong}; {whole.call.text}"
                    return Finding("wrong", f"declared tp_invariant, but {text}")
                tried += 1
    return Finding("passed", f"{tried} ways to share")


def batch_axis(operation: Operation) -> Axis | None:
    """The axis of rows or sequences: the first of the first tensor, where its entries are worked on apart."""
    first = operation.schema.inputs[0].shape_vars[:1]
    apart = [each for each in operation.schema.axes if each.apart]
    return next((each for each in apart if (each.leading and first == ("...",)) or (each.name,) == first), None)


def _whole(axis: Axis) -> int:
    return BATCH if axis.leading else SEQUENCES


def _cases(setting: CheckSetting, base: Case) -> Iterator[Case]:
    """The base case, the next smallest, and the largest that is small enough."""
    operation, axis = setting.operation, batch_axis(setting.operation)
    every = [replace(each, given=()) for each in (base, *by_size(operation))]
    able = [
        each
        for each in every
        if fits(operation, resized(operation, each, {axis.name: _whole(axis)}) if axis else each, setting.device)
    ]
    if axis is not None and axis.leading:
        yield from {each.name: each for each in (*able[:CASES], *able[-1:])}.values()
    else:  # of attention each takes minutes
        yield replace(base, given=())
    for other in operation.schema.axes:  # a length that no vector divides: its end is computed in another way
        if other.scales and not other.apart and other.name in base.sizes:
            yield from with_axis(operation, replace(base, given=()), other.name, base.sizes[other.name] + UNEVEN)


def _pieces(whole: Trial, axis: Axis | None) -> Iterator[Piece]:
    """Parts of a call."""
    if axis is not None:
        size = _whole(axis)
        for count in COUNTS:
            for first in sorted({0, 1, size // 3, size - count}):
                if 0 <= first <= size - count:
                    part = cut(whole, axis, slice(first, first + count))
                    yield Piece(f"{axis.name} {first} to {first + count - 1}", part, first=first)
    parts = whole.facts.operation.parts
    if parts is None or (axis is not None and axis.leading):  # those of products are cut in outputs, too
        return
    for each in parts(whole.routed.arguments, whole.facts) or ():
        known = {name: value for name, value in each.arguments.items() if name in whole.call.arguments}
        yield Piece(each.text, RandomCall(whole.call.function, known, each.text), each.place)


def _differing(whole: Trial, pieces: Iterator[Piece]) -> tuple[str, int]:
    """The first part whose bits are not the whole's, or that is refused; and how many results were compared."""
    operation, axis, count = whole.facts.operation, batch_axis(whole.facts.operation), 0
    expected = _results(whole)
    for text, call, place, first in pieces:
        part = attempt(whole.kernel, operation, call)
        if part is None:
            continue
        if part.reasons:
            return f"it refuses {text} ({part.codes})", count
        wanted, got = expected, _results(part)
        for name, tensor in got.items():
            schema = _schema(operation, name)
            want = place(wanted[name])
            if axis is not None and first is not None:
                where = _place_of(schema, axis, want.ndim)
                if where is None:
                    continue
                want = want.narrow(where, first, tensor.shape[where])
            if not torch.equal(bits(tensor), bits(want)):
                return f"{name} has other bits in {text}", count
            count += 1
    return "", count


def _results(trial: Trial) -> dict[str, Tensor]:
    """Results and written tensors by name."""
    call = duplicate(trial.call)
    found = as_tuple(trial.run(**call.arguments))
    schema = trial.facts.operation.schema
    named = {each.name: tensor for each, tensor in zip(schema.results(trial.facts), found, strict=True)}
    return {**named, **{name: call.arguments[name] for name in schema.mutated}}


def _schema(operation: Operation, name: str) -> TensorSchema:
    every = (*operation.schema.outputs, *operation.schema.inputs)
    return next(each for each in every if each.name == name)


def _place_of(schema: TensorSchema, axis: Axis, ndim: int) -> int | None:
    """Which axis of a tensor it is; None where the tensor has it not."""
    named = schema.shape_vars or schema.broadcast
    if axis.leading:
        return 0 if named[:1] == ("...",) else None
    return named.index(axis.name) - len(named) + ndim if axis.name in named else None


def cut(whole: Trial, axis: Axis, place: slice) -> RandomCall:
    """A part of a call along an axis, in memory of its own; of what the axis carries as much as goes with it."""
    operation, made = whole.facts.operation, dict(whole.call.arguments)
    sizes = {name: whole.facts.size(name) // whole.facts.size(axis.name) for name in axis.carries}
    for name, value in whole.call.arguments.items():
        if not isinstance(value, Tensor) or name not in {each.name for each in operation.schema.inputs}:
            continue
        schema, each = _schema(operation, name), value
        for of, times in ((axis, 1), *((Axis(other), factor) for other, factor in sizes.items())):
            where = _place_of(schema, of, value.ndim)
            if where is None or where < 0 or value.shape[where] == 1:
                continue
            each = each.narrow(where, place.start * times, (place.stop - place.start) * times)
        made[name] = each.clone(memory_format=torch.contiguous_format)
    return RandomCall(whole.call.function, made, f"{whole.call.name}, {axis.name} {place.start} to {place.stop - 1}")


def _shared_case(setting: CheckSetting, base: Case, axis: Axis) -> Case:
    """The case with enough of a shared axis; what is summed up keeps its digits, and nothing follows it."""
    sizes = {axis.name: LEAST_SHARE * RANKS[-1] if not axis.carries else RANKS[-1]}
    sizes |= {name: base.sizes[name] // base.sizes[axis.name] * sizes[axis.name] for name in axis.carries}
    operation, params = setting.operation, dict(base.params)
    if _summed(operation, axis):
        named = [each.dtype_from for each in operation.schema.outputs if each.dtype_from]
        params = dict.fromkeys(named if setting.dtype.itemsize == 2 else (), torch.float32)
    return replace(resized(operation, base, sizes), params=params, given=())


def _summed(operation: Operation, axis: Axis) -> bool:
    """Whether results are sums over an axis: none of them has it."""
    return all(axis.name not in each.shape_vars for each in operation.schema.outputs)


def _of_ranks(whole: Trial, axis: Axis, count: int) -> str:
    operation = whole.facts.operation
    share = whole.facts.size(axis.name) // count
    parts = []
    for rank in range(count):
        part = attempt(whole.kernel, operation, cut(whole, axis, slice(rank * share, (rank + 1) * share)))
        if part is None or part.reasons:
            return f"it refuses {axis.name} = {share} ({'' if part is None else part.codes})"
        parts.append(_results(part))
    for name, want in _results(whole).items():
        given = [each[name] for each in parts]
        schema = _schema(operation, name)
        where = next(
            (
                _place_of(schema, Axis(each), want.ndim)
                for each in (axis.name, *axis.carries)
                if each in schema.shape_vars
            ),
            None,
        )
        if where is None and not _summed(operation, axis):
            together = given[0]
        else:
            together = tree_sum(given) if where is None else torch.cat(given, where)
        if not torch.equal(bits(together), bits(want)):
            return f"{name} has other bits"
    return ""
