"""The commands: answers for people and for programs, exit codes, and errors that say what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextvars import Context
from pathlib import Path

import pytest
import torch
import typer.main

import layerzero as lz
import vocabularies
from command_lines import FA3, GQA, answer, run
from drawing import at_once
from layerzero import cli
from layerzero.cli.app import main
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import Ledger
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.store import StoreLedger
from tools import pages_descriptors
from tools.pages_usage import EXAMPLE, walk

pytestmark = pytest.mark.usefixtures("_static_order")


COMMANDS = dict(walk(typer.main.get_command(main), "layerzero"))


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
    (tmp_path / "my_kernels.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", list(sys.path))
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
    sys.modules.pop("my_kernels", None)
    found = path == "layerzero doctor" and "--strict" in line and lz.doctor().issues
    found = found or ("tokenizer_id" in line and ": wrong: " in result.output)  # of libraries that read it otherwise
    assert result.exit_code == (1 if found else 0), result.output


def measured_elsewhere(folder, monkeypatch):
    """Files of times as the examples name them."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(folder / "other"))
    lz.configure()
    ENGINE.ledger = StoreLedger(Ledger())
    facts = lz.facts("rms_norm", torch.randn(4, 64), torch.randn(64))
    ENGINE.ledger.record_time(REGISTRY.kernel("torch.rms_norm"), facts, Measurement(10.0, 11.0, 0.1, 20))
    assert run("perfdb export times.jsonl").exit_code == 0
    assert run("perfdb export all.jsonl --builds").exit_code == 0


def test_options_are_not_named_by_their_metavar():
    """Typer 0.27 takes a metavar that is the parameter's name in capitals for the option's name, as ``--DEVICE``."""
    option = re.compile(r"(\w+): Annotated\[(?:(?!Annotated\[).)*?option\(\s*\"(\w+)\",(?![^)]*\"--)", re.DOTALL)
    files = Path(cli.__file__).parent.glob("*.py")
    found = [pair for file in files for pair in option.findall(file.read_text(encoding="utf-8"))]
    assert found
    assert [name for name, metavar in found if name.upper() == metavar] == []


def test_help_without_arguments_and_the_version():
    assert "Commands:" in run("").output
    assert run("--version").output == f"layerzero {lz.__version__}\n"


def test_help_loads_no_library_and_no_engine():
    script = """
import sys
from layerzero import cli
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
    "explain layer_norm --shape 0x0": "--param: wanted normalized_shape=VALUE with --shape, got none",
    "explain rms_norm --shape 99999999999999999999x64": "--shape: wanted sizes whose product is below 2**60, got '9999",
    "explain rms_norm --shape 1152921504606846976x1": "--shape: wanted sizes whose product is below 2**60, got '11529",
    "explain rms_norm --shape 0x9999999999999999999": "--shape: wanted sizes whose product is below 2**60, got '0x99",
    "explain rms_norm --shape 4x8 --param weight=2x1152921504606846975": "--param weight: wanted sizes whose",
    "explain mlp --shape 1099511627776x4": "--shape: wanted sizes that tensors may have, got '1099511627776x4': ",
    "tune rms_norm --shapes 4x1152921504606846976": "--shapes: wanted sizes whose product is below 2**60, got '4x11",
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
    "explain rms_norm --shape 4x8 --layout BSHD": "--layout: rms_norm has no argument 'layout'; it has input, weight",
    "kernels rms_nrm": "unknown operation 'rms_nrm'; did you mean 'rms_norm'?",
    "fuzz --calls 1 --kernel torhc": "--kernel: wanted a library or kernel, got 'torhc', which names none here",
    f"plan show {'a' * 300}": ": wanted a plan, got a name that names none: File name too long",
    "config check nowhere.yaml": "nowhere.yaml: wanted a file of settings, got nothing",
    "descriptor check nowhere.json": "nowhere.json: wanted a capability descriptor, got nothing",
    "plan show nowhere.json": "nowhere.json: wanted a plan, got nothing",
    "plan diff nowhere.json other.json": "nowhere.json: wanted a plan, got nothing",
    "doctor --confirm --module nobody_has_it": "--module nobody_has_it: wanted a module that imports",
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


@pytest.mark.skipif(torch.cuda.device_count() > 77, reason="a device has this number")
@pytest.mark.parametrize("line", [
    "fuzz --calls 1 --device cuda:77", "fuzz --calls 1 --device nope", "conformance --kernel torch.gelu --device nope",
    "conformance --kernel torch.gelu --device meta", "tune rms_norm --shapes 4x4 --device meta",
    "vet rms_norm --shapes 4x4 --device xpu:77", "tune rms_norm --shapes 4x4 --device cuda:77",
    "bench rms_norm --shapes 4x4 --device cuda:77",
    "perfdb prune --older-than 99999999999",
])  # fmt: skip
def test_what_no_machine_has_is_a_usage_error(line):
    result = run(line)
    assert result.exit_code == 2, result.exception
    assert "Invalid value for '--" in result.stderr
    assert "H100" not in result.stderr, "no command here takes a device that need not be here"


@pytest.mark.parametrize("error", [KeyError("head_dim"), ValueError("x"), RuntimeError("a bug in a library")])
def test_bugs_keep_their_traceback(error, monkeypatch):
    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr("layerzero.cli.question.explain", broken)
    assert run("explain rms_norm --shape 4x8").exception is error
