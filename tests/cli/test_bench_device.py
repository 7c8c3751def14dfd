"""``layerzero bench --timed``: the device's time beside the call's, on a device that only counts."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from torch.nn.functional import rms_norm
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli import bench as command
from layerzero.cli.app import main
from layerzero.core.operation import Case
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import duplicate
from layerzero.tuning.measurement import bench as measured
from layerzero.tuning.measurement.admission import Ceiling
from layerzero.tuning.measurement.bench import MOST_BYTES, TORCH, UNSAFE, TimedBy, on_device
from layerzero.tuning.measurement.clocks import clock_of
from layerzero.tuning.measurement.jobs import Job
from others import OTHERS

QUICK = "bench rms_norm --shapes 8x64 --dtype float32 --samples 3"
CACHE = 8 * 1024
"""Twice as much is 4 calls of 8 rows of 64 in float32, each of which reads and writes 2 KiB of them."""


class Counting:
    """Every call takes 7 us, and what draws raises when it is captured."""

    seen: list[int]

    def __init__(self):
        type(self).seen = []

    def captured(self, calls):
        results = [call() for call in calls]  # a plan that is not for the copies would raise here
        type(self).seen.append(len({result.data_ptr() for result in results}))
        return lambda: 7.0 * len(calls)

    def elapsed_us(self, run, times):
        return times * run()


@pytest.fixture
def counting(monkeypatch):
    lz.configure(deny=OTHERS)
    monkeypatch.setattr("layerzero.tuning.measurement.bench.ceiling", lambda *_: Ceiling(10.0, 0.1))
    monkeypatch.setattr("layerzero.tuning.measurement.clocks.Graphs", Counting)
    monkeypatch.setattr(measured, "cache_bytes", lambda _: CACHE)
    monkeypatch.setattr(command, "timed_of", lambda text, _: TimedBy(text or "both"))

    @lz.register_kernel("norm.rms", "mine.safe", supported_dtypes=["float32"], graph_safe=True)
    def safe(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps)

    @lz.register_kernel("norm.rms", "mine.unsafe", supported_dtypes=["float32"])
    def unsafe(input, weight, *, eps):
        return rms_norm(input, weight.shape, weight, eps)


def run(line, code=0):
    result = CliRunner().invoke(main, shlex.split(line), prog_name="layerzero", env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def answer(line):
    (found,) = json.loads(run(f"{line} --json").stdout)["calls"]
    return found, {line["name"]: line for line in found["kernels"]}


def test_both_times_stand_side_by_side(counting):
    found, lines = answer(QUICK)
    assert found["timed"] == "both"
    mine = lines["mine.safe"]
    assert (mine["device_us"], mine["device_from"], mine["device_detail"]) == (7.0, "graph, cold", "")
    assert mine["median_us"] != 7.0
    assert mine["gb_s"] == pytest.approx(found["bytes"] / mine["median_us"] / 1e3), "rates are those of the call"
    assert lines[TORCH]["device_us"] == 7.0
    text = run(QUICK).stdout
    assert {"median us", "device us", "device from"} <= {part.strip() for part in text.replace("  ", "\n").splitlines()}
    assert "graph, cold" in text


def test_a_kernel_that_cannot_be_captured_says_so(counting):
    _, lines = answer(QUICK)
    assert lines["mine.unsafe"]["device_detail"] == UNSAFE
    assert lines["mine.unsafe"]["device_us"] == lines["mine.unsafe"]["events_us"]
    assert f"mine.unsafe: not captured in a CUDA graph: {UNSAFE}; no device time" in run(QUICK).stdout


def test_a_time_between_events_stands_in_where_there_is_one(counting, monkeypatch):
    class Events(clock_of("cpu").__class__):
        def sample(self, run, about_us):
            return super().sample(run, about_us)._replace(device_us=11.0)

        def calmer(self):  # where times differ, as on a busy machine, the CPU's own would take over
            return None

    monkeypatch.setattr("layerzero.cli.bench.clock_of", lambda _: Events())
    _, lines = answer(QUICK)
    assert (lines["mine.unsafe"]["device_us"], lines["mine.unsafe"]["device_from"]) == (11.0, "events")
    assert (lines["mine.safe"]["device_us"], lines["mine.safe"]["events_us"]) == (7.0, 11.0)
    assert "one launch between two events instead" in run(QUICK).stdout


def test_by_the_device_alone_everything_goes_by_its_time(counting, tmp_path):
    found, lines = answer(f"{QUICK} --timed device")
    mine = lines["mine.safe"]
    assert mine["gb_s"] == pytest.approx(found["bytes"] / 7.0 / 1e3)
    assert mine["ceiling_share"] == pytest.approx(found["bytes"] / 10.0 / 1e3 / 7.0)
    assert mine["against_torch"] == pytest.approx(1.0)
    assert lines["mine.unsafe"]["gb_s"] is None
    page = tmp_path / "bench.html"
    text = run(f"{QUICK} --timed device --html {page}").stdout
    assert "median us" not in text
    assert "<th>device us</th>" in page.read_text()
    assert "not captured in a CUDA graph" in page.read_text()


def test_call_times_alone_capture_nothing(counting, monkeypatch):
    monkeypatch.setattr("layerzero.tuning.measurement.bench.on_device", pytest.fail)
    found, lines = answer(f"{QUICK} --timed call")
    assert found["timed"] == "call"
    assert all(line["device_us"] is None for line in lines.values())
    assert "device us" not in run(f"{QUICK} --timed call").stdout


def test_a_cpu_has_no_time_of_its_own():
    result = run(f"{QUICK} --device cpu --timed device", code=2)
    assert "--timed device: wanted a CUDA device, got cpu" in result.output
    assert "--timed: wanted one of call, device, both, got 'sometimes'" in run(f"{QUICK} --timed sometimes", 2).output
    plain = run("bench tokenize --param tokenizer_id=cl100k_base --timed device", 2).output
    assert "--timed: wanted call for an operation without tensors" in plain
    assert command.timed_of(None, torch.device("cpu")) is TimedBy.CALL
    assert command.timed_of(None, torch.device("cuda")) is TimedBy.BOTH
    assert command.timed_of("device", torch.device("cuda")) is TimedBy.DEVICE


def timed_once(job, held):
    call = job.make("cpu")
    report = lz.explain(call.function, **call.arguments)
    return call, on_device(call, report, {report.kernel_id}, graphs=Counting(), cache=held)[report.kernel_id]


def test_copies_reach_beyond_the_cache_and_results_do_not_meet(counting):
    job = Job("norm.rms", Case("8x64", {"rows": 8, "hidden": 64}), "float32")
    _, found = timed_once(job, CACHE)
    assert (found.time_us, found.cache) == (7.0, "cold")
    assert Counting.seen[0] >= 4, "results are kept apart"
    assert timed_once(job, 2**30)[1].cache == "warm"


def test_what_shares_memory_shares_it_in_copies():
    case = Case("4", {"batch": 1, "seq": 4, "heads": 2, "kv_heads": 1, "head_dim": 8, "rotary_half": 4, "table": 16})
    call = Job("posenc.rope", case, "float32").make("cpu")
    cos, sin = call.arguments["cos"], call.arguments["sin"]
    assert cos.untyped_storage().data_ptr() == sin.untyped_storage().data_ptr()
    copy = duplicate(call).arguments
    assert copy["cos"].untyped_storage().data_ptr() == copy["sin"].untyped_storage().data_ptr()
    assert copy["cos"].untyped_storage().data_ptr() != cos.untyped_storage().data_ptr()
    for name in ("query", "key", "cos", "sin"):
        assert torch.equal(copy[name], call.arguments[name])
        assert copy[name].stride() == call.arguments[name].stride()


def test_copies_of_a_call_have_caches_and_steps_of_their_own():
    cache = lz.KVCache(1, 2, 32, pages=8, page_size=16, dtype=torch.float32)
    step = cache.writing([cache.allocate()], [5])
    call = RandomCall("paged_attention", {"query": torch.randn(5, 8, 32), "key_cache": cache.layer(0), "step": step})
    copy = duplicate(call).arguments
    for name in ("query", "key_cache", "value_cache", "block_tables", "context_lens", "cu_seqlens_q"):
        assert torch.equal(copy[name], call.arguments[name])
        assert copy[name].data_ptr() != call.arguments[name].data_ptr()
    assert copy["step"].block_tables is copy["block_tables"]
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    each = {"query": torch.randn(5, 2, 8), "key": torch.randn(5, 2, 8), "value": torch.randn(5, 2, 8)}
    ragged = RandomCall("ragged_attention", each | {
        "cu_seqlens_q": starts, "cu_seqlens_k": starts, "step": lz.RaggedMetadata(starts, starts)
    })  # fmt: skip
    copy = duplicate(ragged).arguments
    assert copy["step"].belongs(copy["cu_seqlens_q"], copy["cu_seqlens_k"])


def test_a_handle_that_nobody_can_make_again_is_warm(counting, monkeypatch):
    weight = torch.randn(64, 64)
    call = RandomCall("linear", {"input": torch.randn(8, 64), "weight": weight, "packed": lz.PackedWeight(weight)})
    report = lz.explain(call.function, **call.arguments)

    def state():
        return on_device(call, report, {report.kernel_id}, graphs=Counting(), cache=8 * CACHE)[report.kernel_id].cache

    assert state() == "cold"
    monkeypatch.setattr(measured, "duplicate", lambda each: RandomCall(each.function, dict(each.arguments)))
    assert state() == "warm"


def test_a_call_that_brings_too_much_memory_is_not_copied(counting, monkeypatch):
    job = Job("norm.rms", Case("8x64", {"rows": 8, "hidden": 64}), "float32")
    monkeypatch.setattr(measured, "MOST_BYTES", 1024)
    assert MOST_BYTES > 2**30
    assert timed_once(job, CACHE)[1].cache == "warm"
