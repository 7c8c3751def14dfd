"""Charts of ``layerzero bench``: one for each operation, as a picture or in a page that needs nothing else."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from layerzero.asking.diagnosis import doctor
from layerzero.cli.bench_tables import above, cells, columns, described, details, refusals
from layerzero.core.system.disk import check_place, write_whole
from layerzero.tuning.measuring.bench import Benched

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
        raise ValueError("--plot, --html: wanted matplotlib, got none; pip install 'layerzero[plots]'") from None
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
    yield f'<h1>Kernels side by side</h1><p class="what">{_text(_where())}</p>'
    for operation, calls in _groups(found):
        yield f"<h2>{_text(operation)}</h2>{_svg(operation, calls)}"
        for each in calls:
            yield f'<h3>{_text(_short(each))}</h3><p class="what">{_text(described(each))}</p>'
            if each.rough:
                yield f"<p>{_text(each.rough)}: these times are rough</p>"
            yield from _table(each)
    yield "</html>\n"


def _where() -> str:
    """The machine and the versions that were measured."""
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


def _table(each: Benched) -> Iterator[str]:
    yield f"<table><tr>{''.join(f'<th>{header}</th>' for header in columns(each.timed))}</tr>"
    for line in each.lines:
        row = "".join(f"<td>{_text(cell)}</td>" for cell in (line.name, *cells(line, each.timed)))
        mark = ' class="chosen"' if line.chosen else ""
        yield f"<tr{mark}>{row}</tr>"
    yield "</table>"
    yield from (f"<p>{_text(text)}</p>" for text in above(each))
    told = [text for line in each.lines for text in details(line)] + list(refusals(each.refused))
    if told:
        yield f"<details><summary>refused or without a time, and why</summary>{'<br>'.join(map(_text, told))}</details>"


def _text(text: str) -> str:
    return html.escape(text)
