"""The table of one call in ``layerzero bench``, the charts and the page of all of them, and ``perfdb show``.

A chart is a picture, or stands in a page that needs nothing else.
"""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from layerzero.cli.tables import SMALL, Lines, fitting, folded, lines_of, new_row, some, table_of
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system.disk import check_place, write_whole
from layerzero.inspection.diagnosis import doctor
from layerzero.tuning.measurement.bench import Benched, Line, TimedBy
from layerzero.tuning.storage.rows import Row

_ABSENT = frozenset({ReasonCode.NOT_INSTALLED, ReasonCode.PLATFORM_MISMATCH})
"""A library that is not here, or made for other hardware: one line for all of them."""


def tables(found: Sequence[Benched]) -> Iterator[RenderableType]:
    """A table for each call, with what stands around it."""
    for each in found:
        yield Text(each.name, style="bold")
        yield Text(described(each), style="dim")
        headers = columns(each.timed)
        table = table_of("", *headers, right=[header for header in headers if header not in ("kernel", "device from")])
        for line in each.lines:
            mark = Text(">", style="bold green") if line.chosen else ""
            new_row(table, mark, Text(line.name, style="bold green" if line.chosen else ""), *cells(line, each.timed))
        yield table
        if each.rough:
            yield Text(f"{each.rough}: these times are rough", style="yellow")
        yield from (Text(text, style="dim") for text in above(each))
        for line in each.lines:
            for told in details(line):
                yield Text(told, style="yellow")
        yield from (Text(text, style="dim") for text in refusals(each.refused))
        yield ""


def described(each: Benched) -> str:
    """What the call must do, what the machine can, and what is chosen."""
    parts = [f"chosen: {each.chosen}"]
    if each.work is not None and each.ceiling is not None:
        parts.append(f"{each.work.bytes / 1e6:.3g} MB and {each.work.flops / 1e9:.3g} GFLOP")
        parts.append(f"ceiling {each.ceiling.gb_s:.3g} GB/s, {each.ceiling.tflop_s:.3g} TFLOP/s, measured")
        parts.append(f"at best {each.ceiling.least_us(each.work):.3g} us from memory")
    elif each.work is not None:
        parts.append("ceiling not measured: too little memory")
    return "; ".join(parts)


def columns(timed: TimedBy) -> list[str]:
    """What stands above the cells of a line, its kernel first."""
    of_call = [] if timed is TimedBy.DEVICE else ["median us", "p95 us", "noise"]
    of_device = [] if timed is TimedBy.CALL else ["device us", "device from"]
    return ["kernel", *of_call, *of_device, "GB/s", "TFLOP/s", "of ceiling", "vs torch", "error"]


def cells(line: Line, timed: TimedBy) -> list[str]:
    """Numbers of a line as text; a kernel without a time has its status in their place."""
    if line.median_us is None or line.p95_us is None:
        return [line.status, *[""] * (len(columns(timed)) - 3), _error(line.error)]
    noise = "" if line.noise is None else f"{100 * line.noise:.1f} %"
    of_call = [] if timed is TimedBy.DEVICE else [f"{line.median_us:.1f}", f"{line.p95_us:.1f}", noise]
    device = "" if line.device_us is None else f"{line.device_us:.1f}"
    of_device = [] if timed is TimedBy.CALL else [device, line.device_from]
    share = "" if line.ceiling_share is None else f"{100 * line.ceiling_share:.0f} %"
    share = "above" if line.ceiling_share is not None and line.ceiling_share > 1 else share
    torch_ = "" if line.against_torch is None else f"{line.against_torch:.2f}x"
    rates = ["" if rate is None else f"{rate:.3g}" for rate in (line.gb_s, line.tflop_s)]
    return [*of_call, *of_device, *rates, share, torch_, _error(line.error)]


def above(each: Benched) -> Iterator[str]:
    """Why kernels are quicker than the ceiling allows, in one line for all; nothing where none is."""
    names = [line.name for line in each.lines if line.ceiling_share is not None and line.ceiling_share > 1]
    if names and each.work is not None and each.ceiling is not None:
        from_memory = each.work.bytes / each.ceiling.gb_s / 1e3 >= each.work.flops / each.ceiling.tflop_s / 1e6
        why = (
            "their tensors lie in a cache, and the ceiling is a copy beyond it"
            if from_memory
            else "the ceiling is one square product in this dtype, and this product has a kinder shape"
        )
        yield f"above the ceiling: {', '.join(names)}: {why}"


def details(line: Line) -> Iterator[str]:
    """Why a line has no time, or why its device time is no graph's."""
    if line.detail:
        yield f"{line.name}: {line.detail}"
    if line.device_detail:
        instead = "one launch between two events instead" if line.device_from else "no device time"
        yield f"{line.name}: not captured in a CUDA graph: {line.device_detail}; {instead}"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def refusals(refused: Mapping[str, Sequence[Reason]]) -> Iterator[str]:
    """Why kernels may not run: a line each, and one for all whose library or hardware is not here."""
    absent = []
    for kernel, reasons in refused.items():
        if any(reason.code in _ABSENT for reason in reasons):
            absent.append(kernel)
        else:
            yield f"refused: {kernel}: {'; '.join(f'{reason.code}: {reason.message}' for reason in reasons)}"
    if absent:
        yield f"not for this machine: {', '.join(absent)}"


