"""A plain table for commands that show measurements."""

from __future__ import annotations

from collections.abc import Collection

from rich import box
from rich.table import Table
from rich.text import Text


def new_table(*headers: str, right: Collection[str] = ()) -> Table:
    """A table; ids stay whole, prose wraps, numbers stand to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", expand=False)
    for header in headers:
        number = header in right
        table.add_column(
            header, no_wrap=number or header == "kernel", justify="right" if number else "left", overflow="fold"
        )
    return table


def new_row(table: Table, *cells: Text | str) -> None:
    """Add a row; strings are text, not markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
