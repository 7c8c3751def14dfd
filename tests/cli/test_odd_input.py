"""Odd input on the command line: each is answered by what was wanted and got, and nothing of it is dropped."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from command_lines import run
from layerzero.core.evidence import Measurement
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("explain rms_norm --shape 2x2 --set jit=[", "--set jit: wanted a value as a file of settings has it, got '['"),
        ("explain rms_norm --shape 2x2 --dtype ''", "unknown dtype ''"),
        ("tune rms_norm --shapes 2x2 --dtype ''", "unknown dtype ''"),
        ("bench rms_norm --shapes 2x2 --dtype ''", "unknown dtype ''"),
        ("vet rms_norm --dtype ''", "unknown dtype ''"),
        ("vet rms_norm --operation layer_norm", "wanted one OPERATION, got rms_norm and layer_norm"),
        ("tune rms_norm --shapes 2x2 --threads 999999", "--threads"),
        ("formats --rows 99999999999999999999", "--rows"),
        ("explain tokenize --shape 99999x99999 --param tokenizer_id=any", "wanted at most"),
        ("explain tokenize --shape ² --param tokenizer_id=any", "wanted a size, or how many times a size"),
        ('rolling-update a=http://a --no-fallback --update "\'"', 'wanted a command, got "\'": No closing quotation'),
    ],
)
def test_what_means_nothing_is_named(line, said):
    result = run(line)
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit)
    assert said in " ".join(result.stderr.split())


def test_a_module_that_ends_its_process_ends_no_command_in_silence(tmp_path, monkeypatch):
    (tmp_path / "ends_at_once.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run("kernels --module ends_at_once")
    assert result.exit_code == 2
    assert (
        "--module ends_at_once: wanted a module that imports and registers kernels, got SystemExit: 3" in result.stderr
    )


def test_a_header_that_is_no_text_is_a_problem_of_its_line(tmp_path):
    file = tmp_path / "times.jsonl"
    file.write_bytes(b'{"format":5,"kind":"layerzero times","written_at":"\xff","rows":0}\n')
    result = run(f"perfdb import {file}")
    assert result.exit_code == 1
    assert f"{file}: line 1: wanted the header of an exported file" in result.stdout


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """A file of one time and a database of it, of another cache folder."""
    from layerzero import _assembly

    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "first"))
    lz.configure()
    ENGINE.ledger = _assembly.ledger()
    facts = lz.facts("rms_norm", torch.randn(4, 64), torch.randn(64))
    ENGINE.ledger.record_time(REGISTRY.kernel("torch.rms_norm"), facts, Measurement(10.0, 10.0, 0.01, 20))
    assert run(f"perfdb export {tmp_path / 'times.jsonl'}").exit_code == 0
    return {"import": tmp_path / "times.jsonl", "merge": tmp_path / "first" / "perfdb.sqlite"}


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@pytest.mark.parametrize("command", ["import", "merge"])
@pytest.mark.parametrize("kept", ["in memory", "nowhere", "on disk"])
def test_times_that_end_with_the_command_were_not_taken(exported, command, kept, tmp_path):
    file = tmp_path / "no_folder"
    file.write_text("")
    settings = {
        "in memory": {"perfdb.enabled": False},
        "nowhere": {"perfdb.path": str(file / "perfdb.sqlite")},
        "on disk": {"perfdb.path": str(tmp_path / "second.sqlite")},
    }
    lz.configure(**settings[kept])
    result = run(f"perfdb {command} {exported[command]}")
    if kept == "on disk":
        assert (result.exit_code, result.stderr) == (0, "")
        return
    assert result.exit_code == 2, result.output
    assert "wanted a database on disk, got" in result.stderr
    assert result.stdout == ""
