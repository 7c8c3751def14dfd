"""``layerzero tune``: a progress bar that shows what is winning, then what was found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from layerzero.cli.modules import import_modules
from layerzero.cli.output import FINE, NO, Answer
from layerzero.cli.rows import new_row, new_table
from layerzero.cli.sizes import shapes_of, with_threads
from layerzero.core.ledger import Verdict
from layerzero.tuning.measuring.contest import Contest
from layerzero.tuning.measuring.tune import tune as run
from layerzero.tuning.measuring.tuned import Step, Tuned


def answer(
    operation: str,
    *,
    shapes: Sequence[str] | None,
    cases: bool,
    manifest: Path | None,
    model: str,
    dtype: str | None,
    layout: str | None,
    device: str | None,
    threads: int | None,
    samples: int | None,
    budget_s: float | None,
    again: bool,
    graph: bool,
    isolate: bool,
    modules: Sequence[str],
    leave_out: Sequence[str],
    quiet: bool,
) -> Answer:
    """Tune, and show the winners. Raises: ValueError or KeyError for flags that mean nothing."""
    if shapes and cases:
        raise ValueError("--cases: wanted either --shapes or --cases, got both")
    import_modules(modules)
    usual = torch.get_num_threads()
    with with_threads(threads), _bar(quiet=quiet) as told:
        tuned = run(
            operation,
            "cases" if cases else shapes_of(shapes),
            dtype.split(",") if dtype else None,
            device,
            manifest=manifest,
            model=model,
            layout=layout,
            samples=samples,
            budget_s=budget_s,
            again=again,
            graph=graph,
            isolate=isolate,
            modules=modules,
            leave_out=leave_out,
            progress=told,
        )
        used = torch.get_num_threads()
    return Answer(tuned.to_dict(), lambda: _shown(tuned, used, usual), FINE if tuned.contests or tuned.known else NO)


@contextlib.contextmanager
def _bar(*, quiet: bool) -> Iterator[Callable[[Step], None]]:
    """A progress bar on stderr; where nobody watches a terminal, nothing."""
    console = Console(stderr=True)
    left = TextColumn("{task.fields[left]}")
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), left, TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("looking for what to measure", total=None, left="")

        def told(step: Step) -> None:
            if step.contest is not None:
                text = f"{step.job.name}: {winner(step.contest)}"
            else:
                text = f"{step.job.name} {f'({step.skipped})' if step.skipped else '…'}"
            done = step.number if step.contest is not None or step.skipped else step.number - 1
            left = "" if step.left_s is None else f"{step.left_s:.0f} s left"
            progress.update(task, completed=done, total=step.total, description=text, left=left)

        yield told


def winner(found: Contest) -> str:
    """Who won, and by how much."""
    timed = [each for each in found.entries if each.measurement is not None]
    if not timed or timed[0].measurement is None:
        return "nobody"
    text = f"{timed[0].kernel.id} {timed[0].measurement.median_us:.1f} us"
    if len(timed) > 1 and timed[1].measurement is not None:
        ahead = timed[1].measurement.median_us / timed[0].measurement.median_us
        text += f", {ahead:.2f} times quicker than {timed[1].kernel.id}"
    return text


def _shown(tuned: Tuned, threads: int = 0, usual: int = 0) -> Iterator[RenderableType]:
    """The winners; ``threads`` are those that were used, and ``usual`` those of a process that names none."""
    for_some = threads != usual and any(found.facts.device.torch_type == "cpu" for found in tuned.contests)
    chosen_now = f"chosen with {threads} thread{'s' * (threads != 1)}" if for_some else "chosen now"
    table = new_table("call", "fastest", chosen_now, "before")
    for found, now in zip(tuned.contests, tuned.choices, strict=True):
        before = now.before or "nothing"
        chosen = now.kernel_id or "nothing"
        shown = f"{chosen}, once it is built" if now.builds else chosen
        new_row(table, found.name, winner(found), shown, "the same" if before == chosen else before)
    if tuned.contests:
        yield table
    if for_some:
        yield Text(f"torch uses {usual} here unless told otherwise: these times say nothing of that", style="yellow")
    pairs = list(zip(tuned.contests, tuned.choices, strict=True))
    noisy = [f"{found.name} (confidence {now.confidence:.2f})" for found, now in pairs if now.too_noisy]
    if noisy:
        again = "run again with --again on a calmer machine"
        yield Text(f"too noisy to decide: {', '.join(noisy)}; {again}", style="yellow")
    for found, _ in pairs:
        for entry in found.entries:
            if entry.measurement is None:
                yield Text(f"{entry.kernel.id} on {found.name}: {entry.status}: {entry.detail}", style="yellow")
    for vetted in tuned.vetted:
        if vetted.verdict is not Verdict.PASSED:
            yield Text(str(vetted), style="yellow")
    for name, reason in tuned.in_process.items():
        yield Text(f"{name} ran in this process for the first time, no child could be asked: {reason}", style="yellow")
    for name, reason in tuned.not_built.items():
        yield Text(f"{name} was not measured: it is not built: {reason}", style="yellow")
    for name, reason in tuned.skipped.items():
        yield Text(f"{name}: {reason}", style="yellow")
    yield Text(f"{tuned}; for {tuned.winners_changed} of them the winner changed")
