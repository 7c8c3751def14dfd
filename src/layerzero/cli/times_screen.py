"""What ``layerzero perfdb show`` says: some lines or one for each time, or, on a small screen, one an operation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from layerzero.cli.tables import SMALL, Lines, fitting, folded, lines_of, new_row, some, table_of
from layerzero.tuning.keeping.rows import Row

MOST_ROWS, FEW = fitting(12, screen=SMALL), 2
"""Operations that have a row, and kernels that one names."""


def times(rows: Sequence[Row], here: Sequence[bool]) -> RenderableType:
    """Measured times, a line each where that is wide enough, and whether each counts on this machine."""
    table = table_of("kernel", "work", "time", "from", kind=Lines)
    for row, counts in zip(rows, here, strict=True):
        whence = "imported" if row.source else row.written_at[:10]
        whence += "" if counts else ", does not count here"
        time = ", ".join([f"{row.median_us:.1f} us", *_parts(row)])
        new_row(table, row.kernel, " ".join(_work(row)), time, Text(whence, style="dim" if counts else "yellow"))
    return table


def times_in_full(rows: Sequence[Row], here: Sequence[bool]) -> RenderableType:
    """The same with spread, samples and the state of the machine, some lines each."""
    table = table_of("kernel", "work", "time", "from")
    for row, counts in zip(rows, here, strict=True):
        head, sizes = _work(row)
        spread = "\n".join([f"{row.median_us:.1f} us, p95 {row.p95_us:.1f}", *_parts(row)])
        origin = f"{row.origin}, {row.samples} samples{f', {row.condition}' if row.condition else ''}"
        whence = f"imported from {row.source}" if row.source else row.written_at[:16]
        new_row(
            table,
            row.kernel,
            lines_of(head, Text(sizes, style="dim")),
            lines_of(spread, Text("" if counts else "does not count here", style="yellow")),
            lines_of(origin, Text(whence, style="dim")),
        )
    return table


def _work(row: Row) -> tuple[str, str]:
    """What was timed: operation and dtype, and the sizes."""
    sizes = " ".join(f"{name} {size}" for name, size in row.work.sizes.items())
    return f"{row.facts.get('operation', '')} {row.facts.get('dtype', '')}{' in a graph' if row.graph else ''}", sizes


def _parts(row: Row) -> list[str]:
    """What the device and the host take of a time, where they were measured apart."""
    if row.device_us is None:
        return []
    return [f"device {row.device_us:.1f} us{f', host {row.host_us:.1f}' if row.host_us is not None else ''}"]


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
