"""Whether integers that kernels follow lead anywhere: places in a tensor, counts of what is in one.

On a CPU every plan looks before its kernel runs, unless the kernel does so itself: a place beyond a cache would be
written to, or end the process. On other devices looking means waiting: debug mode does it, by expressions there and one
read of what they found. Never in a capture: its replays read other values, and reading would break it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from layerzero.core import values as looking
from layerzero.core.arguments import TensorSchema
from layerzero.core.schema import OperationSchema
from layerzero.core.values import Check

if TYPE_CHECKING:
    from layerzero.core.operation import Operation


_FEW = 256
"""Values that Python compares sooner than torch does."""


class IndexRule(NamedTuple):
    """What the values of one tensor must be.

    Attributes:
        tensor: its schema.
        low: the smallest value.
        sizes: where the axes stand, whose product the values stay below, or count up to: a tensor and its axis each.
        bounds: parameters that promise a smaller value.
        counts, per: of a table whose rows are read in part, the tensor that says how far, and where the axes stand
            that one entry covers.
    """

    tensor: TensorSchema
    low: int
    sizes: tuple[tuple[str, int], ...]
    bounds: tuple[str, ...] = ()
    counts: str = ""
    per: tuple[tuple[str, int], ...] = ()


def rules_of(schema: OperationSchema, layout: str | None, given: Mapping[str, Any]) -> list[IndexRule]:
    """The rules for the tensors that a call brings, in its layout."""
    if not schema.indexed:
        return []
    places: dict[str, tuple[str, int]] = {}
    for tensor, axes in schema.axes_in(layout):
        if tensor.name in given:
            first = -len(axes) if axes[:1] == ("...",) else 0  # from the end, where it is open how many come first
            for place, axis in enumerate(axes, first):
                places.setdefault(axis, (tensor.name, place))
    rules = []
    for tensor in schema.indexed:
        if tensor.name not in given:
            continue
        axes = tensor.indexes or tensor.counts
        bounds = tuple(
            each.name for each in schema.params if each.name in schema.bounds and tensor.name in each.made_of
        )
        rule = IndexRule(tensor, -1 if tensor.holes else 0, tuple(places[axis] for axis in axes), bounds)
        counting = next(
            (each for each in schema.inputs if tensor.ndim == 2 and tensor.shape_vars[1] in each.counts), None
        )
        if counting is not None and counting.name in given:
            others = [axis for axis in counting.counts if axis != tensor.shape_vars[1]]
            rule = rule._replace(counts=counting.name, per=tuple(places[axis] for axis in others))
        rules.append(rule)
    return rules


def within(tensor: torch.Tensor, low: int, high: int) -> bool | None:
    """Whether all values are from ``low`` to below ``high``."""
    count = tensor.numel()
    if count == 0:
        return True
    if count <= _FEW:
        values = tensor.flatten().tolist()
        return bool(low <= min(values) and max(values) < high)
    least, most = tensor.aminmax()
    return bool(least >= low) and bool(most < high)


def distinct(tensor: torch.Tensor) -> bool | None:
    """Whether no place is named twice in a row of the last axis; -1 is none."""
    if tensor.numel() <= _FEW:
        rows = tensor.reshape(-1, tensor.shape[-1]).tolist() if tensor.numel() and tensor.ndim else []
        named = [[place for place in row if place >= 0] for row in rows]
        return all(len(set(row)) == len(row) for row in named)
    ordered = tensor.sort(-1).values
    return not bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any())


def firsts_within(table: torch.Tensor, counts: torch.Tensor, per: int, high: int) -> bool | None:
    """The same, from 0, for the first ``counts / per`` values of each row, rounded up."""
    used = torch.arange(table.shape[1], device=table.device) * per < counts.unsqueeze(1)
    return not bool((used & ((table < 0) | (table >= high))).any())


def condition(rule: IndexRule) -> str:
    """A rule as an expression over a call's tensors, for a plan's text."""
    name, high = rule.tensor.name, _product(rule.sizes)
    if rule.counts:
        return f"firsts_within({name}, {rule.counts}, {_product(rule.per)}, {high})"
    high = high if rule.tensor.indexes else f"{high} + 1"
    text = f"within({name}, {rule.low}, {high})"
    bounded = [f"({each} is None or within({name}, {rule.low}, {each} + 1))" for each in rule.bounds]
    return " and ".join([text, *bounded, *([f"distinct({name})"] if rule.tensor.distinct else [])])


def sizes_read(rules: Iterable[IndexRule]) -> list[str]:
    """The sizes and the promises in the expressions of rules, for a plan's text."""
    sizes = [f"{tensor}.shape[{axis}]" for rule in rules for tensor, axis in (*rule.sizes, *rule.per)]
    return [*dict.fromkeys([*sizes, *(bound for rule in rules for bound in rule.bounds)])]


