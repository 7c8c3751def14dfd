"""On a terminal that a long answer would scroll off, it is folded; nothing of a name is torn, and nothing is silent."""

from __future__ import annotations

import io
import os
import re
import shlex

import pytest
import torch
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli import bench_tables, demo, demo_screen, explain_screen, output
from layerzero.cli.app import main
from layerzero.cli.tables import SMALL, fitting, fold, folded, new_row, some, table_of
from layerzero.core.evidence import Measurement
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import archive
from layerzero.tuning.storage.store import StoreLedger


def terminal(width=80, height=24):
    file = io.StringIO()
    file.isatty = lambda: True
    console = output.stdout_console(file)
    console.size = (width, height)
    return console


def printed(parts, **size):
    console = terminal(**size)
    for part in parts:
        output._print_whole(console, part)
    return re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())


@pytest.mark.parametrize("device", ["cpu", "H100", "H200"])
def test_an_explanation_fits_on_a_small_screen(device):
    query, key = torch.empty(1, 1, 32, 128, device="meta"), torch.empty(1, 2048, 8, 128, device="meta")
    report = lz.explain("attention", query, key, key, layout="BSHD", device=device)
    text = printed(explain_screen.on_a_small_screen(report))
    assert len(text.splitlines()) < 24
    assert f"> {report.kernel_id}" in " ".join(text.split())
    assert "why: " in text
    assert "--all lists each with its reasons" in text
    refused = sum(not each.legal and not each.kernel.asked_for for each in report.candidates)
    named = sum(each.kernel.id in " ".join(text.split()) for each in report.candidates if not each.legal)
    more = [int(each) for each in re.findall(r"and (\d+) more", " ".join(text.split()))]
    line = " ".join(text.split()).partition("not for this device: ")[2].partition(";")[0]
    assert named + sum(more) + sum(int(each) for each in re.findall(r"(\d+) for", line)) >= refused


def test_without_a_legal_kernel_the_reasons_and_the_next_step_remain():
    lz.lock("rms_norm", "zentorch.rms_norm")
    report = lz.explain("rms_norm", torch.randn(4, 64).double(), torch.ones(64).double())
    text = printed(explain_screen.on_a_small_screen(report))
    assert "no legal kernel" in text
    assert "next step: remove the lock" in " ".join(text.split())


def record(rows, kernel, median):
    facts = lz.facts("rms_norm", torch.randn(rows, 64), torch.randn(64))
    ENGINE.ledger.record_time(REGISTRY.kernel(kernel), facts, Measurement(median, median, 0.01, 20))


