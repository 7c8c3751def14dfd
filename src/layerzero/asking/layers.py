"""Rows of a trace as lines for people: layers that differ in their number only stand in one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerzero.asking.trace import Row

_HEADERS = ("layer", "calls", "operation", "kernel", "why")


def as_table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table, one for rows that say the same of numbered layers; their calls are those of each layer."""
    cells = [_HEADERS, *_cells(rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADERS))]
    lines = []
    for line in cells:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        lines.append("  ".join(padded).rstrip())
    return [lines[0], "  ".join("-" * width for width in widths[:-1]) + "  ---", *lines[1:]]


def _cells(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str, str]]:
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    first: dict[tuple[object, ...], tuple[Row, str, str]] = {}
    for row in rows:
        before, number, after = numbered(row.layer)
        kind = (before, number is None, after, row.module, *row.kind[1:], row.why, row.calls)
        alike[kind] += [] if number is None else [number]
        first.setdefault(kind, (row, before, after))
    for kind, (row, before, after) in first.items():
        path = f"{before}{ranges(alike[kind])}{after}" or "(model)"
        adapts = f" [{'; '.join(row.adapts)}]" if row.adapts else ""
        yield f"{path} {row.module}", str(row.calls), row.operation, row.kernel, row.why + adapts


def numbered(path: str) -> tuple[str, int | None, str]:
    """A path around its first number: ``layers.3.norm`` is ``layers.``, 3 and ``.norm``."""
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            before, after = parts[:place], parts[place + 1 :]
            return "".join(f"{each}." for each in before), int(part), "".join(f".{each}" for each in after)
    return path, None, ""


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in few characters: ``0-2,5``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)
