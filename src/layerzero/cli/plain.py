"""The commands for operations without tensors: ``--param tokenizer_id=...`` names what a call works with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from layerzero.cli.calls import CallFlags
from layerzero.cli.flags import deadline_of, plain_params
from layerzero.cli.measurement import BenchFlags, TuneFlags
from layerzero.cli.output import FINE, NO, Answer, say
from layerzero.cli.question import settings_of
from layerzero.cli.tables import new_row, table_of
from layerzero.core.ledger import Verdict
from layerzero.core.operation import Operation, Routed
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Report
from layerzero.engine.config import SCOPES
from layerzero.engine.plain import plain_facts
from layerzero.inspection.answers import explain
from layerzero.ops import plain_function_of
from layerzero.tuning.measurement.plain import PlainBenched, PlainTuned, bench_plain, tune_plain
from layerzero.tuning.verification.vetting import plain_operations


def report(flags: CallFlags) -> Report:
    """What ``explain`` tells of a case, or of texts of a size (``--shape 16x100``: 16 texts of 100 characters)."""
    function = plain_function_of(flags.name)
    assert function is not None, flags.name
    operation = _operation(function, flags.name)
    assert operation.plain is not None
    params = plain_params(flags.params, flags.name)
    case = _case(operation, flags)
    with SCOPES.scope(settings_of(flags.settings)):
        arguments = operation.plain.draw(case, params)
        arguments |= {name: value for name, value in params.items() if name in arguments}
        return explain(plain_facts(Routed(operation, arguments)))


def _operation(function: PlainFunction, name: str) -> Operation:
    return next((each for each in function.operations if each.name == name), function.operations[0])


def _case(operation: Operation, flags: CallFlags) -> Any:
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


def tune(flags: TuneFlags) -> Answer:
    """Prove and measure, and remember it; exits with 1 if nothing was measured or known."""
    tuned = tune_plain(
        flags.operation, plain_params(flags.param, flags.operation), samples=flags.samples, budget_s=flags.budget_s,
        again=flags.again, leave_out=flags.without, progress=None if flags.json else say,
    )  # fmt: skip
    return Answer(tuned.to_dict(), lambda: _tuned(tuned), FINE if tuned.contests or tuned.known else NO)


def _tuned(tuned: PlainTuned) -> Iterator[RenderableType]:
    for each in tuned.vetted:
        if each.verdict is not Verdict.PASSED:
            yield Text(str(each), style="yellow")
    yield from _shown(tuned.contests)
    yield Text(str(tuned))


def bench(flags: BenchFlags) -> Answer:
    """Measure and compare; exits with 1 if a kernel is wrong."""
    if flags.timed not in (None, "call"):
        raise ValueError(f"--timed: wanted call for an operation without tensors, got {flags.timed!r}")
    operation, budget_s = flags.operation, flags.budget_s
    found = bench_plain(
        operation,
        plain_params(flags.param, operation),
        samples=flags.samples,
        only=flags.kernel,
        leave_out=flags.without,
        deadline=deadline_of(budget_s),
        told=lambda each: None if flags.json else say(f"measured {each.operation} {each.case}"),
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
