"""``layerzero vet``: what kernels prove about themselves here, a line for each class of calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import typer

from layerzero.cli.modules import import_modules
from layerzero.cli.output import FINE, NO, Answer, say
from layerzero.cli.sizes import shapes_of
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict, class_text
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.policy import names_kernel
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measuring.asked import asked_jobs
from layerzero.tuning.measuring.jobs import Job, Shape
from layerzero.tuning.proving.vetting import allows, class_pairs, is_named, vet_calls

Pair = tuple[Kernel, Facts]

MANY = 10
"""Classes from which on somebody is told beforehand: each takes seconds."""


def answer(
    *,
    kernels: Sequence[str] | None,
    backends: Sequence[str] | None,
    operation: str,
    shapes: Sequence[str] | None,
    manifest: Path | None,
    dtype: str | None,
    device: str | None,
    modules: Sequence[str],
    again: bool,
    quiet: bool,
) -> Answer:
    """Vet; exit with 1 if a verdict is bad. Raises: ValueError for a name that means nothing, or a bad shape."""
    import_modules(modules)
    names = [*(kernels or []), *(backends or [])]
    for name in names:
        if not any(names_kernel(name, kernel) for kernel in REGISTRY.kernels()):
            raise ValueError(f"no kernel here is named by {name}; `layerzero kernels` lists them")
    sizes = shapes_of(shapes)
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    here, asked_of = Device.detect(target), (kernels or None, backends or None)
    chosen = [each for each in REGISTRY.kernels(operation) if is_named(each, *asked_of, here)]
    if sizes is None and manifest is None:
        dtypes = None if dtype is None else [dtype_named(each) for each in dtype.split(",")]
        asked = list(class_pairs(chosen, operation, here, None, dtypes))
    else:
        asked = list(_of_jobs(chosen, operation, target, dtype, sizes, manifest))
    pairs = [pair for pair in asked if again or ENGINE.ledger.judgement(*pair) is None]
    classes = len({(kernel.id, class_text(facts)) for kernel, facts in pairs})
    if classes > MANY:
        say(f"{classes} classes, one after the other in a child process; what is found so far is kept by Ctrl-C, too")
    numbers = itertools.count(1)

    def told(text: str) -> None:
        (say if quiet else typer.echo)(f"{next(numbers)} of {classes}: {text}" if classes > 1 else text)

    found = vet_calls(pairs, modules=modules, progress=told)
    counts = Counter(str(each.verdict or "not vetted") for each in found)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    bad = any(each.verdict not in (None, Verdict.PASSED) for each in found)
    if found:
        last = f"{len(found)} classes: {summary}"
    else:
        last = f"nothing to vet: {_nothing(chosen, asked, names, own_cases=sizes is None and manifest is None)}"
    data = {"classes": [each.to_dict() for each in found], "counts": dict(counts)}
    return Answer(data, lambda: [last], NO if bad else FINE)


def _nothing(chosen: Sequence[Kernel], asked: Sequence[Pair], names: Sequence[str], *, own_cases: bool) -> str:
    """Why there was nothing to do, and what would be something."""
    if not chosen:
        return "no such kernel has this operation" if names else "all is trusted"
    ids = ", ".join(each.id for each in chosen)
    if not asked:
        calls = "of the operation's cases" if own_cases else "of these calls"
        return f"none {calls} is one that the limits of {ids} allow; `layerzero kernels` lists limits"
    if own_cases:
        return "each of the operation's cases has a verdict (--again asks once more); other sizes need --shapes"
    return "each class of these calls has a verdict (--again asks once more)"


def _of_jobs(
    chosen: Sequence[Kernel],
    operation: str,
    device: str,
    dtype: str | None,
    shapes: Sequence[Shape] | None,
    manifest: Path | None,
) -> Iterator[Pair]:
    """The calls of shapes, in each layout, or of a workload, where the kernels' limits allow them."""
    known = {dtype_name(each) for one in REGISTRY.operations().values() for each in one.dtypes}
    dtypes = dtype.split(",") if dtype else sorted(known)
    jobs = asked_jobs(operation, shapes, dtypes, torch.device(device).type, manifest=manifest)
    for job in jobs:
        known_here = REGISTRY.operation(job.operation).dtypes
        kernels = [each for each in chosen if job.operation in each.operations]
        if not kernels or (job.recipe is None and dtype_named(job.dtype) not in known_here):
            continue
        for facts in _in_each_layout(job, device):
            yield from ((kernel, facts) for kernel in kernels if allows(kernel, facts))


def _in_each_layout(job: Job, device: str) -> Iterator[Facts]:
    layouts = REGISTRY.operation(job.operation).layouts if job.recipe is None else ()
    for layout in layouts or (job.layout,):
        yield Job(job.operation, job.case, job.dtype, layout, job.recipe, job.count).facts(device)
