"""What all screens are made of: tables that fold by one rule, names that are not cut, and counts of what is left out.

100 columns are enough, and a pipe reads the same words as a terminal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.containers import Lines as Wrapped
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from layerzero.core.reasons import Reason

T = TypeVar("T")

SCREEN, SMALL = 45, 24
"""Lines of a screen where no terminal says how many it has, and of the smallest that answers are folded for."""

_IDS = frozenset({"kernel", "library", "key", "name"})
"""Columns of ids, which stay whole; prose wraps."""


def table_of(
    *headers: str, right: Collection[str] = (), ids: Collection[str] = _IDS, kind: type[Table] = Table
) -> Table:
    """A table; ids stay whole, prose wraps, numbers stand to the right."""
    table = kind(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", expand=False)
    for header in headers:
        number = header in right
        table.add_column(
            whole(header), no_wrap=number or header in ids, justify="right" if number else "left", overflow="fold"
        )
    return table


def folded(
    table: Table, rows: Iterable[Sequence[Text | str]], most: float, more: str = "and {} more"
) -> Iterator[RenderableType]:
    """A table of rows, of more than ``most`` the first, and a line that counts the others."""
    shown, left = fold(list(rows), most, more)
    for row in shown:
        new_row(table, *row)
    if shown:
        yield table
    yield from left


def fitting(around: int, *, screen: int = SCREEN, a_row: int = 1) -> int:
    """How many rows of so many lines fit on a screen with the lines around them."""
    return (screen - around) // a_row


def fold(items: Sequence[T], most: float, more: str = "and {} more") -> tuple[Sequence[T], list[Text]]:
    """The items that fit, and a line that counts the others: the one rule by which screens fold."""
    if len(items) <= most:
        return items, []
    return items[: int(most)], [Text(more.format(len(items) - int(most)), style="dim")]


def some(names: Sequence[str], most: float, more: str = "more") -> str:
    """Names in a line; of more than ``most`` the first, and how many more there are."""
    left = len(names) - most
    return ", ".join(names if left <= 0 else names[: int(most)]) + (f" and {left} {more}" if left > 0 else "")


def lines_of(*lines: Text | str) -> Text:
    """A cell of several lines."""
    return Text("\n").join([line if isinstance(line, Text) else Text(line) for line in lines])


class Lines(Table):
    """A table of which each row is one line wherever the width is free, as in a pipe."""


def new_row(table: Table, *cells: Text | str) -> None:
    """Add a row; strings are text, not markup."""
    table.add_row(*(whole(cell) for cell in cells))


def whole(cell: Text | str) -> Text:
    """A cell that is never cut: where a column is too narrow even for an id or a number, it goes on in the next line.

    A column that does not wrap keeps its width as long as others can give way; what its cells do then is their own.
    """
    text = Text(cell) if isinstance(cell, str) else cell
    kept = _Whole(text.plain, text.style, justify=text.justify, spans=list(text.spans), overflow="fold")
    kept.no_wrap = False
    return kept


class _Whole(Text):
    """Text whose names go on in the next line behind one of their dots, where a column is too narrow for them."""

    def wrap(self, console: Console, width: int, *args: Any, **kwargs: Any) -> Wrapped:
        """Split into lines of so many columns."""
        places = [place for found in re.finditer(r"\S+", self.plain) for place in _joints(found, width)]
        split = Text("\n").join(self.divide(places)) if places else self
        return Text.wrap(split, console, width, *args, **kwargs)


def _joints(word: re.Match[str], width: int) -> Iterator[int]:
    """Where a word that is wider than a column is split: behind the last joint that fits, or where the column ends."""
    start, end = word.span()
    while end - start > width > 0:
        joint = max((word.string.rfind(each, start, start + width) for each in "._:/-"), default=-1)
        start = joint + 1 if joint > start else start + width
        yield start


def told(reason: Reason) -> Text:
    """A reason, its code first."""
    return Text.assemble((str(reason.code), "yellow"), ": ", reason.message)


PLATFORMS = {
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "hpu": "Gaudi",
    "xpu": "Intel GPUs",
    "mps": "Apple GPUs",
    "cpu": "CPUs",
}
"""What people call them."""


def counted(what: str, hardware: Counter[str], *, hint: bool = True) -> Text:
    """One line for all that is made for other hardware."""
    each = ", ".join(f"{count} for {name}" for name, count in hardware.most_common())
    return Text(f"{what}: {each}{'; --all lists them' if hint else ''}", style="dim")


def hardware(platforms: Iterable[str]) -> str:
    """What something is made for, in words."""
    return " and ".join(PLATFORMS.get(name, name) for name in platforms)


def not_measured(skipped: Mapping[str, str], needs_bytes: Mapping[str, int], *, everything: bool) -> Iterator[Text]:
    """Say which calls were not measured and why.

    ``skipped`` has the reasons by call, ``needs_bytes`` what those of them need that memory does not hold; these are
    summed up as their number and the largest, unless ``everything`` is set.
    """
    large = [name for name in skipped if name in needs_bytes]
    in_one = len(large) > 1 and not everything
    for name, why in skipped.items():
        if not (in_one and name in needs_bytes):
            yield Text(f"not measured: {name}: {why}", style="yellow")
    if in_one:
        largest = max(large, key=lambda name: needs_bytes[name])
        text = f"{len(large)} calls were not measured for want of memory, the largest {largest}: {skipped[largest]}"
        yield Text(f"{text}; --all lists them", style="yellow")
