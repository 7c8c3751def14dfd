"""A plain table for commands that show measurements."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.containers import Lines as Wrapped
from rich.table import Table
from rich.text import Text


class Lines(Table):
    """A table of which each row is one line wherever the width is free, as in a pipe."""


def new_table(*headers: str, right: Collection[str] = ()) -> Table:
    """A table; ids stay whole, prose wraps, numbers stand to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", expand=False)
    for header in headers:
        number = header in right
        table.add_column(
            whole(header), no_wrap=number or header == "kernel", justify="right" if number else "left", overflow="fold"
        )
    return table


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