def _product(sizes: tuple[tuple[str, int], ...]) -> str:
    return " * ".join(f"{tensor}.shape[{axis}]" for tensor, axis in sizes) or "1"


def checks(rules: list[IndexRule], arguments: Mapping[str, Any]) -> list[Check]:
    """The rules as expressions on the tensors' own device."""
    found: list[Check] = []
    for rule in rules:
        name, values = rule.tensor.name, arguments[rule.tensor.name]
        most = _size(rule.sizes, arguments) - (1 if rule.tensor.indexes else 0)
        promised = [arguments[each] for each in rule.bounds if arguments.get(each) is not None]
        most = min([most, *promised])
        outside = (values < rule.low) | (values > most)
        if rule.counts:
            starts = torch.arange(values.shape[1], device=values.device) * _size(rule.per, arguments)
            outside &= starts < arguments[rule.counts].unsqueeze(1)
        wanted = f"{rule.low} to {most}" if most >= rule.low else "none, since there is no place"
        found.append(Check(outside, values.unsqueeze(-1), functools.partial(_outside, name, wanted)))
        if rule.tensor.distinct and values.ndim and values.numel():
            found.append(_named_again(name, values))
    return found


def _outside(name: str, wanted: str, place: tuple[int, ...], got: tuple[int, ...]) -> str:
    where = f"[{', '.join(map(str, place))}]" if place else ""
    return f"{name}{where}: wanted {wanted}, got {got[0]}"


def _named_again(name: str, values: torch.Tensor) -> Check:
    """The first row's places that are named again: which of two tokens is written there is undefined."""
    rows = values.reshape(-1, values.shape[-1])
    ordered, places = rows.sort(dim=-1, stable=True)
    same = torch.zeros_like(ordered, dtype=torch.bool)  # as the one before it
    same[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    numbers = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    first = places.gather(1, numbers.masked_fill(same, 0).cummax(1).values)  # of those that are the same
    again = torch.zeros_like(same).scatter_(1, places, same)
    again &= (again.any(1).cumsum(0) == 1).unsqueeze(1)
    told = torch.stack((rows, torch.zeros_like(places).scatter_(1, places, first)), -1)
    return Check(again, told, functools.partial(_again, name))


def _again(name: str, place: tuple[int, ...], got: tuple[int, ...]) -> str:
    return f"{name}: wanted each place once, got {got[0]} at {got[1]} and {place[-1]}"


def problems(rules: list[IndexRule], arguments: Mapping[str, Any], operation: Operation | None = None) -> list[str]:
    """What is wrong with the values of a call, with wanted and got; empty if nothing is.

    With its operation, its own checks of values count, too. All of it is one read of the tensors' device.
    """
    found: list[str | Check] = [*checks(rules, arguments)]
    if operation is not None and operation.check_values is not None:
        found += operation.check_values(**arguments)
    return looking.problems(found)


def _size(sizes: tuple[tuple[str, int], ...], arguments: Mapping[str, Any]) -> int:
    product = 1
    for tensor, axis in sizes:
        product *= arguments[tensor].shape[axis]
    return product


NAMES: dict[str, Callable[..., bool | None]] = {"distinct": distinct, "within": within, "firsts_within": firsts_within}
"""What a plan's text needs; the extension puts its own here, which cost a tenth."""

IN_C: dict[str, Callable[..., Any]] = {}
"""What the extension does in one pass that takes Python many; empty without it."""
