"""The measured times on the command line: shown, passed on, taken over strictly, forgotten, checked."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import sys
from pathlib import Path

import pytest
import torch

import layerzero as lz
from command_lines import answer, run
from layerzero.core.evidence import Measurement, Provenance
from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage import records
from layerzero.tuning.storage.store import StoreLedger


def another_machine(monkeypatch, folder):
    """From here on, files lie in another cache folder and no ledger is open."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(folder))
    lz.configure()
    from layerzero import _assembly

    ENGINE.ledger = _assembly.ledger()


def record(kernel_id, rows, median=10.0, **more):
    facts = lz.facts("rms_norm", torch.randn(rows, 64), torch.randn(64))
    ENGINE.ledger.record_time(REGISTRY.kernel(kernel_id), facts, Measurement(median, median, 0.01, 20, **more))


def evidence(rows):
    """What was measured or imported; this machine may be one that times ship for."""
    facts = lz.facts("rms_norm", torch.randn(rows, 64), torch.randn(64))
    found = ENGINE.ledger.evidence(REGISTRY.candidates("norm.rms"), facts)
    return {name: each for name, each in found.items() if each.provenance is not Provenance.PRIOR}


@pytest.fixture(autouse=True)
def measured(monkeypatch, tmp_path):
    another_machine(monkeypatch, tmp_path / "first")
    record("torch.rms_norm", 4, condition="temperature=warm")
    record("torch.rms_norm", 8, 20.0)
    record("inductor.rms_norm", 8, 15.0)
    assert isinstance(ENGINE.ledger, StoreLedger)


def test_times_are_shown():
    result = run("perfdb show")
    assert result.exit_code == 0
    assert "perfdb.sqlite: 3 times" in result.stdout
    assert "hidden 64 rows 8" in result.stdout
    assert "does not count here" not in result.stdout
    assert "tune, 20 samples, temperature=warm" in run("perfdb show --all").stdout
    data = answer('perfdb show --kernel "torch.*" --limit 1')
    assert data["rows"] == 2
    assert data["times"][0]["median_us"] == 20.0, "the latest"
    assert data["times"][0]["here"]
    assert answer("perfdb show --operation rms_norm")["rows"] == answer("perfdb show --operation norm.rms")["rows"] == 3
    for none in ("attention", '"attention.*"', '"optimize.*"', "optimize.weights.int8"):
        assert answer(f"perfdb show --operation {none}", code=1)["rows"] == 0


def test_a_time_is_a_line():
    facts = lz.facts("attention", *[torch.randn(1, 128, 8, 64)] * 3, layout="BSHD")
    measured = Measurement(1234.5, 1300.0, 0.01, 20, condition="temperature=warm", device_us=1200.0, host_us=900.0)
    ENGINE.ledger.record_time(REGISTRY.kernel("reference.attention.standard.prefill"), facts, measured)
    lines = [line for line in run("perfdb show").stdout.splitlines() if line.strip()]
    assert len(lines) == 3 + 4, "the file, a header and its rule, then the times"
    assert "seq_k 128 seq_q 128   1234.5 us, device 1200.0 us, host 900.0   20" in lines[3]


