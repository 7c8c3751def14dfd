"""Capability descriptors on the command line: what is declared as JSON, and what is wrong with a file."""

from __future__ import annotations

import json

import pytest

import layerzero as lz
from command_lines import run
from layerzero.engine.registry import REGISTRY
from tools import pages_descriptors


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "torch.json"
    path.write_text(json.dumps(pages_descriptors.example()))
    return path


def test_declarations_as_json():
    one = run("kernels --descriptor --backend zentorch")
    assert one.exit_code == 0
    assert json.loads(one.stdout) == lz.descriptor("zentorch")
    assert json.loads(run("kernels --descriptor --backend zentorch --json").stdout) == lz.descriptor("zentorch")
    every = json.loads(run("kernels --descriptor").stdout)
    assert sorted({each["backend"] for each in every}) == sorted(
        {backend.name for backend in REGISTRY.backends()} - {"reference"}
    )


@pytest.mark.parametrize(("line", "message"), [
    ("kernels --descriptor --backend zen", "no library 'zen' has kernels; did you mean 'zentorch'?"),
    ("kernels rms_norm --descriptor", "--descriptor describes whole libraries: wanted --backend NAME or nothing"),
    ("kernels --backend zen", "--backend: wanted one of aiter, "),
])  # fmt: skip
def test_questions_that_make_no_sense(line, message):
    result = run(line)
    assert result.exit_code == 2
    assert message in result.stderr


def test_kernels_of_one_library():
    found = json.loads(run("kernels rms_norm --backend torch --json").stdout)
    assert [each["id"] for each in found] == ["torch.rms_norm"]
    assert (found[0]["descriptor"], found[0]["batch_invariant"]) == (None, "some calls")


def test_a_right_file(file):
    result = run(f"descriptor check {file}")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{file}: fine; sha256 ")
    data = json.loads(run(f"descriptor check {file} --json").stdout)
    assert data["valid"]
    assert data["kernels"] == ["torch.sdpa.cpu_flash"]
    assert lz.doctor().descriptors == ()  # checking changes nothing


def test_every_problem_of_a_wrong_file(file):
    data = json.loads(file.read_text())
    entry = data["ops"]["attention.standard.prefill"][0]
    del entry["max_seq_len"]
    entry["dtypes"] = ["float17"]
    file.write_text(json.dumps(data))
    result = run(f"descriptor check {file}")
    assert result.exit_code == 1
    first, *rest = result.stdout.splitlines()
    assert first.startswith(f"{file}: torch.sdpa.cpu_flash: dtypes: unknown dtype 'float17'")
    assert rest == [f"{file}: torch.sdpa.cpu_flash: max_seq_len: wanted a number, or null for no bound, got nothing"]
    assert len(json.loads(run(f"descriptor check {file} --json").stdout)["problems"]) == 2


def test_settings_that_name_a_wrong_file_are_wrong(file, tmp_path):
    settings = tmp_path / "layerzero.yaml"
    settings.write_text(f"descriptors: [{file}]\n")
    assert run(f"config check {settings}").exit_code == 0
    file.write_text("{}")
    result = run(f"config check {settings}")
    assert result.exit_code == 1
    assert f"descriptors: {file}: schema_version: wanted '2.0' or '1.0', got nothing" in result.stdout


def test_what_is_loaded_is_shown(file):
    loaded = lz.load_descriptor(file)
    assert loaded.sha256 in run("doctor").stdout.replace("\n", "")
    assert json.loads(run("doctor --json").stdout)["descriptors"] == [loaded.to_dict()]
    assert f"(sha256 {loaded.sha256[:12]})" in run("kernels attention --backend torch").stdout
    (kernel,) = [
        each for each in json.loads(run("kernels attention --json").stdout) if each["id"] == "torch.sdpa.cpu_flash"
    ]
    assert kernel["descriptor"] == {"name": str(file), "sha256": loaded.sha256}
    assert "head_dim <= 32" in kernel["limits"]
    explained = run("explain attention --shape 1x8x4x64 --layout BSHD --device cpu").stdout
    assert "Said by the descriptor" in " ".join(explained.split())  # wrapped anywhere