_FORMATS = (".png", ".svg", ".pdf")
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2430; }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #d5dae1; padding-top: 1rem }
h3 { font-size: 1rem; margin-bottom: .2rem } .what { color: #5a6573; margin: 0 0 .5rem }
table { border-collapse: collapse; margin: .5rem 0 } th, td { padding: .2rem .7rem; text-align: right }
th { border-bottom: 1px solid #5a6573; font-weight: 600 } td:first-child, th:first-child { text-align: left }
tr.chosen td { font-weight: 600; background: #e8f4ec } tr:hover td { background: #f3f5f8 }
details { color: #5a6573; font-size: .9rem } svg { max-width: 100%; height: auto }
"""


def check(path: Path | None, html_path: Path | None = None) -> None:
    """Fail before anything is measured, not after it.

    Raises: ValueError where matplotlib is missing, or for a file that it cannot draw; OSError for one that cannot be
        written.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ValueError("--plot, --html: wanted matplotlib, got none; pip install matplotlib") from None
    mpl.use("Agg")
    if path is not None and path.suffix.lower() not in _FORMATS:
        raise ValueError(f"--plot: wanted a name that ends in {' or '.join(_FORMATS)}, got {path}")
    for each in (path, html_path):
        if each is not None:
            check_place(each)


def plot(found: Sequence[Benched], path: Path) -> None:
    """Draw a chart for each operation, one above the other, into a file."""
    groups = _groups(found)
    figure, all_axes = _figure([len(each) for _, each in groups])
    for axes, (operation, calls) in zip(all_axes, groups, strict=True):
        _draw(axes, operation, calls)
    written = io.BytesIO()
    figure.savefig(written, format=path.suffix[1:].lower(), bbox_inches="tight")
    write_whole(path, written.getvalue())


def page(found: Sequence[Benched], path: Path) -> None:
    """Write a page with a chart and the tables of each operation, everything in it."""
    write_whole(path, "".join(_page(found)).encode())


def _groups(found: Sequence[Benched]) -> list[tuple[str, list[Benched]]]:
    names = dict.fromkeys(each.operation for each in found)
    return [(name, [each for each in found if each.operation == name]) for name in names]


def _figure(calls: Sequence[int]) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    heights = [1.2 + 0.75 * count for count in calls]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    axes = figure.subplots(len(calls), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    return figure, [each[0] for each in axes]


def _draw(axes: Any, operation: str, calls: Sequence[Benched]) -> None:
    """A row of bars for each call: times as multiples of the quickest, the chosen one marked."""
    from matplotlib import colormaps

    names = sorted({line.name for each in calls for line in each.lines if line.by(each.timed) is not None})
    colours = {name: colormaps["tab20"](index % 20) for index, name in enumerate(names)}
    height = 0.8 / max(len(names), 1)
    for row, each in enumerate(calls):
        timed = [(line, time_us) for line in each.lines if (time_us := line.by(each.timed)) is not None]
        best = min((time_us for _, time_us in timed if time_us), default=1.0)
        for place, (line, time_us) in enumerate(timed):
            where = row - 0.4 + (place + 0.5) * 0.8 / len(timed)
            ratio = time_us / best
            edge = {"edgecolor": "black", "linewidth": 1.4} if line.chosen else {}
            axes.barh(where, ratio, 0.8 / len(timed), color=colours[line.name], **edge)
            text = f" {time_us:.3g} us{' (chosen)' if line.chosen else ''}"
            axes.text(ratio, where, text, va="center", fontsize=min(8.0, 70 * height))
    axes.set_yticks(range(len(calls)), [_short(each) for each in calls], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_xlim(0.9, axes.get_xlim()[1] * 1.6)
    axes.set_title(f"{operation}: time over the quickest kernel's", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [axes.barh([0], [0], color=colours[name]) for name in names]
    axes.legend(handles, names, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _short(each: Benched) -> str:
    return each.name.removeprefix(each.operation).strip()


def _page(found: Sequence[Benched]) -> Iterator[str]:
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>layerzero bench</title><style>{_STYLE}</style>'
    yield f'<h1>Kernels side by side</h1><p class="what">{escape(_where())}</p>'
    for operation, calls in _groups(found):
        yield f"<h2>{escape(operation)}</h2>{_svg(operation, calls)}"
        for each in calls:
            yield f'<h3>{escape(_short(each))}</h3><p class="what">{escape(described(each))}</p>'
            if each.rough:
                yield f"<p>{escape(each.rough)}: these times are rough</p>"
            yield from _html_table(each)
    yield "</html>\n"


def _where() -> str:
    diagnosis = doctor()
    devices = ", ".join(dict.fromkeys(device.name for device in diagnosis.devices))
    versions = ", ".join(f"{name} {version}" for name, version in diagnosis.versions.items())
    libraries = ", ".join(f"{each.name} {each.version}" for each in diagnosis.libraries if each.version)
    return f"{devices}; {versions}; {libraries}; {datetime.now(UTC):%Y-%m-%d}"


def _svg(operation: str, calls: Sequence[Benched]) -> str:
    """The chart as text of an SVG element, without the XML header that a file has."""
    figure, (axes,) = _figure([len(calls)])
    _draw(axes, operation, calls)
    written = io.StringIO()
    figure.savefig(written, format="svg", bbox_inches="tight")
    text = written.getvalue()
    return text[text.index("<svg") :]


def _html_table(each: Benched) -> Iterator[str]:
    yield f"<table><tr>{''.join(f'<th>{header}</th>' for header in columns(each.timed))}</tr>"
    for line in each.lines:
        row = "".join(f"<td>{escape(cell)}</td>" for cell in (line.name, *cells(line, each.timed)))
        mark = ' class="chosen"' if line.chosen else ""
        yield f"<tr{mark}>{row}</tr>"
    yield "</table>"
    yield from (f"<p>{escape(text)}</p>" for text in above(each))
    told = [text for line in each.lines for text in details(line)] + list(refusals(each.refused))
    if told:
        text = "<br>".join(map(escape, told))
        yield f"<details><summary>refused or without a time, and why</summary>{text}</details>"


MOST_ROWS, FEW = fitting(12, screen=SMALL), 2
"""Operations that have a row, and kernels that one names."""


def times(rows: Sequence[Row], here: Sequence[bool], *, everything: bool) -> Iterator[RenderableType]:
    """Measured times, a line each where that is wide enough, and whether each counts on this machine.

    ``everything`` has their spread, samples and the state of the machine, too, in some lines each.
    """
    table = table_of("kernel", "work", "time", "from", kind=Table if everything else Lines)
    for row, counts in zip(rows, here, strict=True):
        elsewhere = "" if counts else "does not count here"
        if everything:
            head, sizes = _work(row)
            origin = f"{row.origin}, {row.samples} samples{f', {row.condition}' if row.condition else ''}"
            whence = f"imported from {row.source}" if row.source else row.written_at[:16]
            spread = "\n".join([f"{row.median_us:.1f} us, p95 {row.p95_us:.1f}", *_parts(row)])
            told = lines_of(head, Text(sizes, style="dim")), lines_of(spread, Text(elsewhere, style="yellow"))
            new_row(table, row.kernel, *told, lines_of(origin, Text(whence, style="dim")))
        else:
            whence = ", ".join(filter(None, ["imported" if row.source else row.written_at[:10], elsewhere]))
            time = ", ".join([f"{row.median_us:.1f} us", *_parts(row)])
            new_row(table, row.kernel, " ".join(_work(row)), time, Text(whence, style="dim" if counts else "yellow"))
    if rows:
        yield table


def _work(row: Row) -> tuple[str, str]:
    """What was timed: operation and dtype, and the sizes."""
    sizes = " ".join(f"{name} {size}" for name, size in row.work.sizes.items())
    return f"{row.facts.get('operation', '')} {row.facts.get('dtype', '')}{' in a graph' if row.graph else ''}", sizes


def _parts(row: Row) -> list[str]:
    """What the device and the host take of a time, where they were measured apart, and how far the result was off."""
    host = "" if row.host_us is None else f", host {row.host_us:.1f}"
    device = [] if row.device_us is None else [f"device {row.device_us:.1f} us{host}"]
    return device if row.error is None else [*device, f"error {row.error:.1e}"]


def on_a_small_screen(rows: Sequence[Row], here: Sequence[bool]) -> Iterator[RenderableType]:
    """Of each operation how many calls have times, how many times those are, and which kernels are the quickest.

    Only times that count on this machine say which kernel is quickest.
    """
    of: dict[str, list[tuple[Row, bool]]] = defaultdict(list)
    for row, counts in zip(rows, here, strict=True):
        of[row.facts.get("operation", "")].append((row, counts))
    table = table_of("operation", "calls", "times", "quickest", "latest", right=("calls", "times"))
    latest = sorted(of.items(), key=lambda each: max(row.written_at for row, _ in each[1]), reverse=True)
    lines = [
        (
            operation,
            str(len({(row.work.key, row.graph) for row, _ in found})),
            str(len(found)),
            _quickest(found),
            max(row.written_at for row, _ in found)[:10],
        )
        for operation, found in latest
    ]
    yield from folded(table, lines, MOST_ROWS, "and {} more operations")
    yield Text("--operation NAME lists the times of one, --all each with its spread", style="dim")


def _quickest(found: Sequence[tuple[Row, bool]]) -> str:
    """Kernels that are the quickest of a call, and of how many."""
    best: dict[tuple[bytes, bool], Row] = {}
    for row, counts in found:
        call = row.work.key, row.graph
        if counts and (call not in best or row.median_us < best[call].median_us):
            best[call] = row
    won = Counter(row.kernel for row in best.values())
    return some([f"{name} {count}" for name, count in won.most_common()], FEW) or "none that counts here"
