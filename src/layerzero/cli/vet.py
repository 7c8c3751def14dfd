"""``layerzero vet``: what kernels prove about themselves here, a line for each class of calls."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
import typer
from rich.console import RenderableType

from layerzero.cli.calls import VetFlags
from layerzero.cli.flags import covers_plain, deadline_of, plain_params, refuse_tensors, shapes_of
from layerzero.cli.output import FINE, NO, Answer, say
from layerzero.cli.tables import fitting, fold
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_named
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict, capture_text, class_text
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measurement.jobs import in_turn
from layerzero.tuning.measurement.tune import asked_jobs
from layerzero.tuning.verification import vetting

Pair = tuple[Kernel, Facts]

MANY = 10
"""Classes from which on their number is printed beforehand: each takes seconds."""

MOST_KERNELS = fitting(15)
"""Kernels that have a line each at the end."""

NOT_REACHED = "not reached"


def answer(flags: VetFlags) -> Answer:
    """Vet; exit with 1 if a verdict is bad, or time did not suffice for all.

    Raises: ValueError for a name that means nothing, a bad shape or a bad budget.
    """
    if flags.operation_ not in (None, flags.operation) and flags.operation != "*":
        raise ValueError(f"--operation: wanted one OPERATION, got {flags.operation} and {flags.operation_}; vet each")
    operation, deadline = flags.operation_ or flags.operation, deadline_of(flags.budget_s)
    if covers_plain(operation):
        pairs, nothing = _of_plain(flags, operation), ""
    else:
        pairs, nothing = _of_tensors(flags, operation)
    text = capture_text if flags.graph else class_text
    classes = len({(kernel.id, text(facts)) for kernel, facts in pairs})
    if classes > MANY:
        end = "" if flags.budget_s == math.inf else f" for {flags.budget_s:g} s (--budget-s)"
        say(f"{classes} classes, one after the other in a child process{end}; what is found is kept by Ctrl-C, too")
    numbers = itertools.count(1)

    def told(text: str) -> None:
        (say if flags.json else typer.echo)(f"{next(numbers)} of {classes}: {text}" if classes > 1 else text)

    found = vetting.vet_calls(pairs, modules=flags.module or [], progress=told, stop=deadline.passed, graph=flags.graph)
    if not found:
        return Answer(data_of(found), lambda: [f"nothing to vet{nothing}"], FINE)
    return Answer(data_of(found), lambda: shown(found, flags.budget_s, again=flags.again), code_of(found))


def _check_named(flags: VetFlags) -> None:
    REGISTRY.check_named(flags.kernel)
    REGISTRY.check_named(flags.backend, "--backend")


def _of_plain(flags: VetFlags, operation: str) -> list[Pair]:
    """What works on a form of its own, and has to prove itself for it."""
    refuse_tensors("vet", operation, flags)
    named = [*flags.kernel, *flags.backend]
    _check_named(flags)
    return list(vetting.plain_pairs(operation, plain_params(flags.param, operation), named, again=flags.again))


def _of_tensors(flags: VetFlags, operation: str) -> tuple[list[Pair], str]:
    """The kernels that take turns, each with its classes; and why there are none, where that is so."""
    if flags.param:
        raise ValueError("--param: wanted an operation without tensors with it, as `vet tokenize`, got another")
    names = [*flags.kernel, *flags.backend]
    _check_named(flags)
    sizes = shapes_of(flags.shapes)
    here = Device.detect(flags.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    asked_of = (flags.kernel or None, flags.backend or None)
    chosen = [
        each for each in REGISTRY.kernels(operation) if vetting.is_named(each, *asked_of, here, graph=flags.graph)
    ]
    named = None if flags.dtype is None else flags.dtype.split(",")
    if flags.manifest is None:
        if sizes:  # to say what is no call at all
            asked_jobs(operation, sizes, named or ["float32"], here.torch_type)
        dtypes = None if named is None else [dtype_named(each) for each in named]
        asked = list(vetting.class_pairs(chosen, operation, here, sizes, dtypes, graph=flags.graph))
    else:
        jobs = asked_jobs(operation, sizes, named or (), here.torch_type, manifest=flags.manifest, named=named)
        calls = [dataclasses.replace(each, for_graph=flags.graph).facts(here.torch_type) for each in jobs]
        of = [(kernel, facts) for facts in calls for kernel in chosen if facts.operation.name in kernel.operations]
        asked = [(kernel, facts) for kernel, facts in of if vetting.allows(kernel, facts)]
    turns: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for kernel, facts in asked:
        if flags.again or not vetting.is_known(kernel, facts, graph=flags.graph):
            turns[kernel.id, facts.operation.name].append((kernel, facts))
    pairs = in_turn(turns.values())
    own_cases = sizes is None and flags.manifest is None
    return pairs, f": {_nothing(chosen, asked, names, own_cases=own_cases)}"


def data_of(found: Sequence[vetting.Vetted]) -> dict[str, object]:
    """Plain values for JSON; ``cut`` says that this was no whole vet."""
    left = sum(not each.reached for each in found)
    counts = Counter(map(_state, found))
    return {"classes": [each.to_dict() for each in found], "counts": dict(counts), "cut": left > 0, "left": left}


def code_of(found: Sequence[vetting.Vetted]) -> int:
    """Fine if everything in question has been reached, and nothing of it is bad."""
    bad = any(each.verdict not in (None, Verdict.PASSED) or not each.reached for each in found)
    return NO if bad else FINE


def shown(found: Sequence[vetting.Vetted], budget_s: float, *, again: bool = False) -> Iterator[RenderableType]:
    """A line for each kernel where there are several, the sum, and what time did not suffice for."""
    of: dict[str, Counter[str]] = defaultdict(Counter)
    for each in found:
        of[each.kernel_id][_state(each)] += 1
    told = sorted(of.items(), key=lambda item: (set(item[1]) == {str(Verdict.PASSED)}, item[0]))
    if 1 < len(told) < len(found):
        lines, more = fold(
            [f"{name}: {_counted(counts)}" for name, counts in told], MOST_KERNELS, "and {} more kernels"
        )
        yield from lines
        yield from more
    yield f"{len(found)} classes: {_counted(Counter(map(_state, found)))}"
    left = sum(not each.reached for each in found)
    if left:
        what, them = ("classes were", "them") if left > 1 else ("class was", "it")
        yield (
            f"no whole vet: {left} {what} left when {budget_s:g} s were over, and nothing new is known of {them}; "
            + ("" if again or left == len(found) else "the same command goes on, ")
            + "--budget-s inf asks about all"
        )


def _state(each: vetting.Vetted) -> str:
    return str(each.verdict or ("not vetted" if each.reached else NOT_REACHED))


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


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
