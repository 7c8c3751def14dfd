"""From what somebody asks to measure to a list of jobs: shapes, cases, a recorded workload, or the default grid."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from layerzero.tuning.measuring.grid import CPU, GPU, Extent, Heads, cases_of, default_grid, spread
from layerzero.tuning.measuring.jobs import Job, Shape, jobs_of_cases, jobs_of_shape, operations_named
from layerzero.tuning.measuring.manifest import Manifest, jobs_of


def asked_jobs(
    operation: str,
    shapes: Sequence[Shape] | str | None,
    dtypes: Sequence[str],
    device: str,
    *,
    manifest: str | os.PathLike[str] | None = None,
    head_dim: int | None = None,
    seq_lens: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    layout: str | None = None,
) -> list[Job]:
    """List what :func:`layerzero.tune` measures, in order; its arguments are described there."""
    implied, names = operations_named(operation)
    of_grid = {"head_dim": head_dim, "seq_lens": seq_lens, "batch_sizes": batch_sizes}
    narrowing = [name for name, value in of_grid.items() if value is not None]
    if manifest is not None and (shapes is not None or narrowing):
        raise ValueError(f"manifest: wanted it alone, got {', '.join(narrowing) or 'shapes'} beside it")
    if shapes is not None and narrowing:
        raise ValueError(f"{', '.join(narrowing)}: they narrow the default grid: wanted them without shapes, got both")
    if manifest is not None:
        return [job for job in jobs_of(Manifest.load(manifest), device) if job.operation in names]
    if isinstance(shapes, str):
        if shapes != "cases":
            raise ValueError(f"shapes: wanted sizes, or 'cases' for the operations' own, got {shapes!r}")
        return list(jobs_of_cases(names, dtypes, layout))
    if shapes is not None:
        asked = [(shape, dtype) for dtype in dtypes for shape in shapes]
        return [job for shape, dtype in asked for job in jobs_of_shape(names, shape, dtype, implied, layout)]
    if narrowing:
        jobs = _narrowed(GPU if device == "cuda" else CPU, dtypes, head_dim, seq_lens, batch_sizes)
    else:
        jobs = default_grid(device, dtypes)
    kept = [job for job in jobs if job.operation in names and _implied(job, implied)]
    return [dataclasses.replace(job, layout=layout) for job in kept] if layout else kept


def _implied(job: Job, implied: dict[str, Any]) -> bool:
    return all(job.case.params.get(name, value) == value for name, value in implied.items())


def _narrowed(
    extent: Extent,
    dtypes: Sequence[str],
    head_dim: int | None,
    seq_lens: Sequence[int] | None,
    batch_sizes: Sequence[int] | None,
) -> list[Job]:
    """Attention of the grid with other sizes."""
    heads = tuple(each for each in extent.heads if head_dim in (None, each.head_dim))
    if not heads:  # none of the common models: as many heads as the first of them has
        first = extent.heads[0]
        heads = (Heads(first.heads, first.kv_heads, head_dim or first.head_dim),)
    lengths, batches = tuple(seq_lens or ()), tuple(batch_sizes or ())
    narrowed = dataclasses.replace(
        extent,
        heads=heads,
        batches=batches or extent.batches,
        decode_batches=batches or extent.decode_batches,
        lengths=lengths or extent.lengths,
        contexts=lengths or extent.contexts,
    )
    cases = [(name, case) for name, case in cases_of(narrowed) if name.startswith("attention.")]
    return spread([Job(name, case, dtype) for dtype in dtypes for name, case in cases])