def test_many_times_are_a_line_for_each_operation(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    from layerzero import _assembly

    ENGINE.ledger = _assembly.ledger()
    assert isinstance(ENGINE.ledger, StoreLedger)
    for rows in range(2, 20):
        record(rows, "torch.rms_norm", 10.0)
    record(2, "zentorch.rms_norm", 5.0)
    found = list(archive.rows(ENGINE.ledger.times.database))
    (line,) = [
        each for each in printed(bench_tables.on_a_small_screen(found, [True] * 19)).splitlines() if "norm.rms" in each
    ]
    assert line.split()[:3] == ["norm.rms", "18", "19"]
    assert "torch.rms_norm 17" in line
    assert "none that counts here" in printed(bench_tables.on_a_small_screen(found, [False] * 19), width=100)
    result = CliRunner().invoke(main, shlex.split("perfdb show"), env={"COLUMNS": "100"})
    assert "hidden 64 rows 19" in result.stdout, "a pipe has all of it"


@pytest.mark.parametrize(("height", "word"), [(24, "whole"), (4, "folded")])
def test_what_does_not_fit_is_folded_on_a_terminal_alone(monkeypatch, height, word):
    answer = output.Answer({}, lambda: ["whole"] * 6, folded=lambda: ["folded"])
    console = terminal(height=height)
    assert output._fits(console, list(answer.show())) == (word == "whole")


def test_every_table_folds_by_one_rule():
    """The rows that fit beside what stands around them, and a line that counts the others."""
    assert fitting(10) == fitting(10, a_row=2) * 2 + 1 == fitting(10, screen=SMALL) + 21
    rows = [(str(number), "x") for number in range(5)]
    text = printed(folded(table_of("kernel", "why"), rows, 3, "and {} with lower scores"))
    assert [line.split()[0] for line in text.splitlines() if line.split()[1:] == ["x"]] == ["0", "1", "2"]
    assert text.splitlines()[-1] == "and 2 with lower scores"
    assert "and" not in printed(folded(table_of("kernel", "why"), rows, 5))
    assert list(folded(table_of("kernel"), [], 3)) == [], "no table without a row"
    shown, more = fold("abcd", 2)
    assert (list(shown), [each.plain for each in more]) == (["a", "b"], ["and 2 more"])
    assert (some(["a", "b", "c"], 2), some(["a"], 2), some([], 2)) == ("a, b and 1 more", "a", "")


def test_names_go_on_behind_a_joint_and_no_word_is_torn_that_fits():
    table = table_of("call", "fastest", "chosen now", "before")
    name = "attention.cascade.decode.paged small float32"
    new_row(table, name, "torch.paged_gather 21435.8 us (2.24x)", "torch.paged_gather", "torch.cascade_sdpa")
    text = printed([table])
    pieces = {word for line in text.splitlines() for word in line.split()}
    assert {"attention.cascade.", "decode.paged", "torch.paged_", "gather", "torch.cascade_", "sdpa"} <= pieces
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_factor_of_the_demo_is_noise_where_the_turns_do_not_agree():
    assert demo.spread([0.8, 1.45, 1.6, 1.3, 1.5]) == (0.8, 1.6)
    turns = [1.2 + 0.01 * turn for turn in range(20)]
    least, most = demo.spread([0.5, *turns[1:-1], 3.0])
    assert 1.2 < least < 1.3 < most < 1.4, "a disturbed turn or two decide nothing"
    assert demo.spread([1.3]) == (1.3, 1.3)


@pytest.mark.parametrize(("load", "said"), [(0.5, ""), (4.0, "load 4.0 of 2 cores")])
def test_the_demo_says_that_others_need_the_cores(load, said, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    found = demo.busy()
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 40)])
def test_the_demo_fits_on_a_screen_and_cuts_nothing_that_it_measured(width, height):
    names = ("stock", "attention alone", "lz.optimize")
    ratios = {"times_as_fast": 1.0, "times_as_fast_from": 0.97, "times_as_fast_to": 1.04, "is_noise": True}
    ways = {name: {"ms": 100.0 + place, "error": 1e-2, **ratios} for place, name in enumerate(names)}
    ways["lz.optimize"] |= {"times_as_fast": 1.31, "times_as_fast_from": 1.25, "is_noise": False}
    changed = [{"module": "Linear", "by": "lz.linear", "kernels": "zentorch.linear_packed", "count": 31}] * 4
    row = {
        "what": "decoder, 8 layers of 1024: one word after it",
        "dtype": "bfloat16",
        "runs": 4,
        "ways": ways,
        "changed": changed,
        "left": {"x": 3},
        "bytes": {"weights": 1e8, "packed": 2e7},
        "same_words": dict.fromkeys(names, False),
    }
    why = {"call": "norm.rms", "kernel": "torch.rms_norm", "legal": ["a"], "refused": {"for other devices": 17}}
    about = {"device": "AMD EPYC", "threads": 2, "gpu": False, "torch": "2.13.0", "seconds": 71.0}
    about["busy"] = "load 4.0 of 2 cores"
    console = terminal(width=width, height=height)
    demo_screen.show(console, {"results": [row] * 4, "why": [why] * 2, **about})
    lines = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue()).splitlines()
    assert len(lines) <= height - (height == 24)
    assert sum(line.endswith("other words") for line in lines) == 8
    assert "2 threads, busy: load 4.0 of 2 cores, torch 2.13.0" in lines[0]
    assert (
        sum(" noise (0.97-1.04 x)" in line for line in lines)
        == sum(" 1.31 x (1.25-1.04)" in line for line in lines)
        == 4
    )
    assert any("248 modules, checked one by one, 6 left" in line for line in lines) == (height == 24)
