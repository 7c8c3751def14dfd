"""``make torture``: it ends at the first part that found something, and a part that cannot be heard of has failed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "torture"


@pytest.fixture
def torture(monkeypatch):
    spec = importlib.util.spec_from_file_location("torture_main", FOLDER / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "parts", lambda: [("a.fine", None), ("b.bad", None), ("c.never", None)])
    monkeypatch.setattr(sys, "argv", ["torture", "--seconds", "3"])
    return module


def test_it_ends_with_one_at_the_first_thing_found(torture, monkeypatch, capsys):
    found = {
        "a.fine": torture.Counts({"wrong results": 0}, {"calls": 7}),
        "b.bad": torture.Counts({"bans lifted": 1}, {}),
    }
    monkeypatch.setattr(torture, "apart", lambda name, *_: found[name])
    assert torture.main() == 1
    said = capsys.readouterr().out
    assert "ok     a.fine: 7 calls, 0 wrong results" in said
    assert "FAILED b.bad: 1 bans lifted" in said
    assert "c.never" not in said
    assert "--only b.bad --seed 1" in said


@pytest.mark.parametrize(("script", "word"), [
    ("import os; os.abort()", "ended with -6"),
    ("print('half of it')", "ended with 0"),
    ("import time; time.sleep(600)", "stuck processes"),
])  # fmt: skip
def test_a_part_that_says_nothing_has_failed(torture, monkeypatch, tmp_path, script, word):
    (tmp_path / "__main__.py").write_text(script)
    monkeypatch.setattr(torture, "__file__", str(tmp_path / "__main__.py"))
    monkeypatch.setattr(torture, "GRACE_S", 1.0 if "sleep" in script else 200.0)
    wanted = torture.argparse.Namespace(seed=1, times=None)
    assert torture.apart("a.part", 0.0, wanted).zero == {word: 1}


def test_several_processes_share_the_tries_and_their_counts_are_added(torture, tmp_path, capsys):
    script = "import json, sys; n = int(sys.argv[sys.argv.index('--times') + 1])"
    (tmp_path / "__main__.py").write_text(
        script + "; print(json.dumps([{'wrong': 0}, {'calls': n, 's the longest': n}]))"
    )
    torture.__file__ = str(tmp_path / "__main__.py")
    torture.sys.argv[1:] = ["--part", "fuzz", "--count", "10", "--processes", "4"]
    assert torture.main() == 0
    assert "ok     fuzzed.calls: 10 calls, 3 s the longest, 0 wrong" in capsys.readouterr().out


def test_the_first_process_that_found_something_ends_the_others(torture, tmp_path, capsys):
    script = """
import json, sys, time
if json.loads(sys.argv[sys.argv.index("--asked") + 1])["first"]:
    time.sleep(600)
print(json.dumps([{"wrong": 1}, {}]))
"""
    (tmp_path / "__main__.py").write_text(script)
    torture.__file__ = str(tmp_path / "__main__.py")
    torture.sys.argv[1:] = ["--part", "all", "--processes", "3", "--seed", "5"]
    assert torture.main() == 1
    said = capsys.readouterr().out
    assert "FAILED keeping.one_bit: 1 wrong" in said
    assert "again: python benchmarks/torture --part files --seed 5" in said
    assert "killed_writers" not in said


def test_calls_are_those_of_one_run_however_many_processes_share_them(torture):
    shares = torture._numbers.shares(1_000_003, 16)
    assert [first for first, _ in shares[1:]] == [first + count for first, count in shares[:-1]]
    assert sum(count for _, count in shares) == 1_000_003
    assert torture._numbers.counts("files", 100) == [100, 20]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["damage", "forks", "replaced", "fuzzed.calls"])
def test_parts_run(torture, part):
    names = [
        f"{file.stem}.{each}"
        for file in FOLDER.glob("[!_]*.py")
        for each in (part, f"calls_between_{part}")
        if f"def {each}(" in file.read_text(encoding="utf-8")
    ]
    (name,) = names or [part]
    found = torture.apart(name, 5.0, torture.argparse.Namespace(seed=1, times=2))
    assert found.zero
    assert not any(found.zero.values())


@pytest.mark.slow
@pytest.mark.parametrize("part", ["one_bit", "fifty_bits"])
def test_what_is_predicted_from_a_damaged_database_is_what_its_sound_times_give(torture, part):
    """Of fifty bits, file 32 leaves two times of four, from which another time is predicted than from all."""
    found = torture.apart(f"keeping.{part}", 120.0, torture.argparse.Namespace(seed=5, times=40))
    assert found.other["files"] == 40
    assert not any(found.zero.values()), found.zero
