"""``fuzz --operation`` and ``bench --param``: runs that are about one operation, or one value of a parameter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from layerzero.cli.app import main
from layerzero.engine.dispatch import ENGINE
from layerzero.testing import fuzz
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger


def layerzero(*words):
    return CliRunner().invoke(main, list(words), prog_name="layerzero")


def test_fuzz_makes_calls_of_one_operation_only():
    result = layerzero("fuzz", "--operation", "norm.rms", "--calls", "12", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["calls"] == 12
    assert all("rms" in name for name in found["kernels"])


def test_a_call_of_a_narrowed_run_is_made_again_and_counts_for_no_call_of_this_machine(tmp_path):
    ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
    source = fuzz._Source(["norm.rms"])
    number = next(iter(source.numbers(5, 1, 3, "cpu")))
    assert fuzz.replay(3, number, operations=["norm.rms"]).ok
    assert ENGINE.ledger.calls() == []  # readiness wanted builds for sizes that were invented
    failure = fuzz.Failure(3, number, "k", "chosen", "wrong", "call", ("norm.rms",))
    assert failure.reproducer.endswith(f"fuzz.replay(3, {number}, operations=['norm.rms']))")
    of_library = fuzz.Failure(3, number, "k", "locked", "wrong", "call", kernels=("liger",))
    assert of_library.reproducer.endswith(f"fuzz.replay(3, {number}, kernels=['liger']))")
    elsewhere = fuzz.Failure(3, 7, "k", "chosen", "wrong", "call", device="cuda")
    assert elsewhere.reproducer.endswith("fuzz.replay(3, 7, device='cuda'))")


@pytest.mark.parametrize(("words", "told"), [
    (("fuzz", "--operation", "rms_nrm"), "unknown operation 'rms_nrm'"),
    (("fuzz", "--module", "no.such.module"), "no.such.module"),
    (("bench", "rms_norm", "--param", "epsilon=1"), "--param: wanted one of eps, got 'epsilon'"),
    (("bench", "rms_norm", "--param", "eps"), "--param: wanted name=value, got 'eps'"),
    (("bench", "rms_norm", "--param", "eps=much"), "--param eps: wanted a number, got 'much'"),
])  # fmt: skip
def test_flags_that_mean_nothing_are_questions_without_sense(words, told):
    result = layerzero(*words)
    assert result.exit_code == 2
    assert told in result.output + result.stderr


@pytest.mark.parametrize("shapes", [("--shapes", "2x64"), ()])
def test_bench_measures_with_the_parameters_that_it_is_given(shapes):
    words = ("bench", "activation.gelu", *shapes, "--param", "approximate=tanh", "--dtype", "float32")
    result = layerzero(*words, "--samples", "3", "--kernel", "torch.*", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["calls"]
    assert found
    assert {each["call"]["approximate"] for each in found} == {"tanh"}


@pytest.mark.parametrize("name", ["nope", "["])
@pytest.mark.parametrize("line", [
    "perfdb show --kernel", "perfdb show --operation", "perfdb export FILE --kernel", "perfdb export FILE --operation",
    "perfdb prune --kernel", "perfdb prune --operation", "kernels", "kernels --backend", "vet rms_norm --backend",
    "vet rms_norm --kernel", "tune rms_norm --without", "bench rms_norm --kernel", "bench rms_norm --without",
    "libraries --torch", "which rms_norm --shape 2x8 --without", "doctor --for", "ready --for",
])  # fmt: skip
def test_a_name_that_names_nothing_is_an_error(line, name, tmp_path):
    file = tmp_path / "times.jsonl"
    result = layerzero(*line.replace("FILE", str(file)).split(), name)
    assert (result.exit_code, type(result.exception), file.exists()) == (2, SystemExit, False), result.output
    assert repr(name) in result.stderr or f"none of {name};" in result.stderr


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that opens and cannot be read")
@pytest.mark.parametrize("line", [
    "perfdb import", "perfdb diff", "perfdb merge", "config check", "descriptor check", "plan show",
    "tune rms_norm --manifest", "bench rms_norm --manifest", "vet --manifest",
    "solve --bucket seq_len=8 --out plan.json",
])  # fmt: skip
@pytest.mark.parametrize("file", ["/proc/self/mem", "/", "/proc/self/exe", "nowhere"])
def test_a_file_that_cannot_be_read_is_an_error(line, file):
    result = layerzero(*line.split(), file)
    assert (result.exit_code, type(result.exception)) in ((1, SystemExit), (2, SystemExit)), result.output
    assert file in result.output
