"""``layerzero tune``: a progress bar that shows what is winning, then what was found."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from rich.console import RenderableType
from rich.text import Text

from layerzero.cli.calls import TuneFlags
from layerzero.cli.flags import covers_plain, left_of, params_of, plain_params, refuse_tensors, shapes_of
from layerzero.cli.output import FINE, NO, Answer, Live, live
from layerzero.cli.tables import fitting, new_row, not_measured, some, table_of
from layerzero.core.ledger import Verdict
from layerzero.engine.registry import REGISTRY
from layerzero.testing.single_run import with_threads
from layerzero.tuning.measurement.contest import Contest
from layerzero.tuning.measurement.loop import Step
from layerzero.tuning.measurement.plain import plain_jobs, tune_plain
from layerzero.tuning.measurement.timing import carried
from layerzero.tuning.measurement.tune import Tuned, tune
from layerzero.tuning.measurement.tune_run import TunedChoice

MOST_ROWS = fitting(15, a_row=2)
"""Calls that have a row each, which may wrap."""

FEW = 3
"""Calls that are named where one line stands for many."""

_BRACKETS = "in brackets: how many times as long the next one takes; noise: no longer than times of both vary"


def answer(flags: TuneFlags) -> Answer:
    """Measure; exit with 1 if nothing was measured or known."""
    if flags.shapes and flags.cases:
        raise ValueError("--cases: wanted either --shapes or --cases, got both")
    REGISTRY.check_named(flags.without, "--without")
    usual = torch.get_num_threads()
    with with_threads(flags.threads), live(quiet=flags.json) as screen:
        tuned = (_tuned_plain if covers_plain(flags.operation) else _tuned)(flags, screen)
        used = torch.get_num_threads()
    return Answer(
        tuned.to_dict(),
        lambda: shown(tuned, used, usual, everything=flags.everything),
        FINE if tuned.contests or tuned.known else NO,
    )


def _tuned_plain(flags: TuneFlags, screen: Live) -> Tuned:
    refuse_tensors("tune", flags.operation, flags)
    jobs = plain_jobs(flags.operation, plain_params(flags.param, flags.operation))
    return tune_plain(
        jobs, samples=flags.samples, budget_s=flags.budget_s, again=flags.again, leave_out=flags.without,
        progress=screen.row,
    )  # fmt: skip


def _tuned(flags: TuneFlags, screen: Live) -> Tuned:
    return tune(
        flags.operation, "cases" if flags.cases else shapes_of(flags.shapes), flags.dtypes, flags.device,
        manifest=flags.manifest, model=flags.model, layout=flags.layout,
        params=params_of(flags.param, flags.operation), samples=flags.samples,
        budget_s=None if flags.budget_s is None else left_of(flags.budget_s), again=flags.again, graph=flags.graph,
        isolate=not flags.no_isolation, modules=flags.module or [], leave_out=flags.without,
        progress=lambda step: tell(screen, step),
    )  # fmt: skip


def tell(shown: Live, step: Step) -> None:
    """Show which call is measured, or which kernel won it."""
    if step.contest is not None:
        text = f"{step.job.name}: {winner(step.contest)}"
    else:
        text = f"{step.job.name} {f'({step.skipped})' if step.skipped else '…'}"
    done = step.number if step.contest is not None or step.skipped else step.number - 1
    shown.at(text, done, step.total, step.left_s)


def winner(found: Contest, *, short: bool = False) -> str:
    """Which kernel won, and by how much; ``short`` enough for a table."""
    timed = [(each.kernel.id, each.measurement) for each in found.entries if each.measurement is not None]
    if not timed:
        return "no kernel"
    name, best = timed[0]
    text = f"{name} {best.median_us:.1f} us"
    if len(timed) == 1:
        return text
    second, other = timed[1]
    ahead = carried(best.median_us, other.median_us, best.noise, other.noise)
    if ahead is None:
        return f"{text} (noise)" if short else f"{text}, no quicker than {second} within the noise"
    return f"{text} ({ahead:.2f}x)" if short else f"{text}, {ahead:.2f} times quicker than {second}"


def shown(tuned: Tuned, threads: int = 0, usual: int = 0, *, everything: bool = False) -> Iterator[RenderableType]:
    """A row for each call; of many those that changed, and of the rest a line for each operation.

    ``threads`` are those that were used, and ``usual`` those of a process that names none; ``everything`` has a row for
    each call, and each reason in full.
    """
    fold = len(tuned.contests) > MOST_ROWS and not everything
    for_some = threads != usual and any(found.facts.device.torch_type == "cpu" for found in tuned.contests)
    chosen_now = f"chosen with {threads} thread{'s' * (threads != 1)}" if for_some else "chosen now"
    table = table_of("call", "fastest (the next)", chosen_now, "before")
    pairs = list(zip(tuned.contests, tuned.choices, strict=True))
    same: dict[str, Counter[str]] = defaultdict(Counter)
    for found, now in pairs:
        before = now.before or "nothing"
        chosen = now.kernel_id or "nothing"
        if before == chosen and fold:
            same[found.report.operation][chosen] += 1
            continue
        now_chosen = f"{chosen}, once it is built" if now.builds else chosen
        new_row(table, found.name, winner(found, short=True), now_chosen, "the same" if before == chosen else before)
    if table.rows:
        table.caption, table.caption_justify = Text(_BRACKETS, style="dim"), "left"
        yield table
    for operation, kept in same.items():
        names = ", ".join(f"{name} {count}" for name, count in kept.most_common())
        yield Text(f"{operation}: {kept.total()} call{'s' * (kept.total() != 1)} as before: {names}")
    if same:
        yield Text("--all has a row for each of them", style="dim")
    if for_some:
        yield Text(f"torch uses {usual} here unless set otherwise: these times say nothing of that", style="yellow")
    yield from _noisy([(found, now) for found, now in pairs if now.too_noisy], everything=everything)
    yield from _untimed(tuned, everything=everything)
    yield from _not_vetted(tuned, everything=everything)
    for name, reason in tuned.in_process.items():
        yield Text(
            f"{name} ran in this process for the first time, no child process could try it: {reason}", style="yellow"
        )
    for name, reason in tuned.not_built.items():
        yield Text(f"{name} was not measured: it is not built: {reason}", style="yellow")
    yield from not_measured(tuned.skipped, tuned.needs_bytes, everything=everything)
    yield Text(f"{tuned}; for {tuned.winners_changed} of them the winner changed")


def _noisy(noisy: Sequence[tuple[Contest, TunedChoice]], *, everything: bool) -> Iterator[Text]:
    """Calls whose times are too noisy to decide."""
    if not noisy:
        return
    names = [f"{found.name} (confidence {now.confidence:.2f})" for found, now in noisy]
    told = some(names, math.inf if everything else FEW)
    yield Text(f"too noisy to decide: {told}; run again with --again on a calmer machine", style="yellow")


def _untimed(tuned: Tuned, *, everything: bool) -> Iterator[Text]:
    """Kernels without a time, each with its call; of one kernel and one state the first, and how many more.

    A state that more kernels share than are named, in the same words, is one line.
    """
    states: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for found in tuned.contests:
        for entry in found.entries:
            if entry.measurement is None:
                states[f"{entry.status}: {entry.detail}"][entry.kernel.id].append(found.name)
    of: dict[tuple[str, str], list[str]] = defaultdict(list)
    for state, kernels in states.items():
        if len(kernels) > FEW and not everything:
            names = some(list(kernels), FEW, "more kernels")
            calls = len({call for named in kernels.values() for call in named})
            yield Text(f"{names} on {calls} call{'s' * (calls > 1)}: {state}", style="yellow")
            continue
        for name, named in kernels.items():
            of[name, state.partition(":")[0]] += [f"{call}: {state}" for call in named]
    for (name, _), texts in of.items():
        for text in texts if everything else texts[:1]:
            more = "" if everything or len(texts) == 1 else f"; and for the same reason on {len(texts) - 1} more"
            yield Text(f"{name} on {text}{more}", style="yellow")


def _not_vetted(tuned: Tuned, *, everything: bool) -> Iterator[Text]:
    """Classes that did not pass; of those that time did not suffice for their number."""
    bad = [each for each in tuned.vetted if each.verdict is not Verdict.PASSED]
    yield from (Text(str(each), style="yellow") for each in bad if each.reached or everything)
    left = sum(not each.reached for each in bad)
    if left and not everything:
        yield Text(f"{left} classes were left to vet when the time was over; --all lists them", style="yellow")
