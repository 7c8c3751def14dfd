"""The commands for operations without tensors: ``--param tokenizer_id=...`` names what a call works with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.console import RenderableType
from rich.text import Text

from layerzero.cli import vet as vetted
from layerzero.cli.flags import deadline_of
from layerzero.cli.output import FINE, NO, Answer, say
from layerzero.cli.question import Flags, pair_of, settings_of, value_of
from layerzero.cli.tables import new_row, table_of
from layerzero.core.ledger import Verdict
from layerzero.core.operation import Operation, Routed
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Report
from layerzero.engine.config import SCOPES
from layerzero.engine.plain import plain_facts
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.answers import explain
from layerzero.ops import PLAIN_FUNCTIONS, plain_function_of
from layerzero.tuning.measurement.plain import PlainBenched, PlainTuned, bench_plain, tune_plain
from layerzero.tuning.verification.vetting import plain_operations, plain_pairs, vet_calls


def covers(pattern: str) -> bool:
    """Whether a name means operations without tensors, and no others."""
    if pattern in PLAIN_FUNCTIONS:
        return True
    try:
        names = REGISTRY.operations_named(pattern)
    except KeyError:
        return False
    return all(REGISTRY.operation(name).plain is not None for name in names)


def params_of(texts: Sequence[str], pattern: str) -> dict[str, Any]:
    """What ``--param`` says. Raises: ValueError for a name that neither the function nor a schema has."""
    operations = [REGISTRY.operation(name) for name in REGISTRY.operations_named(pattern)]
    kinds = {each.name: each.types for one in operations for each in one.schema.params}
    found = {}
    for name, text in (pair_of(each, "--param", "name=value") for each in texts):
        if name != "tokenizer_id" and name not in kinds:  # what a case is drawn for
            known = ", ".join(["tokenizer_id", *kinds])
            raise ValueError(f"--param: wanted one of {known}, got {name!r}")
        found[name] = value_of(kinds.get(name, str), text, f"--param {name}")
    return found


def report(flags: Flags) -> Report:
    """What ``explain`` tells of a case, or of texts of a size (``--shape 16x100``: 16 texts of 100 characters)."""
    function = plain_function_of(flags.name)
    assert function is not None, flags.name
    operation = _operation(function, flags.name)
    assert operation.plain is not None
    params = params_of(flags.params, flags.name)
    case = _case(operation, flags)
    with SCOPES.scope(settings_of(flags.settings)):
        arguments = operation.plain.draw(case, _named(params, flags.name))
        arguments |= {name: value for name, value in params.items() if name in arguments}
        return explain(plain_facts(Routed(operation, arguments)))


def _operation(function: PlainFunction, name: str) -> Operation:
    return next((each for each in function.operations if each.name == name), function.operations[0])


def _case(operation: Operation, flags: Flags) -> Any:
    if flags.shape is None:
        named = flags.case or operation.cases[0].name
        found = next((each for each in operation.cases if each.name == named), None)
        if found is None:
            raise ValueError(f"--case: wanted one of {', '.join(each.name for each in operation.cases)}, got {named!r}")
        return found
    sizes = [int(each) for each in flags.shape.split("x") if each.isdigit()]
    if len(sizes) != len(flags.shape.split("x")) or not 1 <= len(sizes) <= 2 or not all(sizes):
        raise ValueError(f"--shape: wanted a size, or how many times a size (2000x100), got {flags.shape!r}")
    first = operation.cases[0]
    names = list(first.sizes)
    count = sizes[0] if len(sizes) == 2 else 1
    params = {"batched": True} if len(sizes) == 2 else {}
    return type(first)(flags.shape, {names[0]: sizes[-1] * count, names[1]: count}, params)


def _named(params: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if "tokenizer_id" not in params:
        raise ValueError(f"{name}: wanted --param tokenizer_id=FILE_OR_NAME, got none")
    return params


def vet(
    operation: str, params: Sequence[str], named: Sequence[str], *, budget_s: float, again: bool, quiet: bool
) -> Answer:
    """Let what works on a form of its own prove itself; exits with 1 where something is not the same, or was left."""
    deadline = deadline_of(budget_s)
    asked = list(plain_pairs(operation, _named(params_of(params, operation), operation), named, again=again))
    found = vet_calls(asked, progress=say if quiet else typer.echo, stop=deadline.passed)

    def show() -> Iterator[RenderableType]:
        yield from vetted.shown(found, budget_s, again=again) if found else ("nothing to vet",)

    return Answer(vetted.data_of(found), show, vetted.code_of(found))


def tune(
    operation: str,
    params: Sequence[str],
    *,
    samples: int | None,
    budget_s: float | None,
    again: bool,
    leave_out: Sequence[str],
    quiet: bool,
) -> Answer:
    """Prove and measure, and remember it; exits with 1 if nothing was measured or known."""
    given = _named(params_of(params, operation), operation)
    tuned = tune_plain(
        operation, given, samples=samples, budget_s=budget_s, again=again, leave_out=leave_out,
        progress=None if quiet else say,
    )  # fmt: skip
    return Answer(tuned.to_dict(), lambda: _tuned(tuned), FINE if tuned.contests or tuned.known else NO)


def _tuned(tuned: PlainTuned) -> Iterator[RenderableType]:
    for each in tuned.vetted:
        if each.verdict is not Verdict.PASSED:
            yield Text(str(each), style="yellow")
    yield from _shown(tuned.contests)
    yield Text(str(tuned))


def bench(
    operation: str,
    params: Sequence[str],
    *,
    samples: int | None,
    budget_s: float,
    only: Sequence[str],
    leave_out: Sequence[str],
    quiet: bool,
) -> Answer:
    """Measure and compare; exits with 1 if a kernel is wrong."""
    deadline = deadline_of(budget_s)
    given = _named(params_of(params, operation), operation)
    found = bench_plain(
        operation,
        given,
        samples=samples,
        only=only,
        leave_out=leave_out,
        deadline=deadline,
        told=lambda each: None if quiet else say(f"measured {each.operation} {each.case}"),
    )
    left = sum(len(each.cases) for each in plain_operations(operation)) - len(found)

    def show() -> Iterator[RenderableType]:
        yield from _shown(found, refused=True)
        if left:
            yield Text(
                f"{left} cases were left when {budget_s:g} s were over: --budget-s inf measures all", style="yellow"
            )

    bad = not found or any(each.wrong for each in found)
    data = {"calls": [each.to_dict() for each in found], "cut": left > 0, "left": left}
    return Answer(data, show, NO if bad else FINE)


def _shown(found: Sequence[PlainBenched], *, refused: bool = False) -> Iterator[RenderableType]:
    for each in found:
        yield Text(f"{each.operation} {each.case}", style="bold")
        table = table_of("", "kernel", "median us", "p95 us", "noise", right=("median us", "p95 us", "noise"))
        for name, time in each.times.items():
            chosen = name == each.chosen
            mark = Text(">", style="bold green") if chosen else ""
            cells = f"{time.median_us:.2f}", f"{time.p95_us:.2f}", f"{100 * time.noise:.1f} %"
            new_row(table, mark, Text(name, style="bold green" if chosen else ""), *cells)
        yield table
        for name, text in each.wrong.items():
            yield Text(f"{name}: {text}", style="yellow")
    if refused and found:
        for name, reasons in found[-1].refused.items():
            yield Text(f"refused: {name}: {'; '.join(f'{each.code}: {each.message}' for each in reasons)}", style="dim")
