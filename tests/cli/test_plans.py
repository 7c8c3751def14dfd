"""The commands of plans: solve from a model's name, show the table, tell what differs."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main

MODULE = """
import torch

import layerzero as lz


class Norm(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, rows):
        return lz.rms_norm(rows, self.weight)


def build():
    return Norm()


def number():
    return 3


def rows(seq_len=4, batch=1):
    return torch.empty(batch, seq_len, 16, device="meta")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "a_model_of_plans.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("a_model_of_plans", None)


def run(*words):
    return CliRunner().invoke(main, words, prog_name="layerzero")


def solved(out, *words, ends="8,32"):
    model = ("a_model_of_plans:build", "--inputs", "a_model_of_plans:rows")
    return run("solve", *model, "--bucket", f"seq_len={ends}", "--budget-s", "0", "--out", out, *words)


def test_a_plan_is_solved_shown_and_held(folder):
    shown = solved("plan.json")
    assert shown.exit_code == 0, shown.output
    assert "written to plan.json" in shown.output
    table = run("plan", "show", "plan.json")
    assert table.exit_code == 0
    assert table.output.splitlines() == shown.output.splitlines()[:-1]
    assert "seq_len<=32" in table.output
    document = json.loads(run("plan", "show", "plan.json", "--json").output)
    assert document["solved"]["shape_buckets"] == {"seq_len": [8, 32]}
    assert lz.freeze(folder / "plan.json").hash == document["hash"]
    lz.thaw()


def test_inputs_alone_need_no_buckets():
    words = ("a_model_of_plans:build", "--inputs", "a_model_of_plans:rows", "--budget-s", "0", "--out", "plan.json")
    answer = json.loads(run("solve", *words, "--json").output)
    assert answer["solved"]["plans"][0]["sizes"] == {}


def test_what_differs_is_told_with_an_exit_code():
    solved("plan.json")
    solved("again.json")
    solved("other.json", "--strict", ends="8,64")
    same = run("plan", "diff", "plan.json", "again.json")
    assert (same.exit_code, same.output) == (0, "nothing differs\n")
    other = run("plan", "diff", "plan.json", "other.json")
    assert other.exit_code == 1
    assert "plan.fallback: runtime_select -> error" in other.output
    assert "shape_buckets.seq_len: 2 sizes -> 2 sizes" not in other.output
    assert "[8, 32] -> [8, 64]" in other.output
    told = json.loads(run("plan", "diff", "plan.json", "other.json", "--json").output)
    assert told["same"] is False
    assert {"what": "shape_buckets.seq_len", "first": [8, 32], "second": [8, 64]} in told["differences"]


@pytest.mark.parametrize("command", [("plan", "show", "cut.json"), ("plan", "diff", "plan.json", "cut.json")])
def test_a_file_that_is_cut_is_named(command, folder):
    solved("plan.json")
    (folder / "cut.json").write_text((folder / "plan.json").read_text()[:300])
    shown = run(*command)
    assert shown.exit_code == 1
    assert "cut.json: wanted frozen choices as JSON" in shown.output
    missing = run("plan", "show", "none.json")
    assert "none.json: wanted a plan, got nothing" in missing.output


@pytest.mark.parametrize(("words", "problem"), [
    (("a_model_of_plans:build",), "--bucket: wanted at least one"),
    (("a_model_of_plans:build", "--bucket", "seq_len=a"), "wanted AXIS=SIZES, as seq_len=128,512, got 'seq_len=a'"),
    (("a_model_of_plans:build", "--bucket", "seq_len=1", "--bucket", "seq_len=2"), "wanted each axis once"),
    (("a_model_of_plans:build", "--bucket", "seq_len=1"), "--inputs: wanted inputs= for a model without config.vocab"),
    (("a_model_of_plans:build", "--bucket", "rows=1"), "--bucket: wanted batch or seq_len without --inputs, got rows"),
    (("a_model_of_plans:absent", "--bucket", "seq_len=1"), "wanted module:function, got 'a_model_of_plans:absent'"),
    (("no_such_module_at_all:x", "--bucket", "seq_len=1"), "No module named"),
    (("a_model_of_plans:number", "--bucket", "seq_len=1"), "returns a torch.nn.Module, got int"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(words, problem):
    shown = run("solve", *words, "--out", "plan.json")
    assert shown.exit_code == 2, shown.output
    assert problem in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("a_model_of_plans:MODULES", "MODEL: wanted a function that returns a torch.nn.Module, got int"),
        ("./nowhere", "MODEL: wanted module:function or a model that Transformers can load, got './nowhere'"),
    ],
)
def test_a_model_that_is_none_is_named(folder, model, wanted):
    if model.startswith("."):
        pytest.importorskip("transformers")
    (folder / "a_model_of_plans.py").write_text(MODULE + "MODULES = 3\n")
    result = run("solve", model, "--bucket", "seq_len=8", "--out", "plan.json")
    assert result.exit_code == 2
    assert wanted in result.output
