"""Checks of values on the device where they lie: all rules of a call are answered by one small tensor.

A check is an expression on the device of its values: where they break a rule, and which numbers an error tells of such
a place. The first places of every check and their numbers come to the host together, some dozens of integers, whatever
the size of what was looked at: one read, and no copy of tables, slots or lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_MAX_TOLD = 8
"""Places of one check that an error lists."""

Say = Callable[[tuple[int, ...], tuple[int, ...]], str]
"""From a place and the numbers that belong to it to what is wrong there."""


class Check(NamedTuple):
    """One rule about values on a device.

    Attributes:
        wrong: bool, of any shape: where values break the rule.
        numbers: integers (*shape of wrong, n) that an error shows for each place; or what gives them, (places, n), for
            places that are counted along all axes; None for nothing.
        say: what is wrong at a place.
        most: wrong places that an error shows, the first ones.
        alone: whether it means something only where no rule before it is broken; else it is left out.
    """

    wrong: Tensor
    numbers: Tensor | Callable[[Tensor], Tensor] | None
    say: Say
    most: int = _MAX_TOLD
    alone: bool = False


def problems(found: Iterable[str | Check]) -> list[str]:
    """What is wrong, in order: words as they are, checks by one read of their device; empty if nothing is.

    All checks look at values on one device.
    """
    given = list(found)
    answers = [None if isinstance(each, str) else _first_places(each) for each in given]
    asked = [each.flatten() for each in answers if each is not None]
    numbers = iter(torch.cat(asked).tolist() if asked else ())  # the one read
    told: list[str] = []
    for each, answer in zip(given, answers, strict=True):
        if isinstance(each, str):
            told.append(each)
        elif answer is not None:
            rows = [[next(numbers) for _ in range(answer.shape[1])] for _ in range(answer.shape[0])]
            wrong = [row for row in rows if row[0] < each.wrong.numel()]
            if wrong and not (each.alone and told):
                told += [each.say(_unraveled(place, each.wrong.shape), tuple(more)) for place, *more in wrong]
    return told


def problems_on_host(checks: Iterable[Check]) -> list[str]:
    """The same of values on the host, where a look costs no wait: nothing more is computed where nothing is wrong."""
    given = list(checks)
    return problems(given) if any(bool(each.wrong.any()) for each in given) else []


def _first_places(check: Check) -> Tensor | None:
    """The first wrong places, counted along all axes, and the numbers of each; None where there is no place at all.

    What is no wrong place is one behind the last. Shapes: → (places, 1 + n) int64
    """
    wrong = check.wrong.reshape(-1)
    count = wrong.shape[0]
    if count == 0:
        return None
    places = torch.where(wrong, torch.arange(count, device=wrong.device), count)
    first = places.topk(min(check.most, count), largest=False).values
    if check.numbers is None:
        return first.unsqueeze(1)
    there = first.clamp(max=count - 1)
    told = check.numbers
    numbers = told.reshape(count, told.shape[-1])[there] if isinstance(told, Tensor) else told(there)
    return torch.cat((first.unsqueeze(1), numbers.long()), 1)


def _unraveled(place: int, shape: Iterable[int]) -> tuple[int, ...]:
    """A place that is counted along all axes, as an index into each."""
    found: list[int] = []
    for size in reversed(tuple(shape)):
        place, offset = divmod(place, size)
        found.insert(0, offset)
    return tuple(found)
