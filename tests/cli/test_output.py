"""What every command shares: tables that lose nothing in a pipe."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections import Counter

import pytest
from rich.console import Console
from rich.text import Text

from command_lines import run
from layerzero.cli import output
from layerzero.cli.app import main
from layerzero.cli.output import live
from layerzero.cli.tables import Lines, new_row, table_of
from layerzero.engine.config import CONFIGURATION

KERNEL = "a_library.with_a_kernel.whose_name_takes_sixty_columns_of_a_hundred"
NUMBERS = ("123456.7", "123456.7", "41.9 %", "6.8e-05", "419 %")
HEADERS = ("median us", "p95 us", "noise", "error", "of ceiling")


def shown(width, *, terminal=False):
    table = table_of("", "kernel", *HEADERS, "why", right=HEADERS)
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
    table = table_of("kernel", "why")
    new_row(table, "torch.rms_norm", "a text that is longer than what is left of a hundred columns, " * 2)
    console = output.stdout_console(file := io.StringIO())
    output._print_whole(console, table)
    assert max(map(len, file.getvalue().splitlines())) <= output.WIDTH


def test_a_terminal_keeps_its_width():
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown(60, terminal=True)).splitlines()
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_folds_what_it_has_no_room_for_and_cuts_nothing(width):
    """Ids, numbers, long words of prose and headers: each column holds all of its letters, one below the other."""
    ids = ("vllm.cpu.split_qkv_norm_rope_append", "kv.split_qkv_norm_rope_append.paged and 3 more", "123456789.12")
    table = table_of("kernel", "kernel of a library", "time")
    for _ in range(3):
        new_row(table, *ids)
    for column in table.columns:
        column.no_wrap = True
    file = io.StringIO()
    file.isatty = lambda: True
    console = output.stdout_console(file)
    console.width = width
    output._print_whole(console, table)
    text = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    wanted = "".join(["kernel", "kernel of a library", "time", *3 * ids]).replace(" ", "")
    assert Counter(each for each in text if not each.isspace() and each != "─") == Counter(wanted)


def test_a_row_of_lines_is_one_line_in_a_pipe_whatever_its_length():
    table = table_of("kernel", "work", "time", "from", kind=Lines)
    new_row(table, KERNEL, "a text that is longer than what is left of a hundred columns " * 2, "1.0 us", "here")
    file = io.StringIO()
    output._print_whole(output.stdout_console(file), table)
    assert len([line for line in file.getvalue().splitlines() if line.strip()]) == 3


def test_a_narrow_bar_cuts_the_call_and_not_the_counts():
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, force_interactive=True)
    with live(quiet=False, console=console) as told:
        told.at("attention.standard.decode 2x1x2x7 2x2x2x7 2x2x1x1 float32 …" * 2, 12, 66, 11.0)
    shown = re.split(r"[\r\n]", re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", file.getvalue()))
    line = next(each for each in reversed(shown) if "12/66" in each)
    assert "11 s left" in line
    assert re.search(r"\d:\d\d:\d\d", line)
    assert len(line) <= 80


def test_a_closed_stdout_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        main(["config", "keys"])
    sys.stdout.close()
    assert ended.value.code == 0


def test_a_letter_that_the_terminal_cannot_show_ends_no_command(monkeypatch):
    program = output.Program()
    program.command("say")(lambda: output.Answer(None, lambda: [Text("and so on\u2026")]))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(SystemExit) as ended:
        program([])
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"and so on\\u2026\n"
    assert ended.value.code == 0


def test_what_is_endless_is_text_in_json(monkeypatch):
    def refused(word):
        raise ValueError(f"wanted JSON, got {word}")

    monkeypatch.setenv("LAYERZERO_MAX_ERROR", "inf")
    CONFIGURATION.reset()
    found = json.loads(run("config show --json").stdout, parse_constant=refused)
    assert found["max_error"] == {"value": "Infinity", "origin": "environment"}


@pytest.mark.parametrize("line", ["config keys --json", "operations"])
def test_a_full_disk_is_said_without_a_traceback(line, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output, "_print", full)
    result = run(line)
    assert result.exit_code == 1
    assert result.stderr == "error: stdout: wanted a place to write to, got: No space left on device\n"
