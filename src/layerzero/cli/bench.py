"""``layerzero bench``: measure calls until the time is over, each result as it comes, then the answer.

At its end it shows the answer in sentences, a row for each call, and what was left out.
"""

from __future__ import annotations

import math
import operator
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from rich.console import RenderableType
from rich.text import Text

from layerzero.cli import listing
from layerzero.cli.bench_tables import check, details, page, plot, refusals, tables
from layerzero.cli.calls import BenchFlags
from layerzero.cli.flags import covers_plain, deadline_of, params_of, plain_params, refuse_tensors, shapes_of
from layerzero.cli.output import FINE, NO, Answer, Live, live, say
from layerzero.cli.tables import fitting, new_row, not_measured, some, table_of
from layerzero.engine.config import current_policy
from layerzero.engine.policy import names_any
from layerzero.engine.registry import REGISTRY
from layerzero.testing.single_run import with_threads
from layerzero.tuning.measurement.bench import TORCH, Benched, Line, TimedBy
from layerzero.tuning.measurement.clocks import clock_of, current
from layerzero.tuning.measurement.comparison import Compared, compare, long_calls
from layerzero.tuning.measurement.contest import Status
from layerzero.tuning.measurement.jobs import telling
from layerzero.tuning.measurement.loop import NO_TIME, Step
from layerzero.tuning.measurement.plain import bench_plain, plain_jobs
from layerzero.tuning.measurement.timing import Deadline, Effort
from layerzero.tuning.measurement.tune import asked_jobs, dtypes_of

MOST_ROWS = fitting(19)
"""Rows taken by the answer, what is left out, and what the table has around its rows."""

WINNERS = 4
"""Kernels that the answer names."""

AS_GOOD = 1.05
"""Times the fastest one's time: as good, by what times differ between two runs."""


def answer(flags: BenchFlags) -> Answer:
    """Measure and compare; exit with 1 if a kernel is wrong or fails, or if nothing was measured."""
    deadline = deadline_of(flags.budget_s)
    if flags.plot is not None or flags.html is not None:
        check(flags.plot, flags.html)
    REGISTRY.check_named(flags.kernel)
    REGISTRY.check_named(flags.without, "--without")
    compared = (_compared_plain if covers_plain(flags.operation) else _compared)(flags, deadline)
    found = compared.found
    bad = not found or any(line.status in (Status.WRONG, Status.FAILED) for each in found for line in each.lines)
    try:
        if flags.plot is not None and found:
            plot(found, flags.plot)
        if flags.html is not None and found:
            page(found, flags.html)
    except OSError as error:  # what was measured is printed all the same
        say(f"error: {error.filename}: wanted a place to write to, got: {error.strerror}")
        bad = True
    return Answer(
        {**compared.to_dict(), "budget_s": None if flags.budget_s == math.inf else flags.budget_s},
        lambda: shown_on_screen(compared, flags.operation, flags.budget_s, everything=flags.everything),
        NO if bad else FINE,
    )


def _compared_plain(flags: BenchFlags, deadline: Deadline) -> Compared:
    if flags.timed not in (None, TimedBy.CALL):
        raise ValueError(f"--timed: wanted call for an operation without tensors, got {flags.timed!r}")
    refuse_tensors("bench", flags.operation, flags)
    jobs = plain_jobs(flags.operation, plain_params(flags.param, flags.operation))
    with live(quiet=flags.json) as screen:
        return bench_plain(
            jobs, samples=flags.samples, only=flags.kernel, leave_out=flags.without, deadline=deadline,
            told=lambda each: screen.row(result(each)),
        )  # fmt: skip


