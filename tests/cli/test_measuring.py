"""``layerzero tune`` and ``layerzero bench``: tables, documents, pages and pictures, exit codes."""

from __future__ import annotations

import json
import math
import shlex
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import rms_norm
from typer.testing import CliRunner

import layerzero as lz
from drawing import at_once
from layerzero.cli import bench_tables, flags
from layerzero.cli.app import main
from layerzero.core.operation import Work
from layerzero.ops import OPERATIONS
from layerzero.ops.attention.declare import visible_pairs
from layerzero.tuning.measurement import admission as ceilings
from layerzero.tuning.measurement.admission import Ceiling, ceiling
from layerzero.tuning.measurement.bench import TORCH
from layerzero.tuning.measurement.jobs import Job, jobs_of_cases
from others import OTHERS

QUICK = "--dtype float32 --samples 3 " + " ".join(f"--without {name}" for name in OTHERS)


def run(line, code=0):
    result = CliRunner().invoke(main, shlex.split(line), prog_name="layerzero", env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result


def answer(line, code=0):
    return json.loads(run(f"{line} --json", code).stdout)


def calls(line, code=0):
    return answer(line, code)["calls"]


@pytest.fixture(autouse=True)
def small_ceiling(monkeypatch):
    lz.configure(deny=OTHERS)  # nor may one be chosen that does not run
    monkeypatch.setattr("layerzero.tuning.measurement.bench.ceiling", lambda *_: Ceiling(10.0, 0.1))


def test_bench_compares_everything_with_everything():
    (found,) = calls(f"bench rms_norm --shapes 8x64 {QUICK}")
    lines = {line["name"]: line for line in found["kernels"]}
    assert {"torch.rms_norm", TORCH} <= set(lines)
    assert [line["name"] for line in found["kernels"] if line["chosen"]] == [found["chosen"]]
    ours = lines["torch.rms_norm"]
    assert ours["gb_s"] == pytest.approx(2 * 8 * 64 * 4 / ours["median_us"] / 1e3)
    assert ours["ceiling_share"] == pytest.approx(found["bytes"] / 10.0 / 1e3 / ours["median_us"])
    assert ours["against_torch"] == pytest.approx(lines[TORCH]["median_us"] / ours["median_us"])
    assert 0 < ours["error"] < 1e-5
    assert "quack.rms_norm" in found["refused"]
    medians = [line["median_us"] for line in found["kernels"]]
    assert medians == sorted(medians)
    assert found["call"]["rows"] == 8
    assert lz.explain("rms_norm", torch.randn(8, 64), torch.ones(64)).chosen.time_us is None  # no time is remembered


def test_bench_looks_at_no_call_when_its_time_is_over(monkeypatch):
    looked_at, real = [], Job.facts
    monkeypatch.setattr(Job, "facts", lambda job, device: (looked_at.append(job.name), real(job, device))[1])
    run("bench rms_norm --budget-s 1e-9", code=1)
    assert looked_at == []


def test_bench_leaves_out_what_memory_does_not_hold_and_says_so(monkeypatch):
    asked = f"bench rms_norm --shapes 8x64,9x64 {QUICK}"
    place = "layerzero.tuning.measurement.comparison.too_large"
    monkeypatch.setattr(place, lambda facts: "no room" if facts.size("rows") == 9 else "")
    found = answer(asked)
    assert [each["call"]["rows"] for each in found["calls"]] == [8]
    assert (found["skipped"], found["cut"]) == ({"norm.rms 9x64 float32": "no room"}, False)
    told = run(asked)
    assert "1 of 2: norm.rms 8x64 float32: torch." in told.stderr
    assert "not measured: norm.rms 9x64 float32: no room" in told.stderr
    assert "not measured: norm.rms 9x64 float32: no room" in told.stdout

    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 76 bytes\nmore")

    monkeypatch.setattr("layerzero.tuning.measurement.comparison.bench", full)
    assert "can't allocate memory: you tried to allocate 76 bytes\n" in run(asked, code=1).stderr


def test_bench_runs_the_kernels_that_are_named_in_the_dtypes_that_they_have():
    @lz.register_kernel("norm.rms", "mine.half", supported_dtypes=["float16", "bfloat16"])
    def half(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps)

    @lz.register_kernel("norm.rms", "mine.single", supported_dtypes=["float32"])
    def single(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps)

    def asked(kernels, *more):
        found = calls(f"bench rms_norm --shapes 8x64 --samples 3 {' '.join(f'--kernel {each}' for each in kernels)}")
        return {each["call"]["dtype"]: {line["name"] for line in each["kernels"]} - {TORCH} for each in found}

    assert asked(["mine.half"]) == {"bfloat16": {"mine.half"}}
    assert asked(["mine.single"]) == {"float32": {"mine.single"}}
    assert asked(["mine.*"]) == {"float32": {"mine.single"}, "bfloat16": {"mine.half"}}
    (found,) = calls("bench rms_norm --shapes 8x64 --samples 3 --kernel mine.single")
    assert found["refused"] == {}, "others are not spoken of"
    assert "which names none here" in run("bench rms_norm --kernel nobody.*", code=2).output


@pytest.mark.parametrize(("state", "told"), [("load=high", "load=high: these times are rough"), ("load=low", "")])
def test_bench_tells_noise_and_when_times_are_rough(state, told, monkeypatch):
    monkeypatch.setattr("layerzero.tuning.storage.environment.condition", lambda _: state)
    (found,) = calls(f"bench rms_norm --shapes 8x64 {QUICK}")
    assert found["condition"] == state
    assert all(line["noise"] is not None for line in found["kernels"] if line["median_us"] is not None)
    text = run(f"bench rms_norm --shapes 8x64 {QUICK}").stdout
    assert "noise" in text
    assert told in text
    assert ("these times are rough" in text) is bool(told)


def test_bench_shows_what_is_chosen_and_why_others_are_refused():
    text = run(f"bench attention --shapes 1x8x4x16:1x8x2x16 {QUICK}").stdout
    assert "attention.gqa.prefill 1x8x4x16:1x8x2x16 float32" in text
    assert "chosen: " in text
    assert any(line.split()[:1] == [">"] for line in text.splitlines())
    assert "ceiling 10 GB/s" in text
    assert "not for this machine: flash_attn.v3" in text


def test_a_wrong_kernel_is_a_line_and_an_exit_code():
    @lz.register_kernel("norm.rms", "mine.wrong", supported_dtypes=["float32"])
    def wrong(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps) + 1

    result = run(f"bench rms_norm --shapes 8x64 {QUICK}", code=1)
    assert "mine.wrong: result 0: 512 of 512 elements too far" in result.stdout


def test_a_page_holds_everything_in_one_file(tmp_path):
    page, picture = tmp_path / "norms.html", tmp_path / "norms.png"
    run(f'bench "norm.*" --shapes 8x64,16x64 {QUICK} --html {page} --plot {picture}')
    text = page.read_text()
    norms = [name for name in OPERATIONS if name.startswith("norm.")]
    assert text.count("<svg") == text.count("<h2>") == len(norms)
    assert text.count("<h3>") == 2 * len(norms)
    assert 'class="chosen"' in text
    assert "<script src" not in text
    assert "<link" not in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_flags_that_mean_nothing_fail_before_anything_is_measured(tmp_path):
    assert "wanted a name that ends in .png" in run(f"bench rms_norm --plot {tmp_path / 'x.doc'}", code=2).output
    assert "wanted sizes like" in run("bench rms_norm --shapes 4xx4", code=2).output
    assert "either --shapes or --cases" in run("tune rms_norm --cases --shapes 4x4", code=2).output
    assert "wanted a module that imports" in run("tune rms_norm --module there_is_none", code=2).output
    assert "unknown dtype" in run("tune rms_norm --dtype float31", code=2).output
    assert "wanted CUDA" in run("tune rms_norm --shapes 4x4 --graph", code=2).output.replace("a CUDA", "CUDA")


def test_without_matplotlib_its_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        bench_tables.check(None)


def test_tune_measures_once_and_says_who_won():
    first = run(f"tune rms_norm --shapes 8x64,8x128 {QUICK} --no-isolation").stdout
    assert "2 calls measured" in first
    assert "norm.rms 8x64 float32" in first
    again = answer(f"tune rms_norm --shapes 8x64,8x128 {QUICK} --no-isolation")
    assert (again["known"], again["measured"]) == (2, [])
    assert lz.explain("rms_norm", torch.randn(8, 64), torch.ones(64)).chosen.provenance == "measured"


def test_tune_with_nothing_done_exits_with_1():
    assert answer(f"tune rms_norm --shapes 8x64 {QUICK} --budget-s 0", code=1)["left"] == 1


def test_threads_hold_for_the_command_only():
    before = torch.get_num_threads()
    run(f"tune rms_norm --shapes 8x64 {QUICK} --no-isolation --threads 1")
    assert torch.get_num_threads() == before


# work and ceilings


MOVES_ALONE = {
    *("elementwise.cast", "embedding.lookup", "embedding.lookup.shard", "kv.append.paged", "kv.append.contiguous"),
    *("kv.append.batched", "kv.append.tiled"),
    *("kv.append.quantized", "kv.copy_blocks", "kv.gather.paged"),
    *("tensor.copy_slice", "tensor.split_qkv", "tensor.transpose_head_token", "tensor.transpose_token_head"),
    *("comm.all_gather", "comm.all_to_all"),
    "sampling.bitmask",  # bits, which are no sums
    "sampling.bias",  # a copy, but for the few numbers that it is named for
}
UNKNOWN = {"posenc.alibi"}  # its lengths are passed, so that no fact tells them


@at_once("name", sorted(OPERATIONS.keys() - UNKNOWN))
def test_every_operation_says_how_much_there_is_to_do(name):
    facts = next(jobs_of_cases([name], ["bfloat16"])).facts("cpu")
    work = OPERATIONS[name].work(facts)
    assert work.bytes > 0
    assert (work.flops > 0) == (name not in MOVES_ALONE)


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_an_operation_whose_sizes_are_passed_has_no_work(name):
    assert OPERATIONS[name].work is None


@at_once("queries", [1, 3, 7])
@at_once("keys", [3, 7, 9])
@at_once("causal", [True, False])
@at_once("window", [None, (2, 0), (1, 3), (-1, 2), (0, 0)])
def test_pairs_are_those_that_the_mask_shows(queries, keys, causal, window):
    left, right = window or (-1, -1)
    seen = 0
    for query in range(queries):
        place = keys - queries + query
        for key in range(keys):
            hidden = causal and key > place
            hidden |= left >= 0 and key < place - left
            hidden |= right >= 0 and key > place + right
            seen += not hidden
    assert visible_pairs(queries, keys, causal, window) == seen


def test_a_ceiling_is_measured_once():
    found = ceiling(torch.device("cpu"), "float32")
    assert found.gb_s > 0
    assert found.tflop_s > 0
    assert ceiling(torch.device("cpu"), "float32") is found
    assert found.least_us(Work(0.0, found.gb_s * 1e3)) == pytest.approx(1.0)
    assert found.least_us(Work(found.tflop_s * 1e6, 0.0)) == pytest.approx(1.0)


@pytest.mark.parametrize(("slowness", "size"), [(1.0, 128), (1e-3, 256), (1e-9, 1024)])
def test_a_ceiling_multiplies_no_more_than_it_needs(slowness, size, monkeypatch):
    """Torch multiplies float8 on a CPU number by number."""
    sizes = []
    clock = SimpleNamespace(once=lambda run: slowness * run().shape[0] ** 3)
    monkeypatch.setattr(ceilings, "clock_of", lambda _: clock)
    monkeypatch.setattr(ceilings, "_best_us", lambda _, run: sizes.append(run().shape[0]) or 1.0)
    monkeypatch.setattr(ceilings, "_copy_gb_s", lambda *_: 1.0)
    monkeypatch.setitem(ceilings._MATRIX, "cpu", 1024)
    assert ceilings._measured.__wrapped__("cpu", "float32", 1).tflop_s == 2 * size**3 / 1e6
    assert sizes == [size]


@pytest.mark.parametrize(("worked_s", "left_s"), [(0.0, 90.0), (8.0, 82.0), (300.0, 45.0)])
def test_a_budget_counts_from_where_the_process_began(monkeypatch, worked_s, left_s):
    """Importing takes seconds on a slow host; a process that did other things before measures all the same."""
    monkeypatch.setattr(flags.time, "process_time", lambda: worked_s)
    assert flags.left_of(90.0) == left_s
    began = flags.deadline_of(90.0)
    assert began.until - began.began == pytest.approx(left_s)  # of a clock that may be large
    assert flags.deadline_of(math.inf).left_s == math.inf
    given = []

    def tune(*_, budget_s, **__):
        given.append(budget_s)
        raise ValueError("seen")

    monkeypatch.setattr("layerzero.cli.tune.tune", tune)
    for more in ("--budget-s 90", ""):
        assert CliRunner().invoke(main, shlex.split(f"tune rms_norm --shapes 8x64 {more}")).exit_code
    assert given == [left_s, None]


@at_once("device", ["meta", 5.5])
def test_what_runs_kernels_says_that_a_device_is_not_here(device):
    for asked in (lz.tune, lz.warmup, lz.vet, lz.readiness_check):
        with pytest.raises(ValueError, match="device: wanted "):
            asked(device=device)


def test_shapes_that_are_no_list_and_dtypes_that_are_no_name_are_named():
    for asked in (lz.tune, lz.warmup, lz.vet):
        with pytest.raises(TypeError, match=r"shapes: wanted a list of shapes, such as \[\(4, 64\)\], got 5"):
            asked("rms_norm", shapes=5)
    with pytest.raises(TypeError, match="dtype: wanted a dtype or its name"):
        lz.warmup("rms_norm", [(4, 64)], dtype=5)


@pytest.mark.skipif(torch.cuda.device_count() > 77, reason="a device has this number")
def test_tuning_for_a_device_that_is_not_here_says_so():
    with pytest.raises(ValueError, match="wanted a device of this machine"):
        lz.tune("rms_norm", [(4, 4)], device="cuda:77")
