"""The order in which a comparison takes calls where nobody gives one: what tells most comes first.

Cases serve tests, too, so that many are tiny. A model fixes some sizes (width, heads, vocabulary) and leaves others to
each call (rows, lengths, batch): the larger the fixed ones, the more a case is like a call of a model. Of cases with
the same fixed sizes the smallest comes first, which decodes, then the largest, then what lies between.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measuring.jobs import Job


def telling(jobs: Sequence[Job]) -> list[Job]:
    """Order jobs: operations take turns, and so do dtypes; each case comes in one dtype before any comes in two."""
    of: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        of[job.operation].append(job)
    ordered = [_of_one(each, shift) for shift, each in enumerate(of.values())]
    longest = max((len(each) for each in ordered), default=0)
    return [each[turn] for turn in range(longest) for each in ordered if turn < len(each)]


def long_last(jobs: Sequence[Job], is_long: Callable[[Job], bool]) -> Iterator[Job]:
    """Jobs in their order, behind them those that would take much of the time by themselves.

    A job is looked at when its turn comes: to look at all cases of all operations took 4 s before the first was
    measured (AMD EPYC, two cores, 2026-11-23).
    """
    late = []
    for job in jobs:
        if is_long(job):
            late.append(job)
        else:
            yield job
    yield from late


def _of_one(jobs: Sequence[Job], shift: int) -> list[Job]:
    """The jobs of one operation; ``shift`` says which dtype begins."""
    cases = list({job.case.name: job for job in jobs}.values())
    groups: dict[float, list[Job]] = defaultdict(list)
    for job in cases:
        groups[_size(job, live=False)].append(job)
    names = [job.case.name for fixed in sorted(groups, reverse=True) for job in _ends_first(groups[fixed])]
    dtypes = list(dict.fromkeys(job.dtype for job in jobs))
    place = {name: number for number, name in enumerate(names)}

    def turn(job: Job) -> tuple[int, int]:
        number = place[job.case.name]
        return (dtypes.index(job.dtype) - number - shift) % len(dtypes), number

    return sorted(jobs, key=turn)


def _ends_first(jobs: Sequence[Job]) -> list[Job]:
    """The smallest, the largest, the second smallest, ..."""
    ordered = sorted(jobs, key=lambda job: _size(job, live=True))
    return [ordered[number // 2 if number % 2 == 0 else -1 - number // 2] for number in range(len(ordered))]


def _size(job: Job, *, live: bool) -> float:
    """The logarithm of the product of the sizes that change while a program runs, or of those that do not."""
    schema = REGISTRY.operation(job.operation).schema
    return round(
        sum(math.log2(max(size, 1)) for name, size in job.case.sizes.items() if schema.axis(name).live == live), 6
    )
