"""The suite finds every planted mistake and says which; what is right passes; a dead process ends nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main
from layerzero.testing import conformance

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def planted():
    return conformance.run(["planted.*"], modules=["planted"], calls=10, seconds=20, device="cpu")


FINDINGS = [
    ("large", "wrong", "hidden = 2304, float32", "wanted -?[0-9.]+, got 0"),
    ("long", "wrong", "rows = 2051, float32", "elements too far"),
    ("mutates", "wrong", "case batch_decode, float32", "input: wanted it untouched, got other bytes in its memory"),
    ("strides", "wrong", "strided, float32", "strided input and weight: .* got nan"),
    ("strides", "wrong", "padded rows, float32", "padded rows input and weight: .* got nan"),
    ("crashes", "died", "random calls, float32", r"died with SIGSEGV during 'random calls, float32', seed 0, call \d+"),
    ("hangs", "hung", "hidden = 2304, float32", r"no sign of life for 20 s.*rms_norm\(input=float32\(16, 2304\)"),
    ("nan", "wrong", "case batch_decode, float16", "got nan"),
    ("unsteady", "wrong", "same bits, float32", "declared deterministic, but run 2 gave other bits than run 1"),
    ("gradient", "wrong", "gradients, float32", "the gradient of weight: wanted one, got None"),
    ("racy", "wrong", "threads, float32", "with 3 threads at once: rms_norm.*: result 0"),
    ("grows", "wrong", "threads, float32", "with 3 threads at once: rms_norm.*: result 0"),
    ("one_buffer", "wrong", "results of their own, float32", "changed the result of the first"),
    ("prepacked", "wrong", "results of their own, float32", "with other values in the same tensors: result 0"),
    (
        "sized_once",
        "wrong",
        "a class of sizes, float32",
        r"the plan of .* serves .*, too, and there: result 0.*Read in load what the callable depends on",
    ),
    ("forgets", "wrong", "a step that advances, float32", r"after advance\(\): result 0"),
    ("spills", "wrong", "case batch_decode, float32", "residual: wanted what lies around it untouched"),
    ("strided_gradient", "wrong", "gradients of strided, float32", "the gradient of input"),
    ("odd_gradient", "wrong", "gradients of random calls, float32", "the gradient of input"),
    (
        "stale_key",
        "wrong",
        "build key, float32",
        "build_key says that hidden = [0-9]+ is built, but its first call took",
    ),
    ("too_wide", "wrong", "limit head_dim <= 96", "96 is legal by 'head_dim <= 96', but the result is wrong"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "status", "check", "text"), FINDINGS, ids=lambda value: value)
def test_each_mistake_is_found_with_its_own_message(planted, kernel, status, check, text):
    found = {result.check: result for result in planted.kernel(f"planted.{kernel}").problems}
    assert found[check].status == status
    assert re.search(text, found[check].message), found[check].message


THERE = "refused with CONSTRAINT_FAILED; the library there: "
LIMITS = [
    ("too_strict", f"limit hidden <= 64: 64 right; 65 {THERE}65: right: too strict"),
    (
        "needed",
        f"limit hidden % 8 == 0: 8 right; 9 {THERE}9: raises RuntimeError: rows must be a multiple of 8: needed",
    ),
    ("dies_beyond", f"limit hidden <= 4096: 4096 right; 4097 {THERE}dies with SIGSEGV during 'beyond hidden <= 4096'"),
    (
        "sound",
        "limit dtype float64: float64 refused with DTYPE_UNSUPPORTED; the library there: float64: right: too strict",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "line"), LIMITS, ids=[kernel for kernel, _ in LIMITS])
def test_each_limit_says_what_the_library_does_beyond_it(planted, kernel, line):
    report = planted.kernel(f"planted.{kernel}")
    assert any(each.startswith(line) for each in report.limits()), report.limits()
    assert f"  {line}" in str(report)
    assert report.ok, "a limit that is too strict is a note"


@pytest.mark.slow
def test_a_key_that_holds_what_is_compiled_is_right(planted):
    found = {result.check: result for result in planted.kernel("planted.right_key").results}
    assert found["build key, float32"].status == "passed"
    assert planted.kernel("planted.right_key").ok


MODULES = {
    "does_not_exist": (None, "No module named 'does_not_exist'"),
    "raises_at_import": ("1 / 0\n", "ZeroDivisionError: division by zero"),
    "registers_nothing": (
        "import layerzero as lz\n",
        "got one that registers none; register them where it is imported",
    ),
}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_without_kernels_is_an_error_with_a_next_step(tmp_path, monkeypatch, module):
    text, said = MODULES[module]
    if text is not None:
        (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = CliRunner().invoke(main, ["conformance", "--module", module])
    assert answer.exit_code == 2
    assert f"--module {module}: wanted a module that" in answer.stderr
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr


def test_drawn_tables_give_each_sequence_pages_of_its_own():
    from layerzero.testing.sizes import resized

    operation = next(each for each in lz.list_operations() if each.name == "attention.gqa.decode.paged")
    wide = resized(operation, operation.cases[0], {"max_blocks": 2304})
    for case in (wide, resized(operation, operation.cases[0], {"pages": 1}), *operation.cases[:1]):
        made = operation.examples(case, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
        lens, table, size = made["context_lens"], made["block_tables"], case.sizes["page_size"]
        used = [
            page for row, length in zip(table.tolist(), lens.tolist(), strict=True) for page in row[: length // size]
        ]
        assert used
        assert len(set(used)) == len(used) or case.sizes["pages"] < case.sizes["batch"]
    assert int(lens.max()) == 4 * 16
    made = operation.examples(wide, torch.float32, torch.device("cpu"), None)
    assert made["context_lens"].tolist() == [2304 * 16] * wide.sizes["batch"]


@pytest.mark.slow
def test_a_mistake_in_one_dtype_leaves_the_others_right(planted):
    report = planted.kernel("planted.nan")
    assert {result.check.rpartition(", ")[2] for result in report.problems} == {"float16"}


@pytest.mark.slow
def test_after_a_death_and_a_hang_the_other_checks_go_on(planted):
    for kernel in ("crashes", "hangs"):
        report = planted.kernel(f"planted.{kernel}")
        assert len(report.problems) == 1
        assert report.counts["passed"] == planted.kernel("planted.long").counts["passed"] + 1
        assert [each.check for each in report.results][-1].startswith("beyond ")


@pytest.mark.slow
def test_a_kernel_that_always_dies_is_given_up(planted):
    counts = planted.kernel("planted.dead").counts
    assert (counts["died"], counts["passed"], counts["not tried"]) == (3, 1, 1)  # it loads
    assert "not tried: given up after 3 processes that died or hung" in str(planted.kernel("planted.dead"))


@pytest.mark.slow
def test_what_is_right_passes_everything(planted):
    report = planted.kernel("planted.sound")
    assert report.ok
    assert set(report.counts) == {"passed", "refused"}
    refused = {result.check: result.message for result in report.results if result.status == "refused"}
    others = ("float64", "float16", "bfloat16")
    assert set(refused) == {
        "rows = 0, float32",
        *(f"cases, {name}" for name in others),
        *(f"random calls, {name}" for name in others),
    }
    assert "[DTYPE_UNSUPPORTED] dtype must be float32, is float64" in refused["cases, float64"]


@pytest.mark.slow
def test_a_wider_tolerance_counts_and_is_printed_with_its_reason(planted):
    report = planted.kernel("planted.coarse")
    assert report.ok
    assert "  tolerance: float32: rtol 0.01, atol 0.01, because it adds up in bfloat16" in str(report)


@pytest.mark.parametrize("declared", [
    {"tolerance": {"float32": lz.Tolerance(1e-2, 1e-2)}},
    {"tolerance_reason": "because"},
])  # fmt: skip
def test_a_tolerance_and_its_reason_belong_together(declared):
    with pytest.raises(lz.RegistrationError, match="tolerance and tolerance_reason belong together"):
        lz.register_kernel("norm.rms", "user.coarse", **declared)(lambda input, weight, *, eps: input)


@pytest.mark.slow
def test_a_kernel_of_this_process_only_is_checked_in_it_and_the_report_says_so():
    @lz.register_kernel("norm.rms", "user.zero", supported_dtypes=["float32"])
    def zero(input, weight, *, eps):
        return torch.zeros_like(input)

    report = conformance.run(["user.*"], calls=2, device="cpu")
    mine = report.kernel("user.zero")
    assert not report.ok
    assert "registered in this process only" in str(mine)
    assert "too far" in mine.problems[0].message


@pytest.mark.slow
def test_what_is_not_installed_is_refused_with_the_next_step():
    report = conformance.run(["flash_attn.v2"], device="cpu")
    refused = report.kernel("flash_attn.v2").refused
    assert refused.startswith(("[NOT_INSTALLED]", "[PLATFORM_MISMATCH]"))
    assert "pip install flash-attn" in refused or "PLATFORM" in refused
    assert report.ok
    assert not report.passed


def command(line):
    return CliRunner().invoke(main, ["conformance", *line.split()], prog_name="layerzero")


@pytest.mark.slow
def test_the_command_exits_with_1_if_a_kernel_is_wrong(monkeypatch):
    monkeypatch.delitem(sys.modules, "planted", raising=False)  # what an earlier test imported is registered no more
    result = command("--kernel planted.nan --module planted --calls 1 --device cpu --json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert not answer["ok"]
    (kernel,) = answer["kernels"]
    assert kernel["counts"]["wrong"] == sum(each["status"] == "wrong" for each in kernel["results"]) > 0
    assert "planted.nan: norm.rms" in result.stderr


@pytest.mark.slow
def test_the_command_proves_something_or_exits_with_1():
    assert command("--backend torch --kernel *.rms_norm --operation norm.* --calls 1 --device cpu").exit_code == 0
    nothing = command("--kernel flash_attn.v2 --device cpu")
    assert nothing.exit_code == 1
    assert "nothing passed" in nothing.stderr


@pytest.mark.parametrize(("line", "problem"), [
    ("--module a_module_that_nobody_has", "No module named 'a_module_that_nobody_has'"),
    pytest.param("--operation norm.rsm", "unknown operation 'norm.rsm'", marks=pytest.mark.slow),
    ("--kernel nobody.*", "wanted kernels, got none of nobody.*;"),
])  # fmt: skip
def test_a_question_that_makes_no_sense_exits_with_2(line, problem):
    result = command(line)
    assert result.exit_code == 2, result.output
    assert problem in result.stderr


@pytest.mark.slow
def test_the_documented_examples_work(capsys):
    for example in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "conformance.md").read_text(), re.DOTALL):
        exec(compile(example, "docs/conformance.md", "exec"), {})
    assert "torch.rms_norm: " in capsys.readouterr().out


@pytest.mark.slow
def test_mistakes_with_the_codes_of_a_weight_are_found():
    """Swapped nibbles, the next group's and the next row's scale, a zero point off by one, no act-order."""
    report = conformance.run(["planted.weight_*"], modules=["planted_weights"], calls=6, seconds=60, device="cpu")
    assert report.kernel("planted.weight_sound").ok
    for name in ("nibbles", "group", "neighbour", "zero", "order"):
        found = report.kernel(f"planted.weight_{name}").problems
        assert any(each.status == "wrong" and "elements too far" in each.message for each in found), name


@pytest.mark.slow
def test_mistakes_with_the_rotation_of_a_weight_are_found():
    """A rotation that is left out, has another size, scale or order, or is done twice; nvfp4 that is read as mxfp4."""
    report = conformance.run(["planted.rotation_*"], modules=["planted_weights"], calls=24, seconds=60, device="cpu")
    assert report.kernel("planted.rotation_right").ok
    for name in ("dropped", "unscaled", "smaller", "sequency", "twice", "nvfp4_as_mxfp4"):
        found = report.kernel(f"planted.rotation_{name}").problems
        assert any(each.status == "wrong" and "elements too far" in each.message for each in found), name