def _compared(flags: BenchFlags, deadline: Deadline) -> Compared:
    target = torch.device(flags.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    times = timed_of(flags.timed, target)
    dtypes: Sequence[str] = dtypes_of(flags.dtypes, target)
    if flags.kernel and flags.dtype is None:
        dtypes = dtypes_taken(flags.kernel, flags.operation, dtypes)
    wanted = shapes_of(flags.shapes) or (None if flags.manifest else "cases")
    jobs = asked_jobs(
        flags.operation,
        wanted,
        dtypes,
        target.type,
        manifest=flags.manifest,
        layout=flags.layout,
        params=params_of(flags.param, flags.operation),
        named=None if flags.dtype is None else dtypes,
    )
    if not jobs:
        raise ValueError(f"{flags.operation}: wanted calls on {target.type}, got none")
    if wanted == "cases":
        jobs = telling(jobs)
    with with_threads(flags.threads), current(target), live(quiet=flags.json) as screen:
        return compare(
            jobs,
            target,
            effort=Effort(flags.samples or current_policy()["tune_samples"], fill=target.type == "cpu"),
            clock=clock_of(target),
            deadline=deadline,
            leave_out=flags.without,
            only=flags.kernel,
            timed=times,
            modules=flags.module or [],
            is_long=long_calls(target, deadline) if wanted == "cases" else lambda _: False,
            progress=lambda step: tell(screen, step),
        )


def shown_on_screen(
    compared: Compared, operation: str, budget_s: float, *, everything: bool = False
) -> Iterator[RenderableType]:
    """The answer first, then the calls; ``everything`` has a table for each call, and every reason."""
    found = compared.found
    if found:
        yield from map(Text, answer_of(found, operation))
        yield ""
    if everything or len(found) == 1 or sum(map(_height, found)) <= MOST_ROWS:
        yield from tables(found)
    else:
        yield from _rows(found)
        yield from _faults(found)
    yield from left_out(compared, budget_s, everything=everything)


def _height(each: Benched) -> int:
    """Lines of a call's own table, with what stands around it."""
    told = [text for line in each.lines for text in details(line)]
    return 7 + len(each.lines) + len(told) + len(list(refusals(each.refused)))


def _times(each: Benched) -> list[tuple[Line, float]]:
    timed = [(line, line.by(each.timed)) for line in each.lines if line.name != TORCH]
    return [(line, time_us) for line, time_us in timed if time_us is not None]


def _behind(each: Benched) -> float | None:
    """How many times as long as the fastest kernel the chosen one takes; None where it has no time."""
    times = _times(each)
    own = next((line for line, _ in times if line.chosen), None)
    return None if own is None else times[0][0].gain_over(own, each.timed)


def _over_torch(each: Benched) -> float | None:
    """How many times as long torch's own function takes, as far as samples say so; None where it has no time."""
    own = next((line for line in each.lines if line.name == TORCH), None)
    return None if own is None else _times(each)[0][0].gain_over(own, each.timed)


def result(each: Benched) -> str:
    """One call in a line: the fastest kernel, what it gains over torch's own function, and which is chosen."""
    times = _times(each)
    if not times:
        return f"{each.name}: no kernel has a time: {'; '.join(f'{line.name} {line.status}' for line in each.lines)}"
    best, time_us = times[0]
    text = f"{each.name}: {best.name} {_us(time_us)} us"
    gain = _over_torch(each)
    if gain is not None:
        text += (
            ", as quick as torch's own within the noise" if gain == 1.0 else f", {gain:.2f}x as quick as torch's own"
        )
    return f"{text}; LayerZero chooses: {_chosen(each)}"


def _chosen(each: Benched) -> str:
    behind = _behind(each)
    if _times(each)[0][0].chosen:
        return "the same"
    return f"{each.chosen} {'not timed' if behind is None else f'{behind:.2f}x'}"


def _us(time_us: float) -> str:
    return f"{time_us:.1f}" if time_us < 1000 else f"{time_us:.0f}"


def answer_of(found: Sequence[Benched], operation: str) -> Iterator[str]:
    """Which kernel is fastest where, what that gains over torch's own function, and what LayerZero chooses now."""
    timed = [each for each in found if _times(each)]
    if not timed:
        yield "No kernel has a time."
        return
    if len(timed) == 1:
        yield f"Fastest for {result(timed[0])}."
        return
    yield _fastest(timed)
    gains = [(gain, each.name) for each in timed if (gain := _over_torch(each)) is not None]  # names may be alike
    if gains:
        most, name = max(gains, key=operator.itemgetter(0))
        mean = math.exp(statistics.fmean(math.log(gain) for gain, _ in gains))
        yield f"They are {mean:.2f}x as quick as torch's own function in the mean, at most {most:.2f}x ({name})."
    behind = [(ratio, each.name) for each in timed if (ratio := _behind(each)) is not None]
    slower = [each for each in behind if each[0] > AS_GOOD]
    as_good = (
        f"LayerZero now chooses the fastest, or one within {AS_GOOD - 1:.0%} of it, in {len(behind) - len(slower)}"
    )
    text = f"{as_good} of {len(timed)} calls"
    if slower:
        worst, name = max(slower, key=operator.itemgetter(0))
        text += f"; in {len(slower)} it takes longer, at most {worst:.2f}x ({name})"
        text += f": `layerzero tune {shlex.quote(operation)}` lets measured times choose"
    yield f"{text}."
    rough = Counter(each.rough for each in timed if each.rough)
    if rough:
        yield f"Believe none of this to the percent: {', '.join(rough)} for {rough.total()} calls."


def _fastest(timed: Sequence[Benched]) -> str:
    """``Fastest: torch.sdpa in 5 of 9 calls (gqa.decode 3, gqa.prefill 2), ...``."""
    where: dict[str, Counter[str]] = defaultdict(Counter)
    shared = _shared([each.operation for each in timed])
    for each in timed:
        where[_times(each)[0][0].name][each.operation.removeprefix(shared)] += 1
    ordered = sorted(where, key=lambda name: (-where[name].total(), name))
    several = len({each.operation for each in timed}) > 1
    parts: list[str] = []
    for name in ordered[:WINNERS]:
        count = f"{where[name].total()} of {len(timed)} calls" if not parts else str(where[name].total())
        places = some([f"{place} {times}" for place, times in where[name].most_common()], WINNERS)
        parts.append(f"{name} in {count}{f' ({places})' if several else ''}")
    if others := ordered[WINNERS:]:
        parts.append(f"{len(others)} others in {sum(where[name].total() for name in others)}")
    return f"Fastest: {', '.join(parts)}."


def _shared(names: Sequence[str]) -> str:
    """The beginning that all names have, up to a dot; empty for one name alone."""
    parts = [name.split(".") for name in dict.fromkeys(names)]
    same = 0
    while len(parts) > 1 and all(len(each) > same + 1 and each[same] == parts[0][same] for each in parts):
        same += 1
    return "".join(f"{part}." for part in parts[0][:same])


def _rows(found: Sequence[Benched]) -> Iterator[RenderableType]:
    """A row for each call, by operation; of many those that came first."""
    kept = list(found)
    while len(kept) > 1 and len(kept) + len({each.operation for each in kept}) > MOST_ROWS:
        kept.pop()
    time = "device us" if any(each.timed == "device" for each in kept) else "us"
    right = (time, "vs torch", "its time")
    headers = ("call", "fastest kernel", time, "vs torch", "LayerZero chooses", "its time")
    table = table_of(*headers, right=right, ids=headers[:2])
    for operation in dict.fromkeys(each.operation for each in kept):
        new_row(table, Text(operation, style="bold"), "", "", "", "", "")
        for each in kept:
            if each.operation == operation:
                new_row(table, *_cells(each))
    yield table
    if more := len(found) - len(kept):
        yield Text(f"and {more} more calls: --all shows them, --json has their times", style="dim")


def _cells(each: Benched) -> list[str | Text]:
    name, times = f"  {each.name.removeprefix(each.operation).strip()}", _times(each)
    if not times:
        return [name, "no kernel has a time", "", "", each.chosen or "nothing", ""]
    best, time_us = times[0]
    over_torch = _over_torch(each)
    gain = "" if over_torch is None else f"{over_torch:.2f}x"
    behind = _behind(each)
    style = "green" if behind is not None and behind <= AS_GOOD else "yellow"
    if best.chosen:
        return [name, best.name, _us(time_us), gain, Text("the same", style=style), ""]
    chosen = Text(each.chosen or "nothing", style=style)
    return [name, best.name, _us(time_us), gain, chosen, "not timed" if behind is None else f"{behind:.2f}x"]


def _faults(found: Sequence[Benched]) -> Iterator[Text]:
    """What the tables of single calls would say of all of them, each in a line: faults and refusals."""
    faults: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for each in found:
        for line in each.lines:
            if line.status in (Status.WRONG, Status.FAILED, Status.MEMORY, Status.BANNED):
                faults[line.name, line.status].append((each.name, line.detail))
    for (name, status), calls in faults.items():
        where, detail = calls[0]
        more = f" and {len(calls) - 1} other calls" if len(calls) > 1 else ""
        yield Text(f"{name}: {status} for {where}{more}: {detail}", style="yellow")
    refused = {name for each in found for name in each.refused}
    if refused:
        yield Text(f"{len(refused)} kernels may not run some of these calls: --all says why", style="dim")


def left_out(compared: Compared, budget_s: float, *, everything: bool) -> Iterator[Text]:
    """What was not measured, and the flag that measures it."""
    if not compared.found:
        yield Text(f"nothing was measured in {compared.seconds:.0f} s", style="yellow")
    if compared.left:
        count = len(compared.left)
        first = f"{count} {'calls were' if count > 1 else 'call was'} left when {budget_s:g} s were over"
        names = ", ".join(compared.left if everything else compared.left[:1])
        named = names if everything or len(compared.left) == 1 else f"{names}, ..."
        yield Text(f"{first} ({named}): --budget-s inf measures all, --shapes what you name", style="yellow")
    if compared.not_built:
        names = ", ".join(compared.not_built)
        yield Text(f"left out where they would have to compile: {names}: --budget-s inf waits for them", style="yellow")
        if everything:
            yield from (Text(f"{name}: {why}", style="yellow") for name, why in compared.not_built.items())
    yield from not_measured(compared.skipped, compared.needs_bytes, everything=everything)


def tell(shown: Live, step: Step) -> None:
    """Say what is measured, or what was found."""
    ended = step.contest is not None or step.skipped
    text = "building what has to compile" if step.builds else step.job.name
    shown.at(text, step.number - (not ended), step.total, step.left_s)
    if step.contest is not None:
        again = ", with what was built since" if step.again else ""
        shown.row(f"{step.number} of {step.total}{again}: {result(step.contest)}")
    elif step.skipped and step.skipped != NO_TIME:
        shown.row(f"not measured: {step.job.name}: {step.skipped}")


def timed_of(text: str | None, device: torch.device) -> TimedBy:
    """Which times are wanted: both on a CUDA device by default. Raises: ValueError with wanted and got."""
    if text is None:
        return TimedBy.BOTH if device.type == "cuda" else TimedBy.CALL
    if text not in list(TimedBy):
        raise ValueError(f"--timed: wanted one of {', '.join(TimedBy)}, got {text!r}")
    if text != TimedBy.CALL and device.type != "cuda":
        raise ValueError(
            f"--timed {text}: wanted a CUDA device, got {device.type}, where a call is all there is to time"
        )
    return TimedBy(text)


def dtypes_taken(only: Sequence[str], operation: str, usual: Sequence[str]) -> Sequence[str]:
    """Of the usual dtypes those that some of these kernels take, or else what the kernels name."""
    kernels = [each for each in REGISTRY.kernels(operation) if names_any(only, each)]
    named = [listing.dtypes(each) for each in kernels]
    if not all(named):
        return usual
    taken = dict.fromkeys(name for names in named for name in names)
    return [name for name in usual if name in taken] or list(taken)
