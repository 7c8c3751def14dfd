"""What every command shares: tables that lose nothing in a pipe."""

from __future__ import annotations

import io
import re

import pytest

from layerzero.cli import output
from layerzero.cli.rows import new_row, new_table

KERNEL = "a_library.with_a_kernel.whose_name_takes_sixty_columns_of_a_hundred"
NUMBERS = ("123456.7", "123456.7", "41.9 %", "6.8e-05", "419 %")
HEADERS = ("median us", "p95 us", "noise", "error", "of ceiling")


def shown(width, *, terminal=False):
    table = new_table("", "kernel", *HEADERS, "why", right=HEADERS)
    new_row(table, ">", KERNEL, *NUMBERS, "a text that may be wrapped at any of its spaces")
    file = io.StringIO()
    file.isatty = lambda: terminal
    console = output.stdout_console(file)
    console.width = width
    output._print_whole(console, table)
    assert console.width == width
    return file.getvalue()


@pytest.mark.parametrize("width", [40, output.WIDTH, 200])
def test_no_number_and_no_id_is_cut_in_a_pipe(width):
    lines = shown(width)
    assert all(each in lines for each in (KERNEL, *NUMBERS, *HEADERS))
    assert "…" not in lines
    assert "a text that may be" in lines, "a wrapped text keeps some columns"


def test_a_narrow_table_stays_within_its_columns():
    table = new_table("kernel", "why")
    new_row(table, "torch.rms_norm", "a text that is longer than what is left of a hundred columns, " * 2)
    console = output.stdout_console(file := io.StringIO())
    output._print_whole(console, table)
    assert max(map(len, file.getvalue().splitlines())) <= output.WIDTH


def test_a_terminal_keeps_its_width():
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown(60, terminal=True)).splitlines()
    assert max(map(len, lines)) <= 60
