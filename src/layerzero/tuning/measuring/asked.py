"""From what somebody asks to measure to a list of jobs: shapes, cases, a recorded workload, or the default grid."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measuring.grid import default_grid
from layerzero.tuning.measuring.jobs import Job, Shape, jobs_of_cases, jobs_of_shape, operations_named
from layerzero.tuning.measuring.manifest import (
    FORMAT,
    Manifest,
    Recorded,
    every_call_of,
    jobs_of,
    jobs_of_file,
)


def asked_jobs(
    operation: str,
    shapes: Sequence[Shape] | str | None,
    dtypes: Sequence[str],
    device: str,
    *,
    manifest: str | os.PathLike[str] | None = None,
    model: str = "",
    head_dim: int | None = None,
    seq_lens: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    layout: str | None = None,
    params: Mapping[str, Any] | None = None,
    named: Sequence[str] | None = None,
) -> list[Job]:
    """List what :func:`layerzero.tune` measures, in order of what it is worth; its arguments are described there.

    Where nobody says what: what this machine called, then the operations' cases, then the grid.

    ``params`` are parameters that every call has, beside shapes or cases; operations without one of them, and cases
    that are no call with them, are left out. ``named`` are dtypes that somebody asks for: what was called or recorded
    in another one is left out, as it is in another ``layout``, or without what an alias implies.
    """
    implied, names = operations_named(operation)
    alike = functools.partial(_is_asked, names=names, dtypes=named, layout=layout, implied=dict(implied))
    if params:
        if shapes is None:
            raise ValueError(f"parameters: wanted them beside shapes or cases, got {', '.join(params)}")
        names = [name for name in names if params.keys() <= REGISTRY.operation(name).schema.known]
        implied |= params
    dims = None if head_dim is None else (head_dim,)
    of_grid = dict(head_dim=dims, seq_lens=seq_lens, batch_sizes=batch_sizes)  # noqa: C408  # as they are called
    narrow = {name: sizes for name, sizes in of_grid.items() if sizes is not None}
    narrowing = list(narrow)
    if model and manifest is None:
        raise ValueError(f"model: wanted it beside a manifest, which it is compared with, got {model!r} alone")
    if manifest is not None and (shapes is not None or narrowing):
        raise ValueError(f"manifest: wanted it alone, got {', '.join(narrowing) or 'shapes'} beside it")
    if shapes is not None and narrowing:
        raise ValueError(f"{', '.join(narrowing)}: they narrow the default grid: wanted them without shapes, got both")
    if manifest is not None:
        return [job for job in jobs_of_file(manifest, device, model=model) if alike(job)]
    if isinstance(shapes, str):
        if shapes != "cases":
            raise ValueError(f"shapes: wanted sizes, or 'cases' for the operations' own, got {shapes!r}")
        return list(jobs_of_cases(names, dtypes, layout, params))
    if shapes is not None:
        asked = [(shape, dtype) for dtype in dtypes for shape in shapes]
        return [job for shape, dtype in asked for job in jobs_of_shape(names, shape, dtype, implied, layout)]
    jobs = default_grid(device, dtypes, narrow=narrow)
    if not narrow:
        jobs = [*jobs_of_cases(names, dtypes), *jobs]
    kept = [job for job in jobs if alike(job)]
    kept = [dataclasses.replace(job, layout=layout) for job in kept] if layout else kept
    called = [] if narrow else [job for job in jobs_called(device) if alike(job)]
    return list({job.identity: job for job in reversed([*called, *kept])}.values())[::-1]


def jobs_called(device: str) -> list[Job]:
    """What this machine called, as misses left it in the ledger; calls that kernels are no longer known for are not."""
    return jobs_of(_called(), device)


def every_call(device: str) -> list[Job]:
    """The same, none standing for others."""
    return every_call_of(_called(), device)


def _called() -> Manifest:
    known = REGISTRY.operations()
    calls = [Recorded(count, call) for count, call in ENGINE.ledger.calls() if call.operation in known]
    return Manifest(FORMAT, time.time(), "", calls)


def _is_asked(
    job: Job, *, names: Sequence[str], dtypes: Sequence[str] | None, layout: str | None, implied: Mapping[str, Any]
) -> bool:
    """Whether a call is one of those that are asked for."""
    recipe = job.recipe
    params = job.case.params if recipe is None else recipe.params
    return (
        job.operation in names
        and (dtypes is None or job.dtype in dtypes)
        and (layout is None or recipe is None or recipe.layout in (None, layout))
        and all(params.get(name, value) == value for name, value in implied.items())
    )
