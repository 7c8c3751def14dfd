"""The calls that ``lz.tune()`` measures where nobody says which: what every operation finds worth measuring, in turn.

On a GPU of an H200's speed all of it takes under five minutes, compiling apart.
"""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from layerzero.core.arguments import Axis
from layerzero.engine.registry import REGISTRY
from layerzero.ops import function_of
from layerzero.tuning.measuring.jobs import Job


def default_grid(
    device: str,
    dtypes: Sequence[str] = (),
    operation: str = "*",
    *,
    narrow: Mapping[str, Sequence[int]] | None = None,
) -> list[Job]:
    """The grid of a kind of device, in an order in which every beginning covers the whole as evenly as it can.

    Args:
        device: ``cpu`` or ``cuda``.
        dtypes: by name; float32 and bfloat16 on a CPU, bfloat16 elsewhere.
        operation: a glob of operation names.
        narrow: other sizes than the sweeps have, by the names that operations know.
    """
    dtypes = dtypes or (("bfloat16",) if device == "cuda" else ("float32", "bfloat16"))
    jobs = []
    for name, each in REGISTRY.operations().items():
        if fnmatch.fnmatchcase(name, operation) and function_of(name) is not None:
            cases = (
                each.cases
                if each.sweep is None and not narrow
                else each.sweep(device, narrow or {})
                if each.sweep
                else ()
            )
            jobs += [Job(name, case, dtype) for case in cases for dtype in dtypes]
    return spread(jobs)


def spread(jobs: Sequence[Job]) -> list[Job]:
    """Order jobs so that an interruption leaves little unknown.

    Each kind of call has its turn, and of a kind it is always the call that is farthest from all before it, beginning
    with the smallest sizes.
    """
    kinds: dict[tuple[object, ...], list[Job]] = defaultdict(list)
    for job in jobs:
        schema = REGISTRY.operation(job.operation).schema
        fixed = tuple((name, size) for name, size in job.case.sizes.items() if not _goes_on(schema.axis(name)))
        kinds[job.operation, job.dtype, job.layout, tuple(job.case.params.items()), fixed].append(job)
    ordered = [_farthest_first(each) for each in kinds.values()]
    longest = max((len(each) for each in ordered), default=0)
    return [each[turn] for turn in range(longest) for each in ordered if turn < len(each)]


def _goes_on(axis: Axis) -> bool:
    """Whether times are expected to carry over along it: it changes while a program runs."""
    return axis.live


def _farthest_first(jobs: list[Job]) -> list[Job]:
    names = sorted({name for job in jobs for name in job.case.sizes})
    points = [[math.log2(max(job.case.sizes.get(name, 1), 1)) for name in names] for job in jobs]
    left = list(range(len(jobs)))
    first = min(left, key=lambda index: sum(points[index]))
    chosen = [first]
    left.remove(first)
    near = {index: math.dist(points[index], points[first]) for index in left}
    while left:
        index = max(left, key=lambda each: near[each])
        chosen.append(index)
        left.remove(index)
        near = {each: min(near[each], math.dist(points[each], points[index])) for each in left}
    return [jobs[index] for index in chosen]
