"""The numbers that hold at every time, each shown by a part that runs so often, in several processes at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple


class Number(NamedTuple):
    """One of them.

    Attributes:
        part: who shows it.
        count: how often it tries; None where it ends by itself.
        split: whether several processes share the tries.
        seconds: how long it goes on; None where the tries end it.
        asked: what it asks for unless the command line does.
    """

    part: str
    count: int | None
    split: bool = True
    seconds: float | None = None
    asked: Mapping[str, float] = {}


NUMBERS: dict[str, tuple[Number, ...]] = {
    "files": (Number("keeping.one_bit", 10_000), Number("keeping.fifty_bits", 2_000)),
    "writers": (Number("keeping.killed_writers", None, split=False, asked={"longest_s": 1.0}),),
    "threads": (Number("crowds.threads", None, split=False, seconds=60.0, asked={"threads": 16}),),
    "forks": (Number("crowds.forks", 200),),
    "memory": (Number("capped.capped", 1000, split=False), Number("capped.unread", 1000, split=False)),
    "fuzz": (Number("fuzzed.calls", 1_000_000),),
    "isolated": (Number("isolated.ended", 1000),),
    "captures": (Number("captures.captured", 300, split=False, seconds=300.0),),
}

MOST_S = 3600.0
"""How long a part may take whose tries end it: longer means that it is stuck."""


def counts(name: str, count: int | None) -> list[int | None]:
    """How often each part of a number tries where its first is to try so often; the others in proportion."""
    first = NUMBERS[name][0].count
    if count is None or first is None:
        return [each.count for each in NUMBERS[name]]
    return [None if each.count is None else math.ceil(each.count * count / first) for each in NUMBERS[name]]


def shares(count: int | None, processes: int) -> list[tuple[int, int | None]]:
    """The first number and how many each process has."""
    if count is None:
        return [(0, None)]
    bounds = [count * each // processes for each in range(processes + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(bounds) if high > low]
