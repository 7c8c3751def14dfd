"""A plain table for commands that show measurements."""

from __future__ import annotations

from collections.abc import Collection

from rich import box
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
    text.no_wrap, text.overflow = False, "fold"
    return text