def test_times_of_another_version_are_told_apart(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    from layerzero.tuning.storage import environment

    environment._surroundings.cache_clear()
    try:
        assert "does not count here" in run("perfdb show").stdout
        assert answer("perfdb show --here")["rows"] == 0
        assert answer("perfdb prune --stale --dry-run")["rows"] == 3
    finally:
        environment._surroundings.cache_clear()


def test_exported_times_are_imported_elsewhere_and_say_where_from(monkeypatch, tmp_path):
    file = tmp_path / "times.jsonl"
    assert answer(f"perfdb export {file}")["rows"] == 3
    another_machine(monkeypatch, tmp_path / "second")
    assert answer(f"perfdb import {file} --dry-run") | {"file": ""} == {
        "file": "",
        "valid": True,
        "problems": [],
        "rows": 3,
        "here": 3,
        "taken": False,
        "findings": 0,
        "findings_left": {},
        "builds": 0,
        "builds_left": {},
    }
    assert evidence(8) == {}
    assert run(f"perfdb import {file}").exit_code == 0
    found = evidence(8)
    assert {name: each.time_us for name, each in found.items()} == {"torch.rms_norm": 20.0, "inductor.rms_norm": 15.0}
    assert {each.provenance for each in found.values()} == {Provenance.IMPORTED}
    assert all(0.85 < each.confidence <= 0.9 for each in found.values())
    run(f"perfdb import {file}")
    shown = answer("perfdb show")
    assert shown["rows"] == 3, "again is the same"
    assert all(each["source"].startswith("times.jsonl sha256:") for each in shown["times"])
    record("torch.rms_norm", 8, 99.0)
    assert evidence(8)["torch.rms_norm"].provenance is Provenance.MEASURED
    assert answer("perfdb prune --imported")["rows"] == 3
    assert answer("perfdb show")["rows"] == 1

    again = tmp_path / "again.jsonl"
    another_machine(monkeypatch, tmp_path / "third")
    run(f"perfdb import {file}")
    run(f"perfdb export {again}")
    another_machine(monkeypatch, tmp_path / "fourth")
    run(f"perfdb import {again}")
    source = answer("perfdb show")["times"][0]["source"]
    assert source.startswith("again.jsonl sha256:")
    assert " < times.jsonl sha256:" in source


def test_device_and_host_are_shown_and_passed_on(monkeypatch, tmp_path):
    record("torch.rms_norm", 16, 30.0, device_us=21.0, host_us=29.0)
    record("torch.rms_norm", 32, 50.0, device_us=50.0)
    shown = run("perfdb show").stdout
    assert "device 21.0 us, host 29.0" in shown
    assert "device 50.0 us" in shown
    assert "device 50.0 us, host" not in shown
    file = tmp_path / "times.jsonl"
    run(f"perfdb export {file}")
    another_machine(monkeypatch, tmp_path / "second")
    assert run(f"perfdb import {file}").exit_code == 0
    parts = {(each["device_us"], each["host_us"]) for each in answer("perfdb show")["times"]}
    assert parts == {(None, None), (21.0, 29.0), (50.0, None)}
    assert run("perfdb check").exit_code == 0


def changed(**values):
    return lambda row: row | values


SPOILT = {
    "not json": (lambda row: "{", "truncated"),
    "a field too many": (changed(extra=1), "unknown field `extra`"),
    "a field missing": (lambda row: {k: v for k, v in row.items() if k != "noise"}, "missing required field `noise`"),
    "a wrong type": (changed(samples="20"), "Expected `int`, got `str`"),
    "no time": (changed(median_us=0.0), "median_us: wanted a finite number"),
    "no device time": (changed(device_us=0.0), "device_us: wanted a finite number"),
    "a host time below zero": (changed(host_us=-1.0), "host_us: wanted a finite number"),
    "no samples": (changed(samples=0), "samples: wanted a finite number"),
    "negative": (changed(variance_us2=-1.0), "variance_us2: wanted a finite number"),
    "another device": (lambda row: row | {"facts": row["facts"] | {"device_name": "x"}}, "device_name: wanted one"),
    "no dtype": (lambda row: row | {"facts": row["facts"] | {"dtype": "float17"}}, "dtype: wanted one"),
    "to come": (changed(written_at="2999-01-01T00:00:00Z"), "written_at: wanted a date"),
    "no date": (changed(written_at="yesterday"), "yesterday"),
    "control characters": (changed(kernel="torch\x1b[31m"), "wanted a kernel and printable text"),
    "endless": (changed(condition="x" * 600), "wanted a kernel and printable text"),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_strangers_file_is_taken_whole_or_not_at_all(monkeypatch, tmp_path, spoil):
    file = tmp_path / "times.jsonl"
    run(f"perfdb export {file}")
    header, first, second, *others = file.read_text().splitlines()  # findings of kernels that ran before come last
    change, message = SPOILT[spoil]
    bad = change(json.loads(second))
    file.write_text("\n".join([header, first, bad if isinstance(bad, str) else json.dumps(bad), *others]) + "\n")
    another_machine(monkeypatch, tmp_path / "second")
    result = run(f"perfdb import {file}")
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{file}: line 3: ")
    assert message in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert answer("perfdb show")["rows"] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: wanted the header"),
        ("{}\n", "missing required field `format`"),
        (
            '{"format":4,"kind":"layerzero times","written_at":"","rows":0}\n',
            "got format 4 of 'layerzero times'; `layerzero perfdb export`",
        ),
        ('{"format":5,"kind":"layerzero times","written_at":"","rows":7}\n', "wanted 7 rows after it, got 0"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, content, message):
    file = tmp_path / "times.jsonl"
    file.write_text(content)
    result = run(f"perfdb import {file}")
    assert result.exit_code == 1
    assert message in result.stdout


def test_a_database_of_ones_own_is_merged_and_the_later_time_stays(monkeypatch, tmp_path):
    another_machine(monkeypatch, tmp_path / "second")
    record("torch.rms_norm", 8, 77.0)
    record("torch.rms_norm", 9, 5.0)
    assert answer(f"perfdb merge {tmp_path / 'first' / 'perfdb.sqlite'}")["rows"] == 3
    assert evidence(8)["torch.rms_norm"].time_us == 77.0
    assert evidence(8)["inductor.rms_norm"].provenance is Provenance.MEASURED
    assert answer("perfdb show")["rows"] == 4


def test_what_is_no_database_is_not_merged(tmp_path):
    for name, content in (("text.sqlite", b"text " * 1000), ("empty.sqlite", b"")):
        file = tmp_path / name
        file.write_bytes(content)
        result = run(f"perfdb merge {file}")
        assert result.exit_code == 2
        assert f"error: {file}: wanted a sound database of times" in result.stderr
        assert file.read_bytes() == content
    assert "got nothing" in run("perfdb merge nowhere.sqlite").stderr


def test_times_are_forgotten_by_what_the_options_say():
    result = run("perfdb prune")
    assert result.exit_code == 2
    assert "wanted an option that says which times to forget" in result.stderr
    assert answer('perfdb prune --kernel "inductor.*" --dry-run')["rows"] == 1
    assert answer("perfdb prune --older-than 1")["rows"] == 0
    assert answer("perfdb show")["rows"] == 3
    assert answer('perfdb prune --kernel "inductor.*"')["rows"] == 1
    assert set(evidence(8)) == {"torch.rms_norm"}
    assert answer("perfdb prune --older-than 0")["rows"] == 2
    assert evidence(8) == {}


def test_times_of_kernels_that_only_a_program_registers_are_not_stale(monkeypatch, tmp_path):
    source = """
import layerzero as lz

@lz.register_kernel("norm.rms", "mine.own", supported_dtypes=["float32"])
def own(input, weight, *, eps=1e-6):
    return input
"""
    (tmp_path / "own_kernels.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("own_kernels")
    record("mine.own", 4)
    REGISTRY.unregister_kernel("mine.own")
    monkeypatch.delitem(sys.modules, "own_kernels")
    shown = run("perfdb prune --stale --dry-run")
    assert "0 times would be forgotten" in shown.stdout
    assert "1 times kept of kernels that nothing here registers" in shown.stdout
    assert "mine.own" in shown.stdout
    assert answer("perfdb prune --stale") == {"rows": 0, "forgotten": True, "kept_unknown": 1}
    assert answer("perfdb prune --stale --unknown --dry-run")["rows"] == 1
    assert "wanted --stale with it" in run("perfdb prune --imported --unknown").stderr
    assert "wanted a module that imports" in run("perfdb show --module there_is_none").stderr
    assert answer("perfdb show --here")["rows"] == 3
    assert answer("perfdb show --here --module own_kernels")["rows"] == 4
    assert answer(f"perfdb export {tmp_path / 'times.jsonl'} --here --module own_kernels")["rows"] == 4
    assert answer("perfdb prune --stale --module own_kernels")["kept_unknown"] == 0
    REGISTRY.unregister_kernel("mine.own")
    assert answer("perfdb prune --stale --unknown")["rows"] == 1
    assert answer("perfdb show")["rows"] == 3


def test_a_sound_database_is_fine():
    result = run("perfdb check")
    assert result.exit_code == 0
    assert "perfdb.sqlite: fine, 3 times" in result.stdout


@pytest.mark.parametrize("refused", ["perfdb.sqlite", "first"])
def test_a_database_that_cannot_be_written_is_not_fine(monkeypatch, tmp_path, refused):
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, *asked: Path(path).name != refused and allowed(path, *asked))
    result = run("perfdb check")
    assert result.exit_code == 1
    assert "perfdb.sqlite cannot be written: " in result.stdout
    assert "it may not be written" in result.stdout


def test_a_row_that_is_no_time_is_found(tmp_path):
    with sqlite3.connect(tmp_path / "first" / "perfdb.sqlite") as connection:
        connection.execute("PRAGMA ignore_check_constraints = 1")
        connection.execute("UPDATE times SET median_us = -1 WHERE kernel = 'inductor.rms_norm'")
    connection.close()
    result = run("perfdb check")
    assert result.exit_code == 1
    assert "median_us: wanted a finite number" in result.stdout
    assert "`layerzero perfdb check` tells more" in run("perfdb show").stderr


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
def test_a_folder_that_cannot_be_looked_into_is_told(monkeypatch, tmp_path):
    """As another user's, which root may look into; a name that is too long raises as well, where paths are asked."""
    another_machine(monkeypatch, tmp_path / ("x" * 300))
    assert "cannot be read: its times do not count" in run("perfdb check").stdout
    assert "cannot be read: its times do not count" in run("ready").stdout
    assert run("doctor").exit_code == 0


def test_without_a_file_there_is_nothing_to_show(monkeypatch, tmp_path):
    another_machine(monkeypatch, tmp_path / "second")
    assert answer("perfdb show")["rows"] == 0
    assert "next step: `layerzero tune`" in run("perfdb show").stdout
    assert run("perfdb check").exit_code == 0
    assert not (tmp_path / "second").exists()


def test_a_table_of_priors_is_written(tmp_path):
    file = tmp_path / "table.json"
    assert answer(f"perfdb export {file} --prior")["rows"] == 3
    data = json.loads(file.read_text())
    assert data["kind"] == "layerzero priors"
    assert data["script"] == "layerzero perfdb export --prior"
    assert data["versions"] == {"inductor.rms_norm": str(torch.__version__), "torch.rms_norm": ""}
    result = run(f'perfdb export {file} --prior --kernel "liger.*"')
    assert result.exit_code == 2
    assert "wanted times of one device" in result.stderr


def found_out():
    """A verdict and a workspace of this machine."""
    facts = lz.facts("rms_norm", torch.randn(8, 64), torch.randn(64))
    ENGINE.ledger.record_verdict(REGISTRY.kernel("torch.rms_norm"), facts, Verdict.WRONG, "off by one")
    ENGINE.ledger.record_workspace(REGISTRY.kernel("inductor.rms_norm"), facts, 4096)
    return facts


def test_verdicts_and_workspaces_reach_another_machine_of_the_kind(monkeypatch, tmp_path):
    facts = found_out()
    file = tmp_path / "all.jsonl"
    assert answer(f"perfdb export {file}")["findings"] == 2
    another_machine(monkeypatch, tmp_path / "second")
    kernel, other = REGISTRY.kernel("torch.rms_norm"), REGISTRY.kernel("inductor.rms_norm")
    assert answer(f"perfdb import {file} --dry-run")["findings"] == 2
    assert ENGINE.ledger.verdict(kernel, facts) is None
    assert answer(f"perfdb import {file}")["findings"] == 2
    assert ENGINE.ledger.verdict(kernel, facts) is Verdict.WRONG
    assert ENGINE.ledger.workspace(other, facts).bytes == 4096
    ENGINE.ledger.record_workspace(other, facts, 1)
    assert answer(f"perfdb import {file}")["findings_left"] == {"it was found here already": 2}
    assert ENGINE.ledger.workspace(other, facts).bytes == 1


def test_findings_are_exported_as_the_options_say_and_how_many_are_left_out_is_told(monkeypatch, tmp_path):
    found_out()
    linear = lz.facts("linear", torch.randn(8, 64), torch.randn(32, 64))
    ENGINE.ledger.record_capture(REGISTRY.kernel("torch.linear"), linear, "it waits")
    file = tmp_path / "some.jsonl"

    def exported(options):
        done = answer(f"perfdb export {file} {options}")
        return done["findings"], done["findings_left"]

    assert exported("") == exported("--here") == (3, 0)
    assert exported("--operation norm.*") == exported("--operation rms_norm") == (2, 1)
    assert exported("--operation mlp.linear --kernel torch.*") == (1, 2)
    assert "1 findings left out" in run(f"perfdb export {file} --operation norm.*").output
    monkeypatch.setattr(records, "capability_of", lambda _: "another")
    assert exported("--here") == (0, 3)
    assert exported("") == (3, 0)


def test_what_does_not_fit_is_left_and_the_difference_is_named(monkeypatch, tmp_path):
    found_out()
    file = tmp_path / "all.jsonl"
    run(f"perfdb export {file}")
    another_machine(monkeypatch, tmp_path / "second")
    monkeypatch.setattr(records, "capability_of", lambda _: "another")
    left = answer(f"perfdb import {file}")["findings_left"]
    assert [*left] == [next(iter(left))]
    assert next(iter(left)).startswith("capability: wanted another, got ")
    assert answer(f"perfdb diff {file}")["findings"] == 0


def test_a_finding_that_was_changed_is_refused_with_the_whole_file(monkeypatch, tmp_path):
    found_out()
    file = tmp_path / "all.jsonl"
    run(f"perfdb export {file}")
    another_machine(monkeypatch, tmp_path / "second")
    file.write_text(file.read_text().replace('"wrong"', '"passed"'))
    refused = run(f"perfdb import {file}")
    assert refused.exit_code == 1
    assert "torch.rms_norm: its checksum does not hold" in refused.output
    assert not answer("perfdb show")["rows"]


def test_two_machines_are_compared(monkeypatch, tmp_path):
    file = tmp_path / "all.jsonl"
    run(f"perfdb export {file}")
    another_machine(monkeypatch, tmp_path / "second")
    record("torch.rms_norm", 4, 30.0)
    shown = run(f"perfdb diff {file}")
    assert shown.exit_code == 0
    assert "1 in both, 0 here alone, 2 there alone" in shown.output
    assert "torch.rms_norm norm.rms: 30.0 us here, 10.0 us there" in shown.output
    text = file.read_text()
    file.write_text(text.replace(f'"torch":"{torch.__version__}"', '"torch":"1.0"'))
    shown = run(f"perfdb diff {file}")
    assert shown.exit_code == 1
    assert "3 times: torch: wanted" in shown.output.replace("\n", " ")
